"""``python -m bench.planning``: what planning alone costs, by the length of the conversation.

Counts and shortened forms are known, as they are from the second turn of a conversation on; the whole conversation is
planned every time. Beside it stands what the minimal pass-through takes to move the same body.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import bodies, servers
from bench.client import Broken, Caller, one_by_one, request
from bench.figures import MICRO, MILLI, Row, Target, raw
from bench.table import MARKS, digits
from proxy.compaction.groups import head_length
from proxy.compaction.message import Turn, decode, read
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.rules import Envelope
from proxy.config import Settings
from proxy.dialects.chat.counting import Counter
from proxy.limits.profiles import Profile
from proxy.pipeline.rules import rules_for

WINDOW = 128_000
"""Tokens. Long conversations pass many checkpoints in it."""

LONG_RESULT, LONG_ARGUMENT = 10_000, 3_000
"""Characters: more than the default policy leaves in old messages."""

LINEAR = 1.5
"""How much more a message may cost in the longest conversation than in the shortest of the same mix that passes several
checkpoints. Before the first trigger there is little to decide, so messages of still shorter ones cost less."""


@dataclass(frozen=True, slots=True)
class Size:
    """A conversation of so many messages and so many bytes on average. ``at_most`` is the target for its plan in ms."""

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
    """One line of the table. ``row`` has CPU in ms, of planning and of the pass-through."""

    size: Size
    row: Row
    checkpoints: int

    @property
    def each(self) -> float:
        """µs of planning per message."""
        return median(self.row.proxy) * MICRO / MILLI / self.size.messages


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="The two shortest conversations, few rounds.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write every round to FILE.")
def main(quick: bool, file: Path | None) -> None:
    """Measure planning alone, and print the table.

    A target that is missed is printed and is no failure; the exit status says whether everything ran.
    """
    sizes = QUICK if quick else FULL
    console = Console(width=max(120, Console().width))
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("planning", total=len(sizes))
        rows = measure(sizes, lambda: progress.advance(bar))
    show(rows, console)
    if file is not None:
        per_message = [{"messages": line.size.messages, "us_per_message": line.each} for line in rows]
        figures = [{**row, **each} for row, each in zip(raw([line.row for line in rows]), per_message, strict=True)]
        file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def measure(sizes: Sequence[Size], step: Callable[[], None]) -> list[Planned]:
    """The lines of all sizes; ``step`` is called after each. Raises ``Broken`` where there was nothing to plan."""
    measured, beside = servers.cores()
    with servers.upstream(beside) as upstream, servers.passthrough(measured, upstream) as passthrough:
        caller = Caller(passthrough)
        rows = []
        for size in sizes:
            target = None if size.at_most is None else Target("figure", size.at_most)
            row = Row(f"{size.messages:,} messages", "ms", target)
            made = list(conversation(size))
            sent = request(msgspec.json.encode({"model": "bench", "messages": made}))
            plan = planner(made)
            del made
            found = plan()  # the shortened forms are made here, once, and remembered like the counts
            if not found.checkpoints:
                raise Broken(f"{row.name}: there was nothing to plan")
            with _on(measured):
                for _ in range(size.rounds):
                    before = time.process_time()
                    plan()
                    row.proxy.append(MILLI * (time.process_time() - before))
            caller.ask(sent)
            for _ in range(size.rounds):
                row.reference.append(MILLI * one_by_one(passthrough, caller, sent, 1).cpu)
            rows.append(Planned(size, row, len(found.checkpoints)))
            step()
        caller.close()
    return rows


def planner(messages: Sequence[Mapping[str, object]]) -> Callable[[], Plan]:
    """What plans a conversation whose messages were read and counted before, under the default policy."""
    counter = Counter(Profile(model="bench", context_window=WINDOW))
    raws = [msgspec.json.encode(message) for message in messages]
    turns = [Turn(raw, read(decode(raw), counter.message)) for raw in raws]
    head = head_length(turns)
    frame = Envelope(WINDOW, sum(turn.facts.tokens for turn in turns[:head]), head)
    rules = rules_for(Settings().policies["default"], window_known=True)
    return lambda: make_plan(turns[head:], rules, frame, counter.message)


def conversation(size: Size) -> Iterator[Mapping[str, object]]:
    """An agent's tool loop: a task every 50 messages, then calls and results.

    Of ten calls one writes a file, its text in the arguments; of fifteen results one is long, and of eight one is the
    same as one before. The other results are as long as the average asks for.
    """
    rng = random.Random(1)
    text = bodies.prose(rng, 4 * LONG_RESULT)

    def excerpt(length: int) -> str:
        start = rng.randrange(len(text) - length)
        return text[start : start + length]

    same = [excerpt(size.bytes_each) for _ in range(5)]
    # Two messages make a pair; what surrounds the texts is about 250 bytes.
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
    """Print the table, and whether the cost grows with the length alone."""
    table = Table(
        title="Planning alone, counts and shortened forms known",
        caption=f"Medians of CPU, in a window of {WINDOW:,} tokens. The pass-through moves the same body.",
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


@contextmanager
def _on(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    main()
