"""How an answer begins: held back until it is clear that it is an answer, not a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from proxy.door import unpack
from proxy.errors import RequestError
from proxy.upstream.ending import finished
from proxy.upstream.lane import Answer
from proxy.upstream.overflow import Overflow, recognise
from proxy.upstream.sse import beginning

ERROR_BYTES = 1_000_000
"""So much of an error's body is read to find out what it says."""

HELD_BYTES = 65_536
"""So much of a stream is held back at most until its first content."""

HELD_SECONDS = 5.0
"""So long it is held back; after that, a comment that keeps the connection alive lets it go. Refusals come sooner."""

_HINT_BYTES = 4_096


@dataclass(slots=True)
class Opening:
    """An answer whose beginning has been read.

    ``first`` is what was read, ``answer.body`` what is still to come, ``complete`` whether that is nothing.
    ``overflow`` says that the upstream refused the prompt as too long. ``ended`` says that a stream came to its end
    without any content.
    """

    answer: Answer
    first: bytes
    complete: bool
    overflow: Overflow | None
    ended: bool = False

    @property
    def empty(self) -> bool:
        """Whether this is all of a successful answer, and nothing was written in it."""
        over = self.answer.status == 200 and (self.complete or self.ended) and not is_encoded(self.answer)
        return over and finished(self.first).empty

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events that can be told apart."""
        return content_type(self.answer).startswith("text/event-stream") and not is_encoded(self.answer)


def content_type(answer: Answer) -> str:
    """The answer's media type, lower case."""
    return header(answer, "content-type").lower()


def is_encoded(answer: Answer) -> bool:
    """Whether the answer comes compressed."""
    return header(answer, "content-encoding").lower() not in ("", "identity")


def header(answer: Answer, name: str) -> str:
    """The answer's first header of a name, or an empty text."""
    return next((value for key, value in answer.headers if key == name), "")


async def opened(answer: Answer) -> Opening:
    """Read the beginning of an answer. Raises ``UpstreamInterrupted`` if it breaks off before that."""
    if answer.status >= 400:
        first, complete = await _read(answer.body, ERROR_BYTES)
        return Opening(answer, first, complete, recognise(answer.status, readable(answer, first)))
    if content_type(answer).startswith("text/event-stream"):
        return await _stream(answer)
    first, complete = await _read(answer.body, 1)
    complete = complete or header(answer, "content-length") == str(len(first))
    if b'"error"' in first[:_HINT_BYTES] and not complete:
        more, complete = await _read(answer.body, ERROR_BYTES)
        first += more
    overflow = recognise(answer.status, first) if b'"error"' in first[:_HINT_BYTES] else None
    return Opening(answer, first, complete, overflow)


async def _stream(answer: Answer) -> Opening:
    first = b""
    if is_encoded(answer):
        return Opening(answer, first, False, None)
    clock = asyncio.get_running_loop().time
    until = clock() + HELD_SECONDS
    async for chunk in answer.body:
        first += chunk
        found = beginning(first)
        if found == "error":
            return Opening(answer, first, False, recognise(answer.status, first))
        if found or len(first) > HELD_BYTES or clock() > until:
            return Opening(answer, first, False, None, ended=found == "end")
    # A stream may end without the blank line that ends its last event.
    failed = beginning(first + b"\n\n") == "error"
    return Opening(answer, first, True, recognise(answer.status, first) if failed else None)


async def _read(body: AsyncIterator[bytes], at_least: int) -> tuple[bytes, bool]:
    """Some bytes of a body, as many as asked for if there are so many, and whether that was all."""
    chunks = []
    size = 0
    async for chunk in body:
        chunks.append(chunk)
        size += len(chunk)
        if size >= at_least:
            return b"".join(chunks), False
    return b"".join(chunks), True


def readable(answer: Answer, body: bytes) -> bytes:
    """An error's body out of its content encoding; as it is where that cannot be undone."""
    encoding = header(answer, "content-encoding")
    if not encoding:
        return body
    try:
        return unpack(body, encoding, 4 * ERROR_BYTES)
    except RequestError:
        return body
