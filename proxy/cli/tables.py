"""Print tables for people, without cutting a value."""

from __future__ import annotations

import os

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

WIDE = 150  # columns of tables that don't go to a terminal


FOLDED = 20  # characters of a line of a folded name, at least


def table_console() -> Console:
    """Return the console for tables. In a file or a pipe it has room for long names, unless ``COLUMNS`` says less."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, WIDE)
    return console


def print_table(table: Table, console: Console) -> None:
    """Print a table without cutting a value.

    Columns of names, which aren't justified right, are folded if needed. If the terminal is too narrow for all figures,
    print several tables with the same names, or at last a block of lines for each row.
    """
    names, figures = list[Column](), list[list[Column]]([[]])
    widths = {id(column): _prepared(column) for column in table.columns}
    for column in table.columns:
        (figures[-1] if column.justify == "right" else names).append(column)
    taken = 1 + sum(widths[id(column)] for column in names)
    if taken + max((widths[id(column)] for column in figures[-1]), default=0) > console.width:
        _print_blocks(table, console)
        return
    parts = -(-sum(widths[id(column)] for column in figures[-1]) // (console.width - taken))
    most = -(-len(figures[-1]) // max(1, parts))
    for column in figures.pop():
        if (
            not figures
            or len(figures[-1]) >= most
            or taken + sum(widths[id(one)] for one in [*figures[-1], column]) > console.width
        ):
            figures.append([])
        figures[-1].append(column)
    for place, part in enumerate(figures or [[]]):
        shown = Table(title=None if place else table.title, title_justify="left")
        for column in (columns := [*names, *part]):
            shown.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
        for row, cells in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
            shown.add_row(*cells, end_section=row.end_section)
        console.print(shown, markup=False, highlight=False)


def _prepared(column: Column) -> int:
    width = max(cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).splitlines() or [""])
    column.no_wrap = column.justify == "right" or width <= FOLDED
    column.overflow = "fold"
    return 3 + (width if column.no_wrap else FOLDED)


def _print_blocks(table: Table, console: Console) -> None:
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
