"""R9, R12: readers that are slow or idle cost little memory, and nobody else any time."""

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.kit.client import CHAT, StartProxy, ask, chat, connected, request_bytes
from tests.kit.program import relaying
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, stream_head
from tests.kit.watched import CONTENT, ROLE

READERS = 40
STREAM_BYTES = 50_000_000


def test_slow_readers_of_large_streams_cost_less_than_a_megabyte_each(tmp_path: Path) -> None:
    """R9, in a process of its own. The upstream would send 50 MB to each of them, and is held back instead.

    With many readers, what the first stream costs once (about 2 MB) doesn't decide.
    """
    piece = CONTENT * 2_000
    sent = dict.fromkeys(range(READERS), 0)

    def endless(arrived: Arrived) -> Iterator[Step]:
        found = re.search(rb"reader (\d+)", arrived.body)
        if found is None:
            yield answer(b'{"choices":[]}')
            return
        yield stream_head()
        for _ in range(STREAM_BYTES // len(piece)):
            yield chunk(piece)
            sent[int(found[1])] += len(piece)

    with (
        RawUpstream(endless) as upstream,  # type: ignore[arg-type]
        relaying(upstream.url, tmp_path) as server,
        contextlib.ExitStack() as held,
    ):
        for _ in range(20):
            assert ask(server.url, CHAT, chat()).status == 200
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        readers = [held.enter_context(connected(server.url)) for _ in range(READERS)]
        for number, reader in enumerate(readers):
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            reader.sendall(request_bytes(chat(f"reader {number}", stream=True)))
        comes_to_rest(sent)
        for reader in readers:
            reader.recv(10_000)  # a little, so that more is taken in
        comes_to_rest(sent)
        each = (process.memory_info().rss - before) / READERS
        assert all(0 < taken < STREAM_BYTES / 2 for taken in sent.values()), sent
        assert each < 1_000_000, each
        assert ask(server.url, CHAT, chat()).status == 200
        held.close()


def comes_to_rest(sent: dict[int, int]) -> None:
    until, held = time.monotonic() + 30, -1
    while (now := sum(sent.values())) != held and time.monotonic() < until:
        held = now
        time.sleep(0.3)


class Pulse:
    """Around a proxy: how late its event loop comes to what is due, in seconds."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.beating = threading.Event()
        self._task: asyncio.Task[None] | None = None

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if self._task is None and scope["type"] == "http":
                self._task = asyncio.create_task(self._beat())
            await app(scope, receive, send)

        return watched

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            await asyncio.sleep(0.005)
            if self.beating.is_set():
                self.gaps.append(clock() - began - 0.005)

    def percentile(self, share: float) -> float:
        return sorted(self.gaps)[int(len(self.gaps) * share)]


IDLE = 200


def test_idle_streams_hold_nobody_up(start_proxy: StartProxy) -> None:
    """R12, short form: with 200 streams open that say nothing, the event loop is on time and others are served."""
    pulse = Pulse()

    def script(arrived: Arrived) -> list[Step]:
        idle = b'"stream": true' in arrived.body
        return [stream_head(), chunk(ROLE + CONTENT), End.SILENCE] if idle else [answer(b'{"choices":[]}')]

    with RawUpstream(script) as upstream, contextlib.ExitStack() as open_streams:
        url = start_proxy(upstream.url, wrap=pulse.wrap)
        request = request_bytes(chat(stream=True))
        for _ in range(IDLE):
            stream = open_streams.enter_context(connected(url))
            stream.sendall(request)
        assert upstream.wait_arrived(IDLE, 20)
        # Test machines are busy now and then. Code that blocks the loop for each stream does so every time.
        for _ in range(5):
            pulse.gaps.clear()
            pulse.beating.set()
            for _ in range(20):
                assert ask(url, CHAT, chat()).status == 200
                time.sleep(0.02)
            pulse.beating.clear()
            assert len(pulse.gaps) > 20
            if pulse.percentile(0.5) < 0.02 and pulse.percentile(0.99) < 0.2:
                break
        assert pulse.percentile(0.5) < 0.02
        assert pulse.percentile(0.99) < 0.2
