"""``python -m bench.planning``: measure the CPU of planning by the length of the conversation.

Counts and shortened messages are cached, as they are from the second turn of a conversation. The whole conversation is
planned every time. For comparison, the table has the CPU of the minimal pass-through for the same body.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from statistics import median

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import bodies, servers
from bench.client import Broken, Caller, request, sequential
from bench.figures import MICRO, MILLI, Row, Target, raw
from bench.table import MARKS, digits, write_json
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.rules import Envelope
from proxy.compaction.turn import Turn, head_length
from proxy.config import Settings
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile
from proxy.pipeline.rules import rules_for

WINDOW = 128_000
"""Tokens. Long conversations pass many checkpoints in this window."""

LONG_RESULT, LONG_ARGUMENT = 10_000, 3_000
"""Characters. Both are longer than the default policy allows in old messages."""

LINEAR = 1.5
"""Highest ratio of the CPU per message in the longest conversation to that in the shortest one with the same mix.

The shortest one must pass several checkpoints. Before the first trigger there is little to decide.
"""


@dataclass(frozen=True, slots=True)
class Size:
    """A conversation's number of messages and their mean size. ``at_most`` is the target for its plan in ms."""

    messages: int
    bytes_each: int
    rounds: int
    at_most: float | None = None


FULL = (
    Size(400, 2_600, 25, at_most=3.0),
    Size(1_000, 1_000, 25),
    Size(10_000, 1_000, 11, at_most=60.0),
    Size(40_000, 1_000, 5),
)
QUICK = (Size(400, 2_600, 3, at_most=3.0), Size(1_000, 1_000, 3))


@dataclass(frozen=True, slots=True)
class Planned:
    """One row of the table. ``row`` has the CPU in ms of planning and of the pass-through."""

    size: Size
    row: Row
    checkpoints: int

    @property
    def each(self) -> float:
        """The µs of planning per message."""
        return median(self.row.proxy) * MICRO / MILLI / self.size.messages


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="The two shortest conversations, few rounds.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(quick: bool, file: Path | None) -> None:
    """Measure planning alone, and print the table.

    The table shows missed targets. The exit status is 0 if every measurement ran.
    """
    sizes = QUICK if quick else FULL
    console = Console(width=max(120, Console().width))
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("planning", total=len(sizes))
        rows = measure(sizes, lambda: progress.advance(bar))
    show(rows, console)
    per_message = [{"messages": line.size.messages, "us_per_message": line.each} for line in rows]
    write_json(file, [{**row, **each} for row, each in zip(raw([line.row for line in rows]), per_message, strict=True)])


def measure(sizes: Sequence[Size], step: Callable[[], None]) -> list[Planned]:
    """Return the rows of all sizes. Call ``step`` after each. Raises ``Broken`` if a plan has no checkpoint."""
    server_core, client_core = servers.cores()
    with servers.upstream(client_core) as upstream, servers.passthrough(server_core, upstream) as passthrough:
        caller = Caller(passthrough)
        rows = []
        for size in sizes:
            target = None if size.at_most is None else Target("figure", size.at_most)
            row = Row(f"{size.messages:,} messages", "ms", target)
            made = list(conversation(size))
            sent = request(msgspec.json.encode({"model": "bench", "messages": made}))
            plan = planner(made)
            del made
            found = plan()  # This first call also caches the shortened messages.
            if not found.checkpoints:
                raise Broken(f"{row.name}: there was nothing to plan")
            with servers.pinned(server_core):
                for _ in range(size.rounds):
                    before = time.process_time()
                    plan()
                    row.proxy.append(MILLI * (time.process_time() - before))
            caller.ask(sent)
            for _ in range(size.rounds):
                row.reference.append(MILLI * sequential(passthrough, caller, repeat(sent), 1).cpu)
            rows.append(Planned(size, row, len(found.checkpoints)))
            step()
        caller.close()
    return rows


def planner(messages: Sequence[Mapping[str, object]]) -> Callable[[], Plan]:
    """Return a function that plans a conversation under the default policy. Its messages are already counted."""
    counter = ChatCounter(Profile(model="bench", context_window=WINDOW))
    raws = [msgspec.json.encode(message) for message in messages]
    turns = [Turn(raw, counter.format.read(raw)) for raw in raws]
    head = head_length(turns)
    envelope = Envelope(WINDOW, sum(turn.facts.tokens for turn in turns[:head]), head)
    rules = rules_for(Settings().policies["default"], window_known=True)

    def plan() -> Plan:
        return make_plan(turns[head:], rules, envelope, counter.format)

    return plan


def conversation(size: Size) -> Iterator[Mapping[str, object]]:
    """Yield the messages of an agent's tool loop, with a task every 50 messages.

    One call in ten writes a file, with its text in the arguments. One result in fifteen is long, and one in eight is a
    copy of an earlier one. The length of the others gives the mean size.
    """
    rng = random.Random(1)
    text = bodies.prose(rng, 4 * LONG_RESULT)

    def excerpt(length: int) -> str:
        start = rng.randrange(len(text) - length)
        return text[start : start + length]

    same = [excerpt(size.bytes_each) for _ in range(5)]
    # A pair of messages has about 250 bytes without its texts.
    ordinary = max(100, 2 * size.bytes_each - 250 - LONG_RESULT // 15 - LONG_ARGUMENT // 10)
    yield {"role": "system", "content": "You work on a code base."}
    left = size.messages - 1
    number = 0
    while left >= 2:
        if number % 25 == 0 and left > 2:
            yield {"role": "user", "content": f"Task {number}: {excerpt(300)}"}
            left -= 1
        path = f"src/part_{number % 97}/file_{number}.py"
        name, arguments = "read_file", {"path": path}
        if number % 10 == 3:
            name, arguments = "write_file", {"path": path, "content": excerpt(LONG_ARGUMENT)}
        function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
        calls = [{"id": f"call_{number}", "type": "function", "function": function}]
        yield {"role": "assistant", "content": f"Now {path}.", "tool_calls": calls}
        result = f"{number}\n{excerpt(LONG_RESULT if number % 15 == 7 else ordinary)}"
        if number % 8 == 5:
            result = same[number % len(same)]
        yield {"role": "tool", "tool_call_id": f"call_{number}", "content": result}
        left -= 2
        number += 1
    if left:
        yield {"role": "user", "content": "Go on."}


def show(rows: Sequence[Planned], console: Console) -> None:
    """Print the table, and whether the cost per message stays about the same."""
    table = Table(
        title="Planning alone, with cached counts and shortened messages",
        caption=f"Medians of CPU, in a window of {WINDOW:,} tokens. The pass-through forwards the same body.",
    )
    for name in ("messages", "body", "checkpoints", "planning", "per message", "pass-through", "target"):
        table.add_column(name, justify="right")
    table.add_column("met", justify="center")
    for line in rows:
        size, row = line.size, line.row
        target = f"≤ {size.at_most:g} ms" if size.at_most else ""
        table.add_row(
            f"{size.messages:,}", f"{size.messages * size.bytes_each / 1e6:.0f} MB", f"{line.checkpoints}",
            f"{digits(median(row.proxy))} ms", f"{digits(line.each)} µs", f"{digits(median(row.reference))} ms",
            target, MARKS[row.met],
        )  # fmt: skip
    console.print(table)
    last = rows[-1]
    same = [line for line in rows if line.checkpoints > 1 and line.size.bytes_each == last.size.bytes_each]
    if len(same) > 1:
        growth = last.each / same[0].each
        console.print(
            f"A message costs {growth:.2f} × as much at {last.size.messages:,} as at {same[0].size.messages:,} "
            f"(target: ≤ {LINEAR:g} ×) {MARKS[growth <= LINEAR]}"
        )


if __name__ == "__main__":
    main()
