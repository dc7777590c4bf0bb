"""Tables of the limits of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.limits.profiles.lookup import SOURCED
from proxy.limits.profiles.profile import Profile

WIDE = 150
"""Columns of tables that don't go to a terminal."""


FOLDED = 20
"""Characters of a line of a folded name, at least."""


def wide_console() -> Console:
    """Return the console for tables. In a file or a pipe it has room for long names."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console


def print_table(table: Table, console: Console) -> None:
    """Print a table without cutting a value.

    Columns of names, which aren't justified right, are folded if needed. If the terminal is still too narrow, print a
    block of lines for each row.
    """
    needed = 1
    for column in table.columns:
        width = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        column.no_wrap = column.justify == "right" or width <= FOLDED
        column.overflow = "fold"
        needed += 3 + (width if column.no_wrap else FOLDED)
    if needed <= console.width:
        console.print(table, markup=False, highlight=False)
        return
    if table.title:
        console.print(table.title, markup=False, highlight=False)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        block = Table.grid(padding=(0, 2))
        block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for column, cell in zip(table.columns, row, strict=True):
            block.add_row(column.header, cell)
        console.print()
        console.print(block, markup=False, highlight=False)


def rows(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Return each field of a profile, its value as text, and its source. Numbers have thousands separators."""
    for field in SOURCED:
        value = getattr(profile, field)
        text = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
        yield field, text, profile.sources.get(field, "unknown")


def render(profiles: Iterable[Profile], console: Console) -> None:
    """Print one table per profile, with its note below."""
    for profile in profiles:
        table = Table("field", "value", "source", title=Text(profile.model), title_justify="left")
        for row in rows(profile):
            table.add_row(*map(Text, row))
        console.print(table)
        if profile.note:
            console.print(f"note: {profile.note}", markup=False, highlight=False)
