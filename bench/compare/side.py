"""One version as a running server with an upstream and a store of its own."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from bench import servers
from bench.compare import observed
from bench.compare.case import Case
from bench.compare.setup import settings
from bench.compare.upstream import Answers, Upstream, is_summary
from tests.kit.client import Got, ask
from tests.kit.raw_upstream import Arrived

SETTLE_SECONDS = 30.0
"""Longest wait for work that the proxy does after its response."""

WRITE_SECONDS = 1.5
"""Time in which the proxy writes the records of requests that have ended."""

WAITING_SECONDS = 0.002
"""Pause between two looks at the answers that wait."""

QUIET_SAMPLES = 3
SAMPLE_SECONDS = 0.003
"""Pause between two samples of a server that is expected to have nothing to do."""

QUIET_CPU_SECONDS = 0.0004
"""A process that uses less CPU between two samples runs its timers only."""

_ID = "x-compaction-id"
_PER_RUN = {_ID, "date"}
_PER_UPSTREAM = (b"host:", b"x-compaction-via:")

Seen = list[tuple[str, bytes]]
"""The parts of a case to compare, each with a name."""


@dataclass
class Side:
    """A version under test."""

    server: servers.Server
    upstream: Upstream
    answers: Answers
    pool: ThreadPoolExecutor
    ids: list[str | None] = field(default_factory=list)

    def take(self, case: Case, pause: float = SAMPLE_SECONDS) -> Seen:
        """Send a request. Return everything that the upstream and the client received.

        Before a later attempt is answered, and after the response, the server is sampled every ``pause`` seconds until
        it has nothing to do.
        """
        self.answers.begin(case)
        asking = self.pool.submit(_asked, self.server.url, case)
        while not asking.done():
            if self.answers.waiting:
                self._settle(pause)
                self.answers.waiting.pop().set()
            wait([asking], WAITING_SECONDS)
        got = asking.result()
        self.ids.append(got.header(_ID))
        self._settle(pause)
        arrived = self.upstream.arrived[:]
        self.upstream.arrived.clear()
        return _seen(got, arrived)

    def observed(self) -> tuple[list[observed.Record | None], str]:
        """Return the records of all requests so far, and the metrics."""
        time.sleep(WRITE_SECONDS)
        return observed.records(self.server.url, self.ids), observed.metrics(self.server.url)

    def _settle(self, pause: float) -> None:
        """Wait until the proxy has nothing left to do, such as a summary in the background."""
        until = time.monotonic() + SETTLE_SECONDS
        quiet, before = 0, self._state()
        while quiet < QUIET_SAMPLES:
            time.sleep(pause)
            self.upstream.catch_up()
            now = self._state()
            still = not now[2] and now[1] == before[1] and now[0] - before[0] < QUIET_CPU_SECONDS
            quiet, before = quiet + 1 if still else 0, now
            if time.monotonic() > until:
                raise TimeoutError(f"{self.server.url} still works {SETTLE_SECONDS:.0f} s after a response")

    def _state(self) -> tuple[float, int, bool]:
        """Return the server's CPU seconds, the number of requests it sent upstream, and whether a thread runs."""
        return self.server.cpu, len(self.upstream.arrived), _runs(self.server.process.pid)


@contextlib.contextmanager
def running(checkout: Path, folder: Path) -> Iterator[Side]:
    """Start the version in ``checkout``. ``folder`` is empty and takes its configuration, store, and log."""
    answers, environment = Answers(), {"PYTHONPATH": str(checkout)}
    with (
        Upstream(answers) as upstream,
        servers.proxy(settings(upstream.url), folder, checkout=checkout, environment=environment) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        yield Side(server, upstream, answers, pool)


def _asked(url: str, case: Case) -> Got:
    """Send a request. A connection that the proxy closes without a response is a result, too."""
    try:
        return ask(url, case.path, case.body, case.headers)
    except (http.client.HTTPException, ConnectionError) as error:
        return Got(0, [], type(error).__name__.encode(), whole=False)


def _seen(got: Got, arrived: list[Arrived]) -> Seen:
    # Causes come before effects, so that the first difference is the most telling one.
    seen: Seen = []
    # Parts of a long conversation are summarized at the same time, in any order.
    summaries = sorted((_head(request), request.body) for request in arrived if is_summary(request))
    sent = [(_head(request), request.body) for request in arrived if not is_summary(request)]
    for name, requests in (("summary request", summaries), ("upstream request", sent)):
        for number, (head, body) in enumerate(requests, 1):
            seen += [(f"{name} {number}, body", body), (f"{name} {number}, head", head)]
    headers = "".join(f"{name}: {value}\n" for name, value in got.headers if name not in _PER_RUN)
    return [
        *seen,
        ("response status", f"{got.status}{'' if got.whole else ', cut off'}".encode()),
        ("response headers", headers.encode("latin-1", "surrogateescape")),
        ("response body", got.body),
    ]


def _head(arrived: Arrived) -> bytes:
    lines = arrived.head.split(b"\r\n")
    return b"\n".join(line for line in lines if not line.lower().startswith(_PER_UPSTREAM))


def _runs(pid: int) -> bool:
    """Return whether a thread of a process runs, waits for a core, or waits for the disk."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "stat").read_bytes().rpartition(b") ")[2][:1] in b"RD":
                return True
    return False
