"""A TCP relay in front of a server: it delays bytes, or leads to another server.

The relay has its own process, so that the load doesn't delay it. It reads commands from its standard input: ``delay
SECONDS`` and ``target PORT``.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from soak.processes import END_WITHIN, ROOT


class Gate:
    """A running relay on ``port``."""

    def __init__(self, target: int) -> None:
        """Start the process. ``target`` is the server's port."""
        self._process = subprocess.Popen(  # noqa: S603 - the check defines the command
            [sys.executable, "-m", "soak.fleet.gate", str(target)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None  # noqa: S101 - for mypy
        self.port = int(self._process.stdout.readline())

    def slow_down(self, seconds: float) -> None:
        """Delay each piece of a request."""
        self._command(f"delay {seconds}")

    def lead_to(self, target: int) -> None:
        """Lead new connections to another server, and close the others."""
        self._command(f"target {target}")

    def end(self) -> None:
        """End the process."""
        self._process.communicate(timeout=END_WITHIN)

    def _command(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        print(line, file=self._process.stdin, flush=True)


@contextlib.contextmanager
def running(target: int) -> Iterator[Gate]:
    """Run a relay as long as the block runs."""
    gate = Gate(target)
    try:
        yield gate
    finally:
        gate.end()


class Relay:
    """The connections through the relay. ``delay`` is the seconds that each piece of a request waits."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._delay = 0.0
        self._open: set[asyncio.StreamWriter] = set()

    async def run(self) -> None:
        """Relay until the standard input ends."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, _, value = line.partition(" ")
            if command == "delay":
                self._delay = float(value)
            else:
                self._target = int(value)
                self._close_all()
        server.close()
        self._close_all()

    def _close_all(self) -> None:
        for writer in list(self._open):
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target)
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
                if delayed and self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(piece)
                await writer.drain()


if __name__ == "__main__":
    asyncio.run(Relay(int(sys.argv[1])).run())
