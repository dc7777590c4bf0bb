"""``python -m bench``: the proxy compared with a minimal pass-through, in one run on the same core."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from bench import cases, compactions, instructions, servers, translation
from bench.bodies import APIS
from bench.rows import COLUMNS, FULL, TINY, Row, Scale, cells
from bench.table import table

GROUPS: dict[str, Callable[[servers.Place, Scale, Sequence[str]], list[Row]]] = {
    "requests": cases.requests,
    "turns": cases.turns,
    "compaction": compactions.first,
    "beside": compactions.beside,
    "translation": translation.measure,
    "instructions": instructions.measure,
}
"""The function that measures each group of rows, for some of the APIs."""

USUAL = ("requests", "turns", "compaction", "beside")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tiny", is_flag=True, help="One short round, to check that everything runs.")
@click.option("--api", "apis", multiple=True, type=click.Choice(list(APIS)), help="Measure only the rows of this API.")
@click.option("--only", "groups", multiple=True, type=click.Choice(list(GROUPS)), help="Measure only these rows.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(tiny: bool, apis: Sequence[str], groups: Sequence[str], file: Path | None) -> None:
    """Compare the proxy with a minimal pass-through, and print the table."""
    chosen = TINY if tiny else FULL
    rows = measure(chosen, apis or list(APIS), groups or (USUAL[:2] if apis else USUAL))
    click.echo(table(COLUMNS, map(cells, rows)))
    click.echo(f"\nMedians of {chosen.rounds} alternating rounds. Brackets: lowest and highest ratio of a round.")
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def measure(scale: Scale, apis: Sequence[str], groups: Sequence[str]) -> list[Row]:
    """Return the rows of some groups. The client is this process. It runs on the upstream's core."""
    server_core, client_core = servers.cores()
    rows: list[Row] = []
    with (
        servers.pinned(client_core),
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        servers.running(["bench.upstream"], Path(name, "upstream.log"), core=client_core) as upstream,
    ):
        place = servers.Place(server_core, upstream, Path(name))
        for group in groups:
            click.echo(f"{group} ...", err=True)
            rows += GROUPS[group](place, scale, apis)
    return rows


if __name__ == "__main__":
    main()
