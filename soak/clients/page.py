"""The page of results: one row for each client and upstream, from the newest run of that client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

COLUMNS = (
    "client",
    "version",
    "API",
    "session",
    "requests",
    "compacted",
    "summaries",
    "after 402",
    "result",
    "proxy",
    "date",
)

HEAD = """# Conformance

`scripts/soak clients --write docs/conformance.md` installs each client at its newest version, and drives it with
default settings through the proxy to a strict stand-in with a small window. It replaces the rows of clients that ran.

A row passed if the client reached the end of the session without an error, and the proxy compacted at least one
request. Libraries ask one question in each turn, and agents call their own tools.
`after 402` counts the requests of a further run whose team has used up its budget. Claude Code and opencode send two
at once, and codex retries for seven seconds.
`chat upstream`: the upstream has only chat completions with strict alternation, so the proxy translates.

"""


def written(file: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write the page with these rows. Keep the rows of other clients, versions of the proxy, and upstreams.

    A row belongs to the client and the API, which are its first and third cells.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    old = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    found = {_name(cells): cells for cells in [*old, *rows] if len(cells) == len(COLUMNS)}
    ruled = [COLUMNS, ["---"] * 4 + ["---:"] * 4 + ["---"] * 3, *sorted(found.values(), key=_name)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)
    file.write_text(f"{HEAD}{table}\n", encoding="utf-8")


def _name(cells: Sequence[str]) -> tuple[str, str]:
    return cells[0].casefold(), cells[2]
