"""Lay out bar charts as rectangles, for SVG without scripts or styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 720, 200
LEFT, TOP, BOTTOM = 48, 8, 22
"""Pixels around the bars."""

LINES = 4
MARKS = 8
"""Days with a label, at most."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle in pixels. ``kind`` is ``a`` or ``b``."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text and its position."""

    text: str
    x: float = 0
    y: float = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """Pairs of bars by day. ``label`` describes the chart for screen readers."""

    title: str
    names: tuple[str, str]
    label: str
    bars: list[Bar]
    grid: list[Text]
    marks: list[Text]
    width: int = WIDTH
    height: int = HEIGHT
    unit: str = field(default="")


def chart(title: str, names: tuple[str, str], unit: str, days: Sequence[tuple[str, float, float]]) -> Chart:
    """Return a chart with two bars for each day: its name, and two values that aren't negative."""
    most = _round_up(max((max(a, b) for _, a, b in days), default=0))
    floor = HEIGHT - BOTTOM
    room, scale = (WIDTH - LEFT) / max(1, len(days)), (floor - TOP) / most
    bars: list[Bar] = []
    for index, (day, *values) in enumerate(days):
        width = min(room * 0.4, 24)
        start = LEFT + index * room + (room - 2 * width) / 2
        for place, value in enumerate(values):
            height = round(value * scale, 2)
            text = f"{day}: {names[place]} {_figure(value)}{unit}"
            bars.append(
                Bar(
                    round(start + place * width, 2),
                    round(floor - height, 2),
                    round(width, 2),
                    height,
                    "ab"[place],
                    text,
                )
            )
    grid = [
        Text(_short(most * line / LINES), y=round(floor - (floor - TOP) * line / LINES, 2)) for line in range(LINES + 1)
    ]
    every = max(1, -(-len(days) // MARKS))
    marks = [
        Text(day[5:], x=round(LEFT + (index + 0.5) * room, 2))
        for index, (day, *_) in enumerate(days)
        if index % every == 0
    ]
    sums = [sum(values[place] for _, *values in days) for place in (0, 1)]
    label = f"{title} over {len(days)} days: {names[0]} {_figure(sums[0])}{unit}, {names[1]} {_figure(sums[1])}{unit}"
    return Chart(title, names, label, bars, grid, marks, unit=unit)


def _round_up(value: float) -> float:
    """Return the next value of the form 1, 2, 4, or 8 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1
    power = 10.0 ** len(str(int(value))) / 10 if value >= 1 else 1.0
    while power > value:
        power /= 10
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4f}"


def _short(value: float) -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"
