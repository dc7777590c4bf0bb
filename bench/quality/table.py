"""Print the rows, and convert them for JSON and the chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.quality.langchain import MIDDLEWARE, TRIMMING, TUNED
from bench.quality.rows import OURS, Row
from bench.quality.stages import Alone

NOTHING = "–"
LABELS = {OURS: "compaction-proxy", MIDDLEWARE: "LangChain", TUNED: "LangChain, tuned", TRIMMING: "LangChain, trimmed"}


def _percent(value: float) -> str:
    return f"{value:.1%}" if 0.98 <= value < 1 or 0 < value < 0.01 else f"{value:.0%}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}K" if value < 100_000 else f"{value / 1000:.0f}K"


def _number(value: float) -> str:
    return f"{value:.0f}" if value in (0, 1) or value >= 10 else f"{value:.1f}"


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("too long", "over", _percent),
    ("invalid", "invalid", _percent),
    ("dropped facts", "facts", _percent),
    ("with archive", "archive", _percent),
    ("file paths", "paths", _percent),
    ("user messages", "users", _percent),
    ("… in budget", "users_in_budget", _percent),
    ("prefix stays", "stays", _percent),
    ("tokens", "tokens", _thousands),
    ("summary calls", "summaries", _number),
    ("they read", "read", _thousands),
)

BY_SUMMARIZER = frozenset({"facts", "archive", "paths", "users", "users_in_budget"})
"""Figures that depend on the summary model."""


def raw(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return all rows for JSON."""
    return [
        {
            "case": row.case,
            "window": row.window,
            "conversations": row.conversations,
            "summarizer": row.summarizer,
            "engine": row.engine,
            **row.figures.values(),
        }
        for row in rows
    ]


def show(rows: Sequence[Row], versions: Mapping[str, str], console: Console) -> None:
    """Print all rows. If summarizers give different figures, the one of ``echo`` comes before that of ``extract``."""
    table = Table(title="The proxy's engine and LangChain on the same conversations", caption=caption(versions))
    table.add_column("conversations", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name, _, _ in COLUMNS:
        table.add_column(name, justify="right", min_width=6)
    for (case, window, number), group in groupby(rows, key=lambda row: (row.case, row.window, row.conversations)):
        members = list(group)
        title = f"{case}, {window // 1024}K" + (f" ({number})" if number > 1 else "")
        for engine, label in LABELS.items():
            of_engine = [row.figures.values() for row in members if row.engine == engine]
            if of_engine:
                cells = [_cell(of_engine, name, form) for _, name, form in COLUMNS]
                table.add_row(title, label, *cells, style="bold" if engine == OURS else None)
                title = ""
        table.add_section()
    console.print(table)


def show_stages(found: Sequence[Alone], console: Console) -> None:
    """Print the tokens that the cheap stages remove without a summary."""
    table = Table(title="The cheap stages alone, without a summary: tokens of a whole conversation")
    for name in ("conversation", "original", "sent", "removed", "with every message reduced"):
        table.add_column(name, justify="left" if name == "conversation" else "right")
    for one in found:
        sizes = map(_thousands, (one.before, one.after))
        off = _percent(1 - one.after / one.before)
        table.add_row(one.case, *sizes, off, f"{_thousands(one.least)} (-{_percent(1 - one.least / one.before)})")
    console.print(table)


def _cell(figures: Sequence[Mapping[str, float | None]], name: str, form: Callable[[float], str]) -> str:
    """Format different figures like ``5/28%``. Return the mean if the figure doesn't depend on the summarizer."""
    known = [value for found in figures if (value := found[name]) is not None]
    if not known:
        return NOTHING
    if name not in BY_SUMMARIZER:
        return form(mean(known))
    *others, last = dict.fromkeys(map(form, known))
    return "/".join([*(other.removesuffix("%") for other in others), last])


def caption(versions: Mapping[str, str]) -> str:
    """Return the settings of both engines, and the meaning of the columns."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"LangChain: SummarizationMiddleware of {named}, trigger ('fraction', 0.85), otherwise its defaults (it keeps "
        "20 messages and summarizes the newest 4,000 tokens of the others). Tuned: an exact token_counter, "
        "trim_tokens_to_summarize None. Trimmed: trim_messages to 0.85 of the window, strategy 'last', start_on "
        "'human', include_system (in a tool loop only the system message remains). The project: its default policy.\n"
        "Every turn is sent, and the figures are of requests larger than the window. Two figures: with a summary model "
        "that repeats the beginning of its input / that extracts identifiers with their surroundings. Both have the "
        "same limit for all engines. Too long: prompts larger than the window, which upstreams reject. Dropped facts: "
        "facts of messages that aren't in the prompt unchanged, but are still readable in it. With archive: also those "
        "in the archive under an id in the prompt. In budget: of the first and newest user messages that fit the "
        "tokens that the default policy reserves. Prefix stays: tokens of a prompt that also begin the next one. "
        "Tokens are per prompt; summary calls and the tokens that they read are per conversation."
    )
