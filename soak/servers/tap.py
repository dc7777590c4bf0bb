"""Forward bytes between proxy and server unchanged, and count requests and responses.

When one side closes its connection, the other side is closed too. So the proxy sees every disconnect of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import httptools

from soak.servers.shapes import Shapes

_REASON = re.compile(rb'"finish_reason": *"')

SHAPE_BYTES = 900
"""Bytes of a failed response to keep."""

READ_BYTES = 65_536


@dataclass(slots=True)
class Counts:
    """The server's responses to requests for chat completions.

    ``empty`` counts responses with status 200 and without any event, ``broken`` streams without a finish reason, and
    ``torn`` connections that the server closed during a response. ``shapes`` has the failed responses.
    """

    requests: int = 0
    refused: int = 0
    empty: int = 0
    broken: int = 0
    torn: int = 0
    shapes: Shapes = field(default_factory=Shapes)

    def add(self, status: int, body: bytes, *, complete: bool = True) -> None:
        """Count a response."""
        failed = status >= 400 or b'"error":' in body[:SHAPE_BYTES]
        empty = complete and not failed and not body.replace(b"data: [DONE]", b"").strip()
        broken = complete and not failed and not empty and not _REASON.search(body)
        self.requests += 1
        self.refused += failed
        self.empty += empty
        self.broken += broken
        self.torn += not complete
        if failed or empty or broken or not complete:
            shown = (
                body if len(body) <= SHAPE_BYTES else body[: SHAPE_BYTES // 2] + b" ... " + body[-SHAPE_BYTES // 2 :]
            )
            example = f"{status}{'' if complete else ', torn'} {shown!r}"
            self.shapes.add(example)

    def as_json(self) -> dict[str, object]:
        """Return the counts for JSON."""
        return {
            "requests": self.requests,
            "refused": self.refused,
            "empty": self.empty,
            "broken": self.broken,
            "torn": self.torn,
            "shapes": self.shapes.as_json(),
        }


class Tap:
    """A forwarding listener. ``counts`` may be replaced between two requests."""

    def __init__(self, port: int) -> None:
        """Create it for a server's port on loopback."""
        self.counts = Counts()
        self._upstream = port
        self._port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Listen on loopback, and yield the URL to use instead of the server's."""
        thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="tap", daemon=True)
        thread.start()
        self._ready.wait()
        try:
            yield f"http://127.0.0.1:{self._port}"
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            thread.join()
            self._loop.close()

    async def _run(self) -> None:
        listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = listener.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, to_them = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.close()
            return
        asked: list[bool] = []
        requests, answers = _Requests(asked), _Answers(asked, self)
        sending = asyncio.create_task(_forward(reader, to_them, requests.parser))
        answering = asyncio.create_task(_forward(theirs, writer, answers.parser))
        try:
            # The side that ends first ends the other one.
            await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
            answers.ended(by_server=not sending.done())
        finally:
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)
            to_them.close()
            writer.close()


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    parser: httptools.HttpRequestParser | httptools.HttpResponseParser,
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            parser.feed_data(data)  # Count a response before the client receives it.
            writer.write(data)
            await writer.drain()


class _Requests:
    """Record whether each request is for a chat completion."""

    def __init__(self, asked: list[bool]) -> None:
        self._asked = asked
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self._asked.append(url.endswith(b"/chat/completions"))


class _Answers:
    """Count the responses to chat completions."""

    def __init__(self, asked: list[bool], tap: Tap) -> None:
        self._asked = asked
        self._tap = tap
        self._body = bytearray()
        self._begun = False
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._body.clear()
        self._begun = True

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self._begun = False
        if self._asked.pop(0):
            self._tap.counts.add(self.parser.get_status_code(), bytes(self._body))

    def ended(self, *, by_server: bool) -> None:
        """Count a response whose connection ended."""
        if not self._asked or not self._asked.pop(0):
            return
        body = bytes(self._body) if self._begun else b""
        status = self.parser.get_status_code() if self._begun else 0
        # A client that has read this may disconnect before the end of the chunked encoding.
        done = body.endswith(b"data: [DONE]\n\n")
        if by_server or done:
            self._tap.counts.add(status, body, complete=done and not by_server)
        else:
            self._tap.counts.requests += 1
