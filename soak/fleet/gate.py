"""A TCP relay in front of a server: it delays bytes, or leads to another server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """The relay. ``target`` is the server's port, and ``delay`` the seconds that each piece of a request waits."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Relay on loopback as long as the block runs."""
        started = threading.Event()
        thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        thread.start()
        started.wait(10)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(10)

    def lead_to(self, target: int) -> None:
        """Lead new connections to another server, and close the others."""
        self.target = target
        self._loop.call_soon_threadsafe(self._close_all)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()

    def _close_all(self) -> None:
        for writer in list(self._open):
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, inner_writer}
        ways = [
            asyncio.ensure_future(self._copy(reader, inner_writer, delayed=True)),
            asyncio.ensure_future(self._copy(inner_reader, writer, delayed=False)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for one in (writer, inner_writer):
            self._open.discard(one)
            one.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delayed: bool) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while piece := await reader.read(1 << 16):
                if delayed and self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(piece)
                await writer.drain()
