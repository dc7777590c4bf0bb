"""Print the rows, and convert them for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.table import MARKS
from soak.servers.conversing import SHORT, Tally
from soak.servers.tap import Counts

_OF_SERVER = ("requests", "refused", "empty", "broken", "torn")
_OF_CLIENT = ("turns", "compacted", "retries", "errors", "empty", "broken", "cut")


@dataclass(frozen=True, slots=True)
class Row:
    """The counts of a server and its clients with a configuration. ``protected`` is false without the proxy."""

    engine: str
    setting: str
    protected: bool
    seen: Tally
    upstream: Counts

    @property
    def met(self) -> bool | None:
        """Return whether every client got complete responses. ``None`` without the proxy."""
        return self.seen.fine if self.protected else None


def show(rows: Sequence[Row], window: int, console: Console) -> None:
    """Print all rows, and the failed responses below."""
    table = Table(
        title=f"Conversations that grow over a window of {window:,} tokens",
        caption=(
            "Server: its responses, including summaries. Client: the responses that it got. Broken: a stream without a "
            f"finish reason. Torn: a connection that ended during a response. Cut: {SHORT} tokens or fewer, because "
            "the window was full."
        ),
    )
    for name in ("server", "profile"):
        table.add_column(name)
    for name in _OF_SERVER:
        table.add_column(f"server:\n{name}", justify="right")
    for name in _OF_CLIENT:
        table.add_column(f"client:\n{name}", justify="right")
    table.add_column("slowest", justify="right")
    table.add_column("met", justify="center")
    for row in rows:
        counts = [getattr(row.upstream, name) for name in _OF_SERVER] + [getattr(row.seen, name) for name in _OF_CLIENT]
        table.add_row(row.engine, row.setting, *map(str, counts), f"{row.seen.slowest:.1f} s", MARKS[row.met])
    console.print(table)
    for row in rows:
        for side, shapes in (("from the server", row.upstream.shapes), ("at clients", row.seen.messages)):
            for times, example in shapes:
                text = f"{row.engine}, {row.setting}: {times} × {side}: {example}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)


def raw(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows for JSON."""
    return [
        {
            "server": row.engine,
            "profile": row.setting,
            "client": {name: getattr(row.seen, name) for name in _OF_CLIENT}
            | {"messages": row.seen.messages.as_json()},
            "server_saw": row.upstream.as_json(),
            "met": row.met,
        }
        for row in rows
    ]
