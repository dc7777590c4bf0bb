"""The instructions of fixed requests, counted by callgrind.

Both servers run below callgrind. It counts the instructions of all threads, so other programs don't change the figures.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import click

from bench.bodies import APIS
from bench.cases import Case, known, small
from bench.client import ask
from bench.compactions import SIZES
from bench.rows import Row, Scale
from bench.servers import Place, Server

PROGRAM, CONTROL = "valgrind", "callgrind_control"
MISSING = "valgrind isn't installed. On Debian: apt-get install valgrind"
AT_ONCE = 64
REST_SECONDS, REST_CPU = 1.0, 0.1
"""A server that uses less CPU in this time has written records and the archive, and loaded its tokenizer."""

_TOTAL = re.compile(r"^totals: (\d+)", re.MULTILINE)


def chosen(scale: Scale, apis: Sequence[str]) -> list[Case]:
    """Return the fixed requests: small ones, a turn of 100 KB, and a first compaction."""
    made = [case for api in apis for case in small(scale, APIS[api]) if case.at_once == AT_ONCE]
    compaction = Case(map(SIZES[0].conversation, count(1)), 1, [Row(SIZES[0].name, "")], warm=1)
    return [*made, known(scale, ["chat"], large=False)[0], compaction]


def measure(place: Place, scale: Scale, apis: Sequence[str]) -> list[Row]:
    """Return a row for each request. This takes minutes, because callgrind makes programs 50 times slower."""
    if shutil.which(PROGRAM) is None or shutil.which(CONTROL) is None:
        raise click.ClickException(MISSING)
    cases = chosen(scale, apis)
    rows = [Row(f"{case.rows[0].name.removesuffix(': CPU')}: instructions", "thousand") for case in cases]
    before = [PROGRAM, "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={place.folder / 'counted'}"]
    starts = place.passthrough(before=before), place.proxy(summarizes=False, before=before)
    for start, ours in zip(starts, (False, True), strict=True):
        with start as server:
            for row, case in zip(rows, cases, strict=True):
                click.echo(f"{'proxy' if ours else 'pass-through'}: {row.name}", err=True)
                row.add(_count(server, case, place.folder) / case.times / 1e3, ours=ours)
    return rows


def _count(server: Server, case: Case, folder: Path) -> int:
    """Return the instructions of all requests of a case."""
    # The first request may load the tokenizer, which goes on after its response.
    for times in (1, case.warm):
        _send(server, case.requests, times, case.at_once)
    _control("--instr=on", server)
    _control("--zero", server)
    _send(server, case.requests, case.times, case.at_once)
    _control("--dump", server)
    _control("--instr=off", server)
    newest = max(folder.glob("counted.*"), key=lambda file: file.stat().st_mtime_ns)
    counted = total(newest.read_text(errors="replace"))
    newest.unlink()
    return counted


def _send(server: Server, requests: Iterator[bytes], times: int, at_once: int) -> None:
    ask(server, requests, times, at_once)
    before = -REST_SECONDS
    while (now := server.cpu) - before > REST_CPU:
        before = now
        time.sleep(REST_SECONDS)


def _control(action: str, server: Server) -> None:
    subprocess.run([CONTROL, action, str(server.process.pid)], check=True, capture_output=True)


def total(dump: str) -> int:
    """Return the instructions in a file of callgrind."""
    return sum(map(int, _TOTAL.findall(dump)))
