"""``python -m bench.quality``: the proxy's engine and LangChain's on the same conversations.

``judge`` defines the figures. The benchmark calls no model. LangChain runs in its own environment
(``requirements.lock``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import click

from bench import DATA
from bench.quality import conformance
from bench.quality.engine import running
from bench.quality.langchain import MIDDLEWARE, TUNED, langchain
from bench.quality.rows import Case, cases, measure
from bench.quality.text import OURS
from bench.table import NOTHING, table

LABELS = {OURS: OURS, MIDDLEWARE: "LangChain", TUNED: "LangChain, tuned"}

NOTES = """
LangChain is {versions}: SummarizationMiddleware with the trigger ('fraction', 0.85), otherwise with its defaults.
Tuned: with an exact token_counter, and trim_tokens_to_summarize None.
Two figures are for a summary model that repeats the beginning of its input, and for one that extracts identifiers.
Figures are of requests larger than the window. Dropped facts: facts of messages that aren't in the prompt unchanged,
but are still readable in it. With archive: also those in the archive under an id in the prompt. In budget: of the first
and newest user messages that fit the tokens that the default policy reserves. Prefix stays: tokens of a prompt that
also begin the next one. Tokens are per prompt; summary calls and the tokens that they read are per conversation."""


def _percent(value: float) -> str:
    return f"{value:.1%}" if 0.98 <= value < 1 or 0 < value < 0.01 else f"{value:.0%}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}K" if value < 100_000 else f"{value / 1000:.0f}K"


def _number(value: float) -> str:
    return f"{value:.0f}" if value in (0, 1) or value >= 10 else f"{value:.1f}"


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "too long": ("over", _percent),
    "invalid": ("invalid", _percent),
    "dropped facts": ("facts", _percent),
    "with archive": ("archive", _percent),
    "file paths": ("paths", _percent),
    "user messages": ("users", _percent),
    "in budget": ("users_in_budget", _percent),
    "prefix stays": ("stays", _percent),
    "tokens": ("tokens", _thousands),
    "summary calls": ("summaries", _number),
    "they read": ("read", _thousands),
}

BY_SUMMARIZER = frozenset({"facts", "archive", "paths", "users", "users_in_budget"})
"""Figures that depend on the summary model."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A few generated conversations, in one window, and no recorded ones.")
@click.option("--sessions", "folder", type=click.Path(path_type=Path), default=DATA / "sessions", show_default=False,
              help="The folder with recorded sessions. Without it the table has no rows for them.")  # fmt: skip
@click.option("--kit", is_flag=True, help="Compare with the compactors of compaction-conformance-kit on its sessions.")
def main(quick: bool, folder: Path, kit: bool) -> None:
    """Compare the engine with LangChain's on the same conversations, and print the table."""
    if kit:
        click.echo(conformance.measure())
        return
    chosen = cases(None, seeds=1, windows=(16_384,)) if quick else cases(folder, seeds=2, windows=(16_384, 32_768))
    rows, versions = asyncio.run(compare(chosen))
    click.echo(table(("conversations", "engine", *COLUMNS), rows, left={"engine"}))
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    click.echo(NOTES.format(versions=named or "not installed"))


async def compare(chosen: Sequence[Case]) -> tuple[list[list[str]], Mapping[str, str]]:
    """Return the rows of all cases, and the versions of LangChain's packages."""
    rows = []
    with langchain() as other:
        async with running() as engine:
            for case in chosen:
                click.echo(f"{case.name}, {case.window:,} ...", err=True)
                found = await measure(case, engine, other)
                number = len(case.conversations)
                title = f"{case.name}, {case.window // 1024}K" + (f" ({number})" if number > 1 else "")
                for name, label in LABELS.items():
                    figures = [one.values() for one in found[name].values()]
                    rows.append([title, label, *(cell(figures, *column) for column in COLUMNS.values())])
        return rows, other.versions if other else {}


def cell(figures: Sequence[Mapping[str, float | None]], name: str, form: Callable[[float], str]) -> str:
    """Format different figures like ``5/28%``. Return the mean if the figure doesn't depend on the summarizer."""
    known = [value for found in figures if (value := found[name]) is not None]
    if not known:
        return NOTHING
    if name not in BY_SUMMARIZER:
        return form(mean(known))
    *others, last = dict.fromkeys(map(form, known))
    return "/".join([*(other.removesuffix("%") for other in others), last])


if __name__ == "__main__":
    main()
