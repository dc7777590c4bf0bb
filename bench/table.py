"""Print the table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from bench.figures import PASSTHROUGH, Row

MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: ""}
"""How the table shows whether a target is met."""


def show(rows: Sequence[Row], rounds: int, cores: tuple[int, int], console: Console) -> None:
    """Print all rows: medians, and the ratios of consecutive rounds with their range."""
    table = Table(
        title="The proxy compared with a minimal pass-through (Starlette, uvicorn, aiohttp)",
        caption=(
            f"Medians of {rounds} alternating rounds. Brackets: the lowest and highest ratio of consecutive rounds. "
            f"Both servers run on core {cores[0]}, upstream and client on core {cores[1]}. CPU is of the whole process."
        ),
    )
    table.add_column("case")
    for name in (PASSTHROUGH, "proxy", "ratio", "target"):
        table.add_column(name, justify="right")
    table.add_column("met", justify="center")
    for row in rows:
        table.add_row(
            row.name, _other(row), _figure(row.proxy, row.unit), _ratio(row), _target(row),
            MARKS[row.met],
        )  # fmt: skip
    console.print(table)


def _figure(figures: Sequence[float], unit: str) -> str:
    return f"{digits(median(figures))} {unit}" if figures else ""


def _other(row: Row) -> str:
    named = "" if row.compared == PASSTHROUGH else f"{row.compared}: "
    return f"{named}{_figure(row.reference, row.unit)}" if row.reference else ""


def _ratio(row: Row) -> str:
    ratios = row.ratios
    return f"{median(ratios):.2f} × ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    return f"≤ {row.target.at_most:g} {'×' if row.target.of == 'ratio' else row.unit}"


def write_json(file: Path | None, value: object) -> None:
    """Write a value as indented JSON, if there is a file to write to."""
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def digits(figure: float) -> str:
    """Format a figure with about three digits. More would be noise."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"
