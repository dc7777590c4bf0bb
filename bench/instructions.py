"""The instructions of fixed requests, counted by callgrind.

Both servers run below callgrind. It counts the instructions of all threads, so other programs don't change the figures.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from pathlib import Path

import click
import uvloop

from bench import bodies
from bench.bodies import APIS, CHAT
from bench.client import Caller, concurrent, request
from bench.compactions import SIZES
from bench.rows import Row, Scale
from bench.servers import Place, Server

PROGRAM, CONTROL = "valgrind", "callgrind_control"
MISSING = "valgrind isn't installed. On Debian: apt-get install valgrind"
AT_ONCE = 64
REST_SECONDS, REST_CPU = 1.0, 0.1
"""A server that uses less CPU in this time has written records and the archive, and loaded its tokenizer."""

_TOTAL = re.compile(r"^totals: (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests, of which ``times`` are sent over ``at_once`` connections after ``warm_up`` others."""

    requests: Callable[[], Iterator[bytes]]
    times: int
    at_once: int = 1
    warm_up: int = 10


def cases(times: int, apis: Sequence[str]) -> dict[str, Case]:
    """Return the fixed requests. ``times`` is the number of small ones."""
    made = {
        f"{name}, small, {AT_ONCE} at once": Case(
            partial(repeat, request(APIS[name].small(), APIS[name].path)), times, AT_ONCE, warm_up=2 * AT_ONCE
        )
        for name in apis
    }
    turns = partial(CHAT.turns, "bench-1m", 100_000, bodies.SHORT_MESSAGES)
    made["chat, 100 KB with a new last message"] = Case(lambda: map(request, turns()), times // 4)
    made[SIZES[0].name] = Case(lambda: map(SIZES[0].conversation, count(1)), 1, warm_up=1)
    return made


def measure(place: Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Return a row for each case. This takes minutes, because callgrind makes programs 50 times slower."""
    if shutil.which(PROGRAM) is None or shutil.which(CONTROL) is None:
        raise click.ClickException(MISSING)
    chosen = cases(AT_ONCE * min(8, scale.rounds), apis)
    rows = {name: Row(f"{name}: instructions", "thousand") for name in chosen}
    before = [PROGRAM, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={place.folder / 'counted'}"]
    starts: tuple[contextlib.AbstractContextManager[Server], ...] = (
        place.passthrough(before=before),
        place.proxy(summarizes=False, before=before),
    )
    for start, ours in zip(starts, (False, True), strict=True):
        with start as server:
            for name, case in chosen.items():
                click.echo(f"{'proxy' if ours else 'pass-through'}: {name}", err=True)
                rows[name].add(_count(server, case, place.folder) / case.times / 1e3, ours=ours)
    return [*rows.values()]


def _count(server: Server, case: Case, folder: Path) -> int:
    """Return the instructions of all requests of a case."""
    requests = case.requests()
    # The first request may load the tokenizer, which goes on after its response.
    for times in (1, case.warm_up):
        _send(server, requests, times, case.at_once)
    _control("--instr=on", server)
    _control("--zero", server)
    _send(server, requests, case.times, case.at_once)
    _control("--dump", server)
    _control("--instr=off", server)
    newest = max(folder.glob("counted.*"), key=lambda file: file.stat().st_mtime_ns)
    counted = total(newest.read_text(errors="replace"))
    newest.unlink()
    return counted


def _send(server: Server, requests: Iterator[bytes], times: int, at_once: int) -> None:
    Caller(server).close()
    uvloop.run(concurrent(server, requests, times, at_once))
    before = -REST_SECONDS
    while (now := server.cpu) - before > REST_CPU:
        before = now
        time.sleep(REST_SECONDS)


def _control(action: str, server: Server) -> None:
    subprocess.run([CONTROL, action, str(server.pid)], check=True, capture_output=True)


def total(dump: str) -> int:
    """Return the instructions in a file of callgrind."""
    return sum(map(int, _TOTAL.findall(dump)))
