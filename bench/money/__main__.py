"""``python -m bench.money``: the price of summaries, and of whole conversations with and without the proxy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import structlog
from rich.console import Console
from rich.table import Table

from bench.money.prices import Prices, break_even, paid_after
from bench.money.replay import Replayed, bare, repeated, through_proxy, tokens_of
from bench.money.upstream import COUNTER, Call
from bench.quality import sessions
from bench.quality.conversations import Conversation, tool_loop
from bench.quality.judge import Figures, Judge
from bench.table import MARKS, write_json

METHODS = ("transcript", "continue")
WINDOWS = (64_000, 128_000, 256_000)
READS = (0.05, 0.1)
WRITES = (1.0, 1.25)
TARGET = 0.25
"""The price of continued summaries relative to transcripts."""

BILL_READS = (0.025, 0.05, 0.1, 0.25, 0.5)
TRIGGER = 64_000
STEP = 272_000
BILLS = ((1, "working"), (2, "working"), (4, "none"), (4, "working"), (4, "casual"))
"""How often the session is repeated, and the pauses of its user."""

HABIT = "working"

SHOWN = ("facts", "paths", "users", "stays", "invalid")
"""The measures of quality in the table."""


@dataclass(frozen=True)
class Summaries:
    """The summaries of one conversation in one window, by both methods."""

    name: str
    window: int
    transcript: Replayed
    continued: Replayed
    quality: dict[str, tuple[float | None, float | None]]

    def share(self, prices: Prices) -> float:
        """Return the price of continued summaries relative to transcripts. It includes failed attempts."""
        return prices.bill(_summaries(self.continued)) / prices.bill(_summaries(self.transcript))


@dataclass(frozen=True)
class Bill:
    """A whole conversation with the proxy and without it."""

    name: str
    tokens: int
    habit: str
    ours: Sequence[Call]
    theirs: Sequence[Call]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tiny", is_flag=True, help="A short generated conversation in one small window.")
@click.option("--sessions", "folder", type=click.Path(path_type=Path), default=sessions.FOLDER, show_default=False,
              help="The folder with recorded sessions. Without it, the conversations are generated.")  # fmt: skip
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every request to FILE.")
def main(tiny: bool, folder: Path, file: Path | None) -> None:
    """Compare the price of summaries by both methods, and of conversations with the proxy and without it.

    The tables show missed targets. The exit status is 0 if every measurement ran.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    console = Console(width=max(140, Console().width))

    def step(text: str) -> None:
        console.print(f"[dim]{text} …[/]")

    recorded = [] if tiny else sessions.coding(folder)
    if tiny:
        session, bills = tool_loop(1, 30_000), [(1, HABIT)]
        cases = [(session, 24_000)]
    else:
        session, bills = recorded[0] if recorded else tool_loop(1, 100_000), list(BILLS)
        cases = [(_long(session, window), window) for window in WINDOWS]
        cases.append((tool_loop(2, 160_000), WINDOWS[0]))
    summaries = [compare(conversation, window, step) for conversation, window in cases]
    show_summaries(summaries, console)
    trigger = 20_000 if tiny else TRIGGER
    compared = [whole(repeated(session, times), habit, trigger, step) for times, habit in bills]
    show_bills(compared, console)
    paid = paying(session, trigger, step)
    show_paying(paid, console)
    write_json(file, {"paid": paid, "summaries": [raw(one) for one in summaries], "bills": compared})


def _long(session: Conversation, window: int) -> Conversation:
    """Return a session of at least two windows."""
    return repeated(session, max(1, round(2.3 * window / tokens_of(session))))


def compare(conversation: Conversation, window: int, step: Callable[[str], None]) -> Summaries:
    """Replay a conversation with each method, and judge the prompts."""
    replays, values = [], []
    for method in METHODS:
        step(f"{conversation.name}, {window:,} tokens, {method}")
        replayed = through_proxy(conversation, window, {"summary": {"method": method}}, HABIT)
        figures = Figures()
        Judge(COUNTER).add(figures, conversation, replayed.outcome, window, 20_000)
        replays.append(replayed)
        values.append(figures.values())
    quality = {name: (values[0][name], values[1][name]) for name in SHOWN}
    return Summaries(conversation.name, window, replays[0], replays[1], quality)


def whole(conversation: Conversation, habit: str, trigger: int, step: Callable[[str], None]) -> Bill:
    """Replay a conversation at a model with a large window, with the proxy and without it."""
    step(f"{conversation.name}, pauses: {habit}")
    ours = through_proxy(conversation, 1_000_000, _early(trigger, "continue"), habit)
    theirs = bare(conversation, habit)
    return Bill(conversation.name, tokens_of(conversation), habit, ours.calls, theirs.calls)


def paying(conversation: Conversation, trigger: int, step: Callable[[str], None]) -> dict[str, list[int | None]]:
    """Return the turns after which the first checkpoint has paid for itself, by method and read price.

    There are no pauses, so the cache always serves the whole conversation without the proxy.
    """
    theirs = bare(conversation, "none").calls
    found = {}
    for method in METHODS:
        step(f"{conversation.name}, first checkpoint, {method}")
        ours = through_proxy(conversation, 1_000_000, _early(trigger, method), "none").calls
        found[method] = [paid_after(ours, theirs, Prices(read)) for read in BILL_READS]
    return found


def _early(trigger: int, method: str) -> dict[str, Any]:
    """Return a policy that compacts far below a window of 1M."""
    prepare = {"tokens": trigger * 7 // 8}
    return {"trigger": {"tokens": trigger}, "prepare": prepare, "summary": {"method": method}}


def _summaries(replayed: Replayed) -> list[Call]:
    return replayed.of("transcript", "continue")


def show_summaries(rows: Sequence[Summaries], console: Console) -> None:
    """Print the prices of summaries, and the quality of the prompts."""
    table = Table(
        title="Price of summaries by continuation, relative to transcripts",
        caption=f"Prices relative to fresh input: output 5. Target: ≤ {TARGET:.0%} at a read price of 0.1.",
    )
    for title in ("conversation", "window", "summaries", "read, transcript", "read, continued", "from the cache"):
        table.add_column(title, justify="left" if title == "conversation" else "right")
    for write in WRITES:
        for read in READS:
            table.add_column(f"read {read}, write {write}", justify="right")
    for row in rows:
        made, continued = _summaries(row.transcript), _summaries(row.continued)
        prompt, cached = sum(call.prompt for call in continued), sum(call.read for call in continued)
        shares = [row.share(Prices(read, write)) for write in WRITES for read in READS]
        marked = [f"{share:.0%} {MARKS[share <= TARGET]}" for share in shares]
        table.add_row(
            row.name, f"{row.window:,}", f"{len(made)}, {len(continued)}", f"{sum(call.prompt for call in made):,}",
            f"{prompt:,}", _percent(cached / prompt if prompt else None), *marked,
        )  # fmt: skip
    console.print(table)
    quality = Table(title="Quality of the prompts: transcript / continued")
    for title in ("conversation", "window", *SHOWN):
        quality.add_column(title)
    for row in rows:
        pairs = [" / ".join(map(_percent, row.quality[name])) for name in SHOWN]
        quality.add_row(row.name, f"{row.window:,}", *pairs)
    console.print(quality)


def show_bills(rows: Sequence[Bill], console: Console) -> None:
    """Print the bills with the proxy relative to those without it."""
    table = Table(
        title=f"The whole bill with a trigger of {TRIGGER:,} tokens at a window of 1M, relative to none",
        caption="By the price of cached tokens. Break-even: the read price over which the proxy's bill is lower. "
        f"The step doubles the price of prompts over {STEP:,} tokens.",
    )
    for title in ("conversation", "tokens", "pauses", *(f"read {read}" for read in BILL_READS), "break-even"):
        table.add_column(title, justify="left" if title in ("conversation", "pauses") else "right")
    table.add_column("break-even, with a step", justify="right")
    for row in rows:
        ratios = [_ratio(row, Prices(read)) for read in BILL_READS]
        points = [_point(break_even(row.ours, row.theirs, Prices(step=step))) for step in (None, STEP)]
        table.add_row(row.name, f"{row.tokens:,}", row.habit, *ratios, *points)
    console.print(table)


def show_paying(paid: Mapping[str, Sequence[int | None]], console: Console) -> None:
    """Print the turns until a checkpoint has paid for itself."""
    table = Table(title=f"Turns until the first checkpoint at {TRIGGER:,} tokens has paid for itself, without pauses")
    for title in ("method", *(f"read {read}" for read in BILL_READS)):
        table.add_column(title, justify="left" if title == "method" else "right")
    for method, turns in paid.items():
        table.add_row(method, *("never" if count is None else str(count) for count in turns))
    console.print(table)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _ratio(row: Bill, prices: Prices) -> str:
    return f"{prices.bill(row.ours) / prices.bill(row.theirs):.0%}"


def _point(price: float | None) -> str:
    return "any" if price is None else "none" if price > 1 else f"{price:.3f}"


def raw(row: Summaries) -> dict[str, Any]:
    """Return a row without its prompts."""
    calls = {"transcript": _summaries(row.transcript), "continue": _summaries(row.continued)}
    share = row.share(Prices())
    return {"name": row.name, "window": row.window, "calls": calls, "quality": row.quality, "share": share}


if __name__ == "__main__":
    main()
