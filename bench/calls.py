"""``python -m bench.calls``: count the calls of Python functions for fixed requests.

Unlike times, these counts hardly differ between runs and machines. ``tests/bench/test_calls.py`` compares them with
those in ``calls.json``, which ``--accept`` writes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import count, repeat
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from bench import bodies, compactions, servers
from bench.client import Broken, request, verdicts, whole
from bench.table import write_json
from proxy.config.loading import loads
from proxy.server.app import create_app
from proxy.server.loopback import serve
from proxy.telemetry.logs import configure
from tests.kit.client import connected

ACCEPTED = Path(__file__).with_name("calls.json")
TOLERANCE = 0.06
WARM_UP = 150
"""Requests of each kind before counting. Later ones fill no caches."""
SAMPLES, ALIKE = 24, 4
"""The most samples of a request, and the number of equal ones that suffices."""
REST_SECONDS = 0.05
"""The work after a response is over if no function was called in this time."""
COMPACTION = "first compaction, 110 KB"

Figures = tuple[Counter[CodeType], Counter[CodeType]]
"""Calls and bytecodes by code."""

_LIBRARIES = sysconfig.get_path("purelib") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


@dataclass(frozen=True, slots=True)
class Kind:
    """A request that is sent again and again. ``expected`` is in ``x-compaction`` and ``x-compaction-summary``."""

    requests: Iterator[bytes]
    expected: tuple[str, str] = ("none", "")
    warm_up: int = WARM_UP
    samples: int = SAMPLES


@dataclass(frozen=True, slots=True)
class Counted:
    """The calls for one request, and the modules and functions of ``proxy`` that it enters."""

    calls: int
    modules: int
    functions: int


def kinds() -> dict[str, Kind]:
    """Return the fixed requests by name."""
    made = {f"{name}, small": Kind(repeat(request(api.small(), api.path))) for name, api in bodies.APIS.items()}
    made["chat, stream of 20 chunks"] = Kind(repeat(request(bodies.small(stream=True, user="whole-20"))))
    turns = bodies.CHAT.turns("bench-1m", 100_000, bodies.SHORT_MESSAGES)
    made["chat, 100 KB with a new last message"] = Kind(map(request, turns))
    embedding = msgspec.json.encode({"model": "text-embedding-3-small", "input": "A question."})
    made["pass-through path"] = Kind(repeat(request(embedding, "/v1/embeddings")), ("unsupported", ""))
    made[COMPACTION] = Kind(map(compactions.SIZES[0].conversation, count(1)), compactions.EXTRACT, 3, 6)
    return made


class Profile:
    """Counts calls by the code of the function, in threads that start after ``install``.

    With ``bytecodes`` it also counts executed bytecodes by code, which is much slower.
    """

    def __init__(self, *, bytecodes: bool = False) -> None:
        self.active = False
        self.calls: Counter[CodeType] = Counter()
        self.bytecodes: Counter[CodeType] = Counter()
        self._traces = bytecodes

    def install(self) -> None:
        """Count in threads that start from now on."""
        if self._traces:
            threading.settrace(self._trace)
        else:
            threading.setprofile(self._called)

    def counting(self, send: Callable[[], None]) -> Figures:
        """Return the calls and the bytecodes of a request, until the server rests again."""
        self.calls, self.bytecodes, self.active = Counter(), Counter(), True
        send()
        before = -1
        while before != (now := self.calls.total()):
            before = now
            time.sleep(REST_SECONDS)
        self.active = False
        return self.calls, self.bytecodes

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.active:
            code = frame.f_code
            # A coroutine that continues also causes the event. How often it does depends on the pieces of a body.
            if code.co_code[frame.f_lasti + 1] == 0:
                self.calls[code] += 1

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self.active:
            return None
        self._called(frame, event, argument)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._executed

    def _executed(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._executed


class Lines:
    """Measures the CPU of single lines in the threads that count and compact, in threads that start after ``install``.

    Calls of C code in such a line hold the interpreter lock for at most this time. ``longest`` is in seconds.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._own = threading.local()

    def install(self) -> None:
        """Measure in threads that start from now on."""
        threading.settrace(self._entered)

    def _entered(self, *_: object) -> Any:
        if not hasattr(self._own, "executed"):
            counts = threading.current_thread().name.startswith("counting")
            self._own.executed = self._measured() if counts else None
        return self._own.executed

    def _measured(self) -> Callable[[FrameType, str, object], Any]:
        """Return a trace function for one thread."""
        clock = time.thread_time
        before, code = clock(), self._measured.__code__

        def executed(frame: FrameType, _: str, __: object) -> Any:
            nonlocal before, code
            if (now := clock()) - before > self.longest and not _releases(code):
                self.longest = now - before
            before, code = now, frame.f_code
            return executed

        return executed


def _releases(code: CodeType) -> bool:
    """Return whether the C code that a function calls releases the lock."""
    return layer(code.co_filename) == "tiktoken" or code.co_name == "_encoded_length" or code.co_name == "run"


def count_all(*, bytecodes: bool = False) -> dict[str, Figures]:
    """Return the calls and bytecodes of each kind of request."""
    profile = Profile(bytecodes=bytecodes)
    found = {}
    with served(profile) as url, contextlib.closing(connected(url)) as connection:
        for name, kind in kinds().items():
            send = partial(ask, connection, name, kind)
            for _ in range(kind.warm_up):
                send()
            found[name] = _lowest(partial(profile.counting, send), kind.samples)
    return found


def ask(connection: socket.socket, name: str, kind: Kind) -> None:
    """Send a request of a kind. Raises ``Broken`` if the response isn't the expected one."""
    connection.sendall(next(kind.requests))
    received = bytearray()
    while not received or not whole(received):
        received += connection.recv(262_144)
    if (reported := verdicts(bytes(received))) != kind.expected:
        raise Broken(f"{name}: the proxy reported {reported} instead of {kind.expected}")


def _lowest(sample: Callable[[], Figures], most: int) -> Figures:
    """Return the sample with the fewest calls. Other work of the process, such as a timer, falls into some samples."""
    samples: list[Figures] = []
    while len(samples) < most:
        samples.append(sample())
        totals = [calls.total() for calls, _ in samples]
        if totals.count(min(totals)) == ALIKE:
            break
    return min(samples, key=lambda one: one[0].total())


@contextlib.contextmanager
def served(profile: Profile | Lines) -> Iterator[str]:
    """Serve the proxy in a thread of this process, with an upstream in another process. Its log is discarded."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        servers.upstream(None) as upstream,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        settings = loads(compactions.configuration(upstream.port, Path(folder) / "store.db").encode(), {})
        configure(settings.log.level, settings.log.format)
        profile.install()
        try:
            with serve(create_app(settings), keepalive=75) as url:
                yield url
        finally:
            threading.setprofile(None)
            threading.settrace(None)


def counted(calls: Mapping[CodeType, int]) -> Counted:
    """Return the figures of one request."""
    own = [code for code in calls if layer(code.co_filename).startswith("proxy/")]
    return Counted(sum(calls.values()), len({code.co_filename for code in own}), len(own))


@cache
def layer(file: str) -> str:
    """Return the room of a file of the proxy, such as ``proxy/http``, or the library of another one."""
    inside = file.removeprefix(f"{servers.ROOT}{os.sep}")
    if inside.startswith("proxy" + os.sep):
        return "/".join(inside.removesuffix(".py").split(os.sep)[:2])
    if file.startswith(_LIBRARIES):
        return file.removeprefix(_LIBRARIES).split(os.sep)[0].removesuffix(".py")
    if file.startswith((_STANDARD, "<frozen")):
        inside = file.removeprefix(_STANDARD)
        return "asyncio" if inside.startswith("asyncio") else "standard library"
    return "others"


def by_layer(figures: Mapping[CodeType, int]) -> Counter[str]:
    """Add up figures by layer."""
    added: Counter[str] = Counter()
    for code, figure in figures.items():
        added[layer(code.co_filename)] += figure
    return added


def growth(accepted: Mapping[str, Counted], now: Mapping[str, Counted]) -> list[str]:
    """Return a line for each figure that exceeds the accepted one by more than ``TOLERANCE``."""
    lines = [f"{name}: only one side has this request" for name in accepted.keys() ^ now.keys()]
    for name in accepted.keys() & now.keys():
        before, after = accepted[name], now[name]
        if after.calls - before.calls > TOLERANCE * before.calls:
            lines.append(f"{name}: {after.calls} calls instead of {before.calls}")
        if after.modules - before.modules > TOLERANCE * before.modules:
            lines.append(f"{name}: {after.modules} modules instead of {before.modules}")
    return sorted(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--accept", is_flag=True, help=f"Write the figures to {ACCEPTED.relative_to(servers.ROOT)}.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to FILE.")
def main(accept: bool, file: Path | None) -> None:
    """Count the calls of Python functions for fixed requests, and print them."""
    found = {name: counted(calls) for name, (calls, _) in count_all().items()}
    table = Table("request", title="Python functions")
    for name in ("calls", "modules of proxy", "functions of proxy"):
        table.add_column(name, justify="right")
    for name, figures in found.items():
        table.add_row(name, f"{figures.calls:,}", f"{figures.modules}", f"{figures.functions}")
    Console(width=max(100, Console().width)).print(table)
    for target in (file, ACCEPTED if accept else None):
        write_json(target, {name: asdict(figures) for name, figures in found.items()})


if __name__ == "__main__":
    sys.exit(main())
