"""Print tables for people, without cutting a value."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

WIDE = 250  # columns of tables that don't go to a terminal


def table_console() -> Console:
    """Return the console for tables. In a file or a pipe it has room for long names, unless ``COLUMNS`` says less."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, WIDE)
    return console


def print_table(table: Table, console: Console) -> None:
    """Print a table, or a block of lines for each row if the terminal is too narrow.

    Columns of names are folded. Those of figures, which are justified right, aren't.
    """
    for column in table.columns:
        column.no_wrap, column.overflow = column.justify == "right", "fold"
    if console.measure(table, options=console.options.update(max_width=sys.maxsize)).minimum <= console.width:
        console.print(table, markup=False, highlight=False)
        return
    if table.title:
        console.print(table.title, markup=False, highlight=False)
    for row in zip(*(column.cells for column in table.columns), strict=True):
        block = Table.grid(padding=(0, 2))
        block.add_column(no_wrap=True)
        block.add_column(overflow="fold")
        for column, cell in zip(table.columns, row, strict=True):
            block.add_row(str(column.header).replace("\n", " "), cell)
        console.print()
        console.print(block, markup=False, highlight=False)
