"""Print tables for people, without cutting a value."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

WIDE = 150
"""Columns of tables that don't go to a terminal."""


FOLDED = 20
"""Characters of a line of a folded name, at least."""


def table_console() -> Console:
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
