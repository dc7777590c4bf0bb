"""An upstream that returns the response named by a header of the request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from soak.bombs.families import CONTENT

ASKS_FOR = "x-bomb"
"""The header of a request that names its response. Any other request gets a short answer."""

PACKETS_AT_ONCE = 64
"""Single-byte packets to send before the upstream runs other work."""


@dataclass(frozen=True)
class Response:
    """A response of the upstream.

    ``piece`` is the size of a chunk in bytes, and zero for a response with a length. ``packets`` sends each chunk in
    its own packet.
    """

    body: bytes
    status: int = 200
    kind: str = "application/json"
    encoding: str | None = None
    piece: int = 0
    packets: bool = False

    def head(self) -> bytes:
        """Return the status line and the headers."""
        lines = [f"HTTP/1.1 {self.status} Status", f"content-type: {self.kind}"]
        if self.encoding is not None:
            lines.append(f"content-encoding: {self.encoding}")
        lines.append("transfer-encoding: chunked" if self.piece else f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode()

    @cached_property
    def writes(self) -> list[bytes]:
        """The bytes of each write: all at once, or a chunk each."""
        if not self.piece:
            return [self.head() + self.body]
        starts = range(0, len(self.body), self.piece)
        parts = [self.body[start : start + self.piece] for start in starts]
        chunks = [self.head(), *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]
        return chunks if self.packets else [b"".join(chunks)]


@contextlib.contextmanager
def serving(responses: Mapping[str, Response]) -> Iterator[int]:
    """Serve the responses on loopback, from a thread, until the block ends. Yields the port."""
    for response in responses.values():
        _ = response.writes  # Build it before the measurement.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="bombs-upstream", daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(lambda reader, writer: _serve(reader, writer, responses), "127.0.0.1", 0)

    async def stop() -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, responses: Mapping[str, Response]) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while True:
            name = await _request(reader)
            await _respond(writer, Response(CONTENT) if name is None else responses[name])
    except (ConnectionError, asyncio.IncompleteReadError):
        return
    finally:
        writer.close()


async def _request(reader: asyncio.StreamReader) -> str | None:
    """Read a request. Return the name of the response to send."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    pairs = (line.partition(":") for line in head.split("\r\n")[1:])
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if "transfer-encoding" in headers:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        await reader.readexactly(int(headers.get("content-length", 0)))
    return headers.get(ASKS_FOR)


async def _respond(writer: asyncio.StreamWriter, response: Response) -> None:
    for number, data in enumerate(response.writes):
        writer.write(data)
        if number % PACKETS_AT_ONCE == 0:
            await asyncio.sleep(0)
    await writer.drain()
