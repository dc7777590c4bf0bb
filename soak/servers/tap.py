"""Between proxy and server: hands on bytes as they come, and writes down what was asked and answered.

Connections end on one side as they end on the other, so what a server does to them reaches the proxy.
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
"""So much of a strange answer is kept."""

READ_BYTES = 65_536


@dataclass(slots=True)
class Counts:
    """What the server did with requests for chat completions: how many came, how many it refused, how many
    streams of status 200 had no event in them, how many had some and no reason for their end, and how many connections
    it ended within an answer.

    ``shapes`` are the answers that were no answers.
    """

    requests: int = 0
    refused: int = 0
    empty: int = 0
    broken: int = 0
    torn: int = 0
    shapes: Shapes = field(default_factory=Shapes)

    def note(self, status: int, body: bytes, *, complete: bool = True) -> None:
        """Count an answer."""
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
            self.shapes.note(example)

    def as_json(self) -> dict[str, object]:
        """The counts as JSON takes them."""
        return {
            "requests": self.requests,
            "refused": self.refused,
            "empty": self.empty,
            "broken": self.broken,
            "torn": self.torn,
            "shapes": self.shapes.as_json(),
        }


class Tap:
    """Listens for as long as ``serve`` runs; ``counts`` may be set to new ones between two requests."""

    def __init__(self, port: int) -> None:
        """``port`` is the server's, on loopback."""
        self.counts = Counts()
        self._upstream = port
        self._port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """The URL to ask in place of the server's."""
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
        sending = asyncio.create_task(_hand_on(reader, to_them, requests.parser))
        answering = asyncio.create_task(_hand_on(theirs, writer, answers.parser))
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


async def _hand_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    parser: httptools.HttpRequestParser | httptools.HttpResponseParser,
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(READ_BYTES):
            parser.feed_data(data)  # first, so that an answer is counted before anybody has it
            writer.write(data)
            await writer.drain()


class _Requests:
    """Notes of each request whether it is one for a chat completion."""

    def __init__(self, asked: list[bool]) -> None:
        self._asked = asked
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self._asked.append(url.endswith(b"/chat/completions"))


class _Answers:
    """Counts the answers to them."""

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
            self._tap.counts.note(self.parser.get_status_code(), bytes(self._body))

    def ended(self, *, by_server: bool) -> None:
        """The connection is over."""
        if not self._asked or not self._asked.pop(0):
            return
        body = bytes(self._body) if self._begun else b""
        status = self.parser.get_status_code() if self._begun else 0
        # Who has read this may leave before the stream's formal end.
        done = body.endswith(b"data: [DONE]\n\n")
        if by_server or done:
            self._tap.counts.note(status, body, complete=done and not by_server)
        else:
            self._tap.counts.requests += 1
