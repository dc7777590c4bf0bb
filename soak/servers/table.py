"""The table that is printed."""

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
    """One server with one configuration of the proxy; ``protected`` is false where there was no proxy."""

    engine: str
    setting: str
    protected: bool
    seen: Tally
    upstream: Counts

    @property
    def met(self) -> bool | None:
        """Whether no client saw a fault; nothing is asked of a server alone."""
        return self.seen.fine if self.protected else None


def show(rows: Sequence[Row], window: int, console: Console) -> None:
    """Print all rows, and below what the servers and the clients were told."""
    table = Table(
        title=f"Conversations that grow over a window of {window:,} tokens",
        caption=(
            "Server: what it answered, summaries included. Client: what it saw. Broken: a stream without a reason for "
            f"its end; torn: a connection that ended within an answer; cut: {SHORT} tokens or fewer, for want of room."
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
        for who, shapes in (("the server said", row.upstream.shapes), ("clients saw", row.seen.told)):
            for times, example in shapes:
                told = f"{row.engine}, {row.setting}: {times} × {who} {example}"
                console.print(told, markup=False, highlight=False, soft_wrap=True)


def raw(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as JSON takes them."""
    return [
        {
            "server": row.engine,
            "profile": row.setting,
            "client": {name: getattr(row.seen, name) for name in _OF_CLIENT} | {"told": row.seen.told.as_json()},
            "server_saw": row.upstream.as_json(),
            "met": row.met,
        }
        for row in rows
    ]
