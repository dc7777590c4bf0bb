"""Draws the chart. Runs in LangChain's environment, which has matplotlib: ``python -m bench.quality.chart FILE``.

Reads the JSON that the benchmark writes from standard input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

Row = dict[str, Any]

# Engine, its name in the chart, its colour.
ENGINES = (
    ("compaction-proxy", "compaction-proxy", "#1b6ca8"),
    ("SummarizationMiddleware", "SummarizationMiddleware", "#d98324"),
    ("trim_messages", "trim_messages", "#9a9a9a"),
)
# What is drawn: the words, the figure, the cases whose names begin so; of ``complement`` what is missing to 1.
SUBJECTS: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("Facts of dropped messages\nstill readable, tool loops", "facts", ("tool loop",), False),
    ("Facts of dropped messages\nstill readable, multi-turn", "facts", ("multi-turn",), False),
    ("The same, or one look-up away\nin the archive, both kinds", "archive", ("tool loop", "multi-turn"), False),
    ("File paths still readable,\ncoding session", "paths", ("coding",), False),
    ("User messages word for word,\ncoding session", "users", ("coding",), False),
    ("Valid prompts from\ndirty conversations", "invalid", ("tool loop, dirty", "multi-turn, dirty"), True),
    ("Prompts that fit the window,\nairline sessions", "over", ("airline",), True),
    ("Prompt that stays a common\nprefix, coding session", "stays", ("coding",), False),
    ("Size of a prompt, multi-turn,\nas part of the window", "size", ("multi-turn",), False),
)


def figure(rows: Sequence[Row], engine: str, name: str, cases: tuple[str, ...], *, complement: bool) -> float | None:
    """The mean over windows and summarisers; ``None`` where nothing was measured.

    Without an archive there is nothing to look up: what can be read in the prompt is all. ``size`` is that of a prompt
    as part of the window.
    """
    chosen = [row for row in rows if row["engine"] == engine and row["case"].startswith(cases)]
    if name == "size":
        values = [row["tokens"] / row["window"] for row in chosen]
    elif name == "archive":
        values = [row["facts"] if row["archive"] is None else row["archive"] for row in chosen]
    else:
        values = [row[name] for row in chosen]
    known = [1 - value if complement else value for value in values if value is not None]
    return mean(known) if known else None


def draw(measured: dict[str, Any], file: str) -> None:
    """One group of bars for each subject of which there are figures."""
    rows = measured["rows"]
    groups = []
    for words, name, cases, complement in SUBJECTS:
        values = [figure(rows, engine, name, cases, complement=complement) for engine, _, _ in ENGINES]
        if any(value is not None for value in values):
            groups.append((words, values))
    height = 0.25
    _, axes = pyplot.subplots(figsize=(9, 0.82 * len(groups) + 0.9), layout="constrained")
    for place, (_, values) in enumerate(groups):
        for number, ((_, label, colour), value) in enumerate(zip(ENGINES, values, strict=True)):
            y = place + (number - 1) * height
            if value is None:
                continue
            axes.barh(y, value, height * 0.9, color=colour)
            text = f"{value:.1%}" if 0.98 <= value < 1 else f"{value:.0%}"
            named = f"{text}  {label}" if place == 0 else text
            axes.text(value + 0.008, y, named, va="center", color=colour, fontsize=9, fontweight="bold")
    axes.set_yticks(range(len(groups)), [words for words, _ in groups])
    axes.set_ylim(len(groups) - 0.45, -0.55)
    axes.set_xlim(0, 1.08)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    versions = measured["versions"]
    axes.set_title("The same conversations through both, every turn sent", loc="left", fontweight="bold")
    axes.set_xlabel(
        f"LangChain {versions['langchain']} with its defaults, the project's default policy; "
        "means over windows and two summarisers",
        fontsize=8,
        color="#555555",
    )
    pyplot.savefig(file, dpi=150)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
