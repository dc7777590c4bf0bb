"""Print the rows, and convert them for JSON and for the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.quality.need.rows import SUMMARIZER, Row
from bench.quality.need.score import KINDS, agreement, averaged, median_size, summed
from bench.quality.rows import OURS
from bench.quality.table import LABELS, NOTHING

COLUMNS = ("source", "cases", "window", "method", "tokens", "too long", "files", "control", "of the rest",
           "identifiers", "control", "of the rest")  # fmt: skip
_LEFT = ("source", "method")


def raw(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return all rows for JSON."""
    return [
        {
            "source": row.source,
            "window": row.window,
            "windows": row.windows,
            "too_long": row.too_long,
            "method": row.method,
            "tokens": median_size(row.scores),
            **{
                kind: {
                    "sum": summed(row.scores, kind),
                    "mean": averaged(row.scores, kind),
                    "agreement": agreement(row.scores, kind),
                }
                for kind in KINDS
            },
            "cases": [
                {"id": score.id, "tokens": score.tokens, "lost": score.lost, "counted": score.counted}
                | {kind: vars(found) for kind, found in score.found.items()}
                for score in row.scores
            ],
        }
        for row in rows
    ]


def show(rows: Sequence[Row], versions: Mapping[str, str], console: Console) -> None:
    """Print the rows: sums over all cases, then means over the cases."""
    for name, aggregate in (("sums over all cases", summed), ("means over the cases", averaged)):
        table = Table(title=f"Names in the next calls that the prompt still has, {name}", caption=caption(versions))
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
        for row in rows:
            shares = [_percent(share) for kind in KINDS for share in aggregate(row.scores, kind).values()]
            table.add_row(*_head(row), *shares, style="bold" if row.method == OURS else None)
        console.print(table)
    for row in rows:
        if row.method == OURS:
            console.print(agreeing(row))


def agreeing(row: Row) -> str:
    """Return a line with the rank correlation of the record's share with the measured one."""
    files, identifiers = (agreement(row.scores, kind) for kind in KINDS)
    return (
        f"{row.source}, {row.window:,}: rank correlation (Spearman) of the names kept by the record with those in the "
        f"prompt: files {_correlation(files)}, identifiers {_correlation(identifiers)}"
    )


def _correlation(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def markdown(rows: Sequence[Row]) -> str:
    """Return the table of ``docs/benchmarks.md``: sums over all cases."""
    head = [*COLUMNS[:7], "files of the rest", "identifiers", "identifiers of the rest"]
    lines = [head, ["---" if name in _LEFT else "---:" for name in head]]
    for row in rows:
        shares = [summed(row.scores, kind)[part] for kind in KINDS for part in ("prompt", "rest")]
        lines.append([*_head(row), *map(_rounded, shares)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def caption(versions: Mapping[str, str]) -> str:
    """Return the settings of the methods, and the meaning of the columns."""
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    ours = (
        "Control: the instructions and the newest messages, cut to as many tokens (o200k_base) as the prompt. Of the "
        "rest: of the names that the control doesn't have. Tokens: the text of the prompt, median. Too long: prompts "
        "larger than the window. The project: its default policy, without a summary model."
    )
    theirs = (
        f" LangChain: SummarizationMiddleware of {named}, trigger ('fraction', 0.85), with a summary model that "
        f"returns identifiers with their surroundings ({SUMMARIZER}). Tuned: an exact token_counter, "
        "trim_tokens_to_summarize None."
    )
    return ours + theirs if versions else ours


def _head(row: Row) -> list[str]:
    low, high = min(row.windows), max(row.windows)
    window = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    sizes = (f"{median_size(row.scores):,}", str(row.too_long))
    return [row.source, str(len(row.scores)), window, LABELS.get(row.method, row.method), *sizes]


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _rounded(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 100:.0f} %"
