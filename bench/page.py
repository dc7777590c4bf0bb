"""``python -m bench.page NAME …``: run a benchmark, and put its table into docs/benchmarks.md, above its command."""

from __future__ import annotations

import re
import subprocess
from operator import itemgetter

import click

from bench import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def replaced(page: str, name: str, printed: str) -> str:
    """Return the page with the figures of the printed table. Raises ``ClickException`` if it lacks a row or column.

    The page decides on the columns, and on the rows by their cells that are aligned to the left.
    """
    above = re.compile(rf"(?:^\|.*\n)+(?=\n    scripts/bench {re.escape(name)}(?: |$))", re.MULTILINE)
    found = above.search(page)
    if found is None:
        raise click.ClickException(f"{PAGE}: no table above `scripts/bench {name}`. Fix: add one, with its columns.")
    columns, line, *shown = map(cells, found[0].splitlines())
    header, _, *rows = [cells(row) for row in printed.splitlines() if row.startswith("|")]
    if missing := set(columns) - {*header}:
        raise click.ClickException(f"{PAGE}: no column {min(missing)!r} for `{name}`. Fix: one of {header}.")
    key = itemgetter(*(place for place, mark in enumerate(line) if not mark.endswith(":")))
    wanted = {key(row) for row in shown}
    chosen = [row for row in ([one[header.index(column)] for column in columns] for one in rows) if key(row) in wanted]
    if missing := wanted - set(map(key, chosen)):
        raise click.ClickException(f"{PAGE}: `{name}` printed no row {min(missing)!r}. Fix: remove or rename it.")
    made = "".join(f"| {' | '.join(row)} |\n" for row in (columns, line, *chosen))
    return page[: found.start()] + made + page[found.end() :]


def cells(line: str) -> list[str]:
    """Return the cells of a table's line."""
    return [cell.strip() for cell in line.strip("|").split("|")]


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(name: str, arguments: tuple[str, ...]) -> None:
    """Run `scripts/bench NAME ARGUMENTS`, and put its table into docs/benchmarks.md."""
    command = [str(ROOT / "scripts" / "bench"), name, *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    click.echo(printed)
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), name, printed), encoding="utf-8")


if __name__ == "__main__":
    main()
