"""Read the start of an upstream's response, until it's clear whether it has content or is an error."""

from __future__ import annotations

import asyncio
import re

import msgspec

from proxy.dialects.answers import EVENT, Answers
from proxy.dialects.apis import CHAT
from proxy.errors import RequestError
from proxy.http.decompression import unpack
from proxy.overflow import EchoedRequest, Overflow, recognise
from proxy.overflow.errors import as_error
from proxy.overflow.silent import Finished
from proxy.telemetry.record import UpstreamErrorNames
from proxy.upstream.transport import Answer, Held, read_most

ERROR_BYTES = 1_000_000  # bytes of an error's body that the proxy reads
INLINE_BYTES = 8_192  # an error's body of at most this many bytes is read on the event loop, a longer one in a thread
HELD_BYTES = 65_536  # bytes of a stream that the proxy holds until the first content


_NAME = re.compile(r"[\w.:/\[\]-]{1,64}", re.ASCII)
"""The form of a code, a type, or the path of a parameter. Any other text may be content."""

LARGE_REQUEST = 262_144  # bytes of a request above which a thread compares an error with it


class Asked(msgspec.Struct, eq=False, frozen=True):
    """The request that a response answers."""

    body: bytes = b""
    rate_limits: bool = False  # a rate limit that this request alone exceeds is an overflow
    answers: Answers = CHAT.answers
    seconds: float | None = None  # for how long the proxy may hold the response, by default `HELD_SECONDS`


NOTHING = Asked()


class ResponseStart(msgspec.Struct, eq=False):
    """A response whose start the proxy has read."""

    answer: Answer
    first: bytes  # the bytes that it has read; `answer.body` has the rest
    complete: bool  # there is no rest
    overflow: Overflow | None  # set if the upstream refused the prompt as too long
    answers: Answers
    ended: bool = False  # a stream ended without content
    written: bool = False  # there is content
    error: UpstreamErrorNames | None = None  # set if the response is an error
    milliseconds: float = 0.0  # from the request to this start
    end: Finished | None = None  # the usage and finish reason of a whole response with content

    @property
    def empty(self) -> bool:
        """Return whether this is the whole of a successful response, without any content."""
        if self.written:
            return False
        over = self.answer.status == 200 and (self.complete or self.ended) and not self.answer.is_encoded
        return over and self.usage.empty

    @property
    def succeeded(self) -> bool:
        """Return whether the upstream accepted the prompt, and the response has content."""
        return self.written or (self.overflow is None and self.answer.status < 400 and not self.empty)

    @property
    def usage(self) -> Finished:
        """Return the usage and finish reason of a complete response."""
        return self.answers.read_usage(self.first)

    @property
    def silence(self) -> bool:
        """Return whether this is a stream without any event except its end."""
        return self.is_stream and self.answers.is_silence(self.first)

    @property
    def interrupted(self) -> bool:
        """Return whether the server abandoned a stream before it wrote anything.

        It sent its first event, then ``[DONE]``. By default, llama-cpp-python does this when another request arrives.
        The stream of a model that wrote nothing ends with a finish reason, a usage, or at least a last event.
        """
        return not self.written and self.is_stream and self.empty and self.answers.gives_up(self.first)

    @property
    def is_stream(self) -> bool:
        """Return whether the response is an uncompressed event stream."""
        return self.answer.is_stream and not self.answer.is_encoded


async def read_start(answer: Answer, asked: Asked = NOTHING) -> ResponseStart:
    """Read the start of a response. Raises ``UpstreamInterrupted`` if the connection breaks before that."""
    body = Held(answer, asked.seconds)
    if answer.status >= 400:
        first, whole = await read_most(body, ERROR_BYTES)
        overflow, error = await _error(answer, first, asked)
        return ResponseStart(answer, first, whole and not body.late, overflow, asked.answers, error=error)
    if answer.is_stream:
        return await _stream(answer, body, b"", asked)
    return await _whole(answer, body, asked)


async def _whole(answer: Answer, body: Held, asked: Asked) -> ResponseStart:
    """Read a response that isn't labeled as a stream. If it's longer than ``ERROR_BYTES``, it's no error."""
    length, packed = answer.header("content-length"), answer.is_encoded
    first, complete = bytearray(), False
    async for chunk in body:
        first += chunk
        if not packed and EVENT.match(first):
            return await _stream(answer, body, bytes(first), asked)
        complete = str(len(first)) == length
        if complete or len(first) > ERROR_BYTES:
            break
    else:
        complete = not body.late
    start = bytes(first)
    if packed and not complete:
        return ResponseStart(answer, start, False, None, asked.answers)
    plain = await readable(answer, start) if packed else start
    end = asked.answers.read_whole(plain) if complete else None
    if end is not None and not end.empty:
        return ResponseStart(answer, start, True, None, asked.answers, written=True, end=end)
    overflow, error = await _error(answer, start, asked, plain)
    return ResponseStart(answer, start, complete, overflow, asked.answers, error=error)


async def _stream(answer: Answer, body: Held, first: bytes, asked: Asked) -> ResponseStart:
    """Read a stream until its first content. ``first`` is the bytes that the proxy has already read.

    An error event may exceed ``HELD_BYTES``, because some errors repeat the whole request.
    """
    if answer.is_encoded:
        return ResponseStart(answer, first, False, None, asked.answers)
    start = asked.answers.event_reader()
    found = start.feed(first)
    held = bytearray(first)
    in_error = False
    while found is None and not body.late:
        if len(held) > HELD_BYTES and not in_error:
            in_error = start.in_error()
        if len(held) > (ERROR_BYTES if in_error else HELD_BYTES):
            break
        chunk = await anext(body, None)
        if chunk is not None:
            held += chunk
            found = start.feed(chunk)
        elif not body.late:
            # The last event may lack its blank line, or the body may be a plain error with a wrong content type.
            overflow, error = await _error(answer, bytes(held), asked)
            return ResponseStart(answer, bytes(held), True, overflow, asked.answers, error=error)
    first = bytes(held)
    overflow, error = await _error(answer, first, asked) if found == "error" else (None, None)
    return ResponseStart(answer, first, False, overflow, asked.answers, ended=found == "end", error=error)


async def _error(
    answer: Answer, body: bytes, asked: Asked, plain: bytes = b""
) -> tuple[Overflow | None, UpstreamErrorNames | None]:
    """Return the overflow in a response, and the names in its error. ``plain`` is the decompressed body."""
    shown = plain or await readable(answer, body)

    def read() -> tuple[Overflow | None, UpstreamErrorNames | None]:
        request = EchoedRequest(asked.body) if asked.body else None
        overflow = recognise(answer.status, shown, answer.headers, request=request, rate_limits=asked.rate_limits)
        return overflow, error_names(answer.status, shown)

    if len(shown) <= INLINE_BYTES and (answer.status < 400 or len(asked.body) <= LARGE_REQUEST):
        return read()
    return await asyncio.to_thread(read)


def error_names(status: int, body: bytes) -> UpstreamErrorNames | None:
    """Return the names in an error, without free text. ``None`` if the body has no error."""
    error = as_error(status, body)
    if error is None:
        return UpstreamErrorNames() if status >= 400 else None
    found = error.get("error")
    fields = found if isinstance(found, dict) else {}
    names = {field: str(value) for field in ("code", "type", "param") if (value := fields.get(field)) is not None}
    return UpstreamErrorNames(**{field: name for field, name in names.items() if _NAME.fullmatch(name)})


async def readable(answer: Answer, body: bytes, most: int = ERROR_BYTES) -> bytes:
    """Return a body decompressed, or as it is if it is invalid or would have over ``most`` bytes."""
    encoding = answer.header("content-encoding")
    if not encoding:
        return body
    try:
        return await asyncio.to_thread(unpack, body, encoding, most)
    except RequestError:
        return body
