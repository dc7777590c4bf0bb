"""Draw the chart: ``python -m bench.quality.chart FILE``, with the benchmark's JSON on standard input.

Runs in LangChain's environment, which has matplotlib.
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

# The engine, its name in the chart, and its color.
ENGINES = (
    ("compaction-proxy", "compaction-proxy", "#1b6ca8"),
    ("SummarizationMiddleware", "SummarizationMiddleware", "#d98324"),
    ("trim_messages", "trim_messages", "#9a9a9a"),
)
# The groups of bars: label, figure, prefixes of the cases' names, and whether to show 1 minus the figure.
SUBJECTS: tuple[tuple[str, str, tuple[str, ...], bool], ...] = (
    ("Facts of dropped messages\nstill readable, tool loops", "facts", ("tool loop",), False),
    ("Facts of dropped messages\nstill readable, multi-turn", "facts", ("multi-turn",), False),
    ("Readable, or in the archive\nunder a named id, both kinds", "archive", ("tool loop", "multi-turn"), False),
    ("File paths still readable,\ncoding session", "paths", ("coding",), False),
    ("User messages word for word,\ncoding session", "users", ("coding",), False),
    ("Valid prompts from\ndirty conversations", "invalid", ("tool loop, dirty", "multi-turn, dirty"), True),
    ("Prompts that fit the window,\nairline sessions", "over", ("airline",), True),
    ("Prompt that stays a common\nprefix, coding session", "stays", ("coding",), False),
    ("Size of a prompt, multi-turn,\nas part of the window", "size", ("multi-turn",), False),
)


def figure(rows: Sequence[Row], engine: str, name: str, cases: tuple[str, ...], *, complement: bool) -> float | None:
    """Return the mean over windows and summarizers, or ``None`` without any figure.

    For engines without an archive, ``archive`` equals ``facts``. ``size`` is the share of the window that a prompt
    takes.
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
    """Draw a group of bars for each subject that has figures."""
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
        "means over windows and two summarizers",
        fontsize=8,
        color="#555555",
    )
    pyplot.savefig(file, dpi=150)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
