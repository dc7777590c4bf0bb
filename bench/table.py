"""Print the table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.figures import Row

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}
"""Whether a target is met."""


def show(rows: Sequence[Row], rounds: int, cores: tuple[int, int], console: Console) -> None:
    """Print all rows: medians, and the ratios of neighbouring rounds with their range."""
    table = Table(
        title="The proxy beside a minimal pass-through (Starlette, uvicorn, aiohttp)",
        caption=(
            f"Medians of {rounds} interleaved rounds; in brackets the lowest and highest ratio of two neighbours. "
            f"Both servers on core {cores[0]}, upstream and client on core {cores[1]}. CPU: of the whole process."
        ),
    )
    table.add_column("case")
    for name in ("pass-through", "proxy", "ratio", "target"):
        table.add_column(name, justify="right")
    table.add_column("met", justify="center")
    for row in rows:
        table.add_row(
            row.name, _figure(row.reference, row.unit), _figure(row.proxy, row.unit), _ratio(row), _target(row),
            MARKS[row.met],
        )  # fmt: skip
    console.print(table)


def _figure(figures: Sequence[float], unit: str) -> str:
    return f"{digits(median(figures))} {unit}" if figures else ""


def _ratio(row: Row) -> str:
    ratios = row.ratios
    return f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    return f"≤ {row.target.at_most:g} {'×' if row.target.of == 'ratio' else row.unit}"


def digits(figure: float) -> str:
    """Three digits or so: as many as a noisy machine can tell."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"
