"""The interface of all transports: a request goes in, an answer comes out, both as bytes in the same API."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec

from proxy.http.headers import Credential
from proxy.http.headers import Headers as Headers
from proxy.upstream.traits import Edit, RefusedRequest

CHAT_PATH = "/chat/completions"
MESSAGES_PATH = "/messages"
RESPONSES_PATH = "/responses"

JSON = ("content-type", "application/json")
EVENT_STREAM = ("content-type", "text/event-stream; charset=utf-8")

HELD_SECONDS = 5.0  # seconds from the head of an answer for which its beginning may be held back

# OpenAI's own families reject `max_tokens`; other servers may support no other field.
_COMPLETION_FIELD = re.compile(r"(?:gpt-[5-9]|o[1-9](?![a-z0-9.])|codex-mini)")


def output_field(model: str) -> str:
    """Return the name of the field of chat completions that limits a model's output."""
    name = model.lower().rsplit("/", 1)[-1]
    return "max_completion_tokens" if _COMPLETION_FIELD.match(name) else "max_tokens"


class Outgoing(msgspec.Struct, eq=False):
    """A conversation on its way to an upstream."""

    body: bytes  # the whole JSON in the format of `path`
    model: str  # the upstream's name, which is already in `body`
    stream: bool
    headers: Headers  # the client's, without hop-by-hop ones and credentials
    credential: Credential | None  # the caller's own key, used only if the upstream has no configured key
    timeout: float  # seconds for the whole attempt up to the first byte of the answer
    bounded: bool = False  # the sender itself cancels the attempt after `timeout`
    path: str = CHAT_PATH  # below the upstream's base URL
    query: str = ""
    expanded: Callable[[], bytes] | None = None  # returns the body with items in the place of references
    edits: tuple[Edit, ...] = ()  # those that the upstream needs in the proxy's own words, after `family`'s
    family: str = ""  # a model with the same habits, by default `model`
    reasons: bool = False  # the model takes an effort
    edited: tuple[str, ...] = ()  # the edits that had an effect on a translated request
    watch: Callable[[Answer, str], None] | None = None  # gets the upstream's own answer and its path from a bridge
    count: Callable[[], Awaitable[int | None]] | None = None  # returns the prompt's tokens


class Answer(msgspec.Struct, eq=False):
    """An upstream's answer, on its way back."""

    status: int
    headers: Headers  # lower case, without hop-by-hop ones
    body: AsyncIterator[bytes]  # the bytes as they arrive. Raises `UpstreamInterrupted`.
    close: Callable[[], Awaitable[None]]  # ends the upstream's request at once, at any time, and twice
    keeps_request: bool = False  # the request stays in memory until the answer ends
    start_time: float | None = None  # when the head arrived, by the loop's clock, if the transport waited since
    refused: RefusedRequest | None = None  # set if the upstream refused the proxy's own words
    edited: tuple[str, ...] = ()  # that of the request

    @classmethod
    def whole(cls, status: int, headers: Headers, body: bytes) -> Answer:
        """Return an answer whose body is already there."""
        return cls(status, headers, _once(body), _nothing)

    def header(self, name: str) -> str:
        """Return the first header with a name, or an empty string."""
        for key, value in self.headers:
            if key == name:
                return value
        return ""

    @property
    def is_stream(self) -> bool:
        """Return whether the answer is an event stream, by its media type."""
        return self.header("content-type").lower().startswith("text/event-stream")

    @property
    def is_encoded(self) -> bool:
        """Return whether the answer is compressed."""
        return self.header("content-encoding").lower() not in ("", "identity")


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _nothing() -> None:
    """Do nothing, because the answer was read whole."""


async def read_most(body: AsyncIterator[bytes], most: int) -> tuple[bytes, bool]:
    """Read until there are more than ``most`` bytes. Return them, and whether they are the whole body."""
    read = bytearray()
    async for chunk in body:
        read += chunk
        if len(read) > most:
            return bytes(read), False
    return bytes(read), True


class Held:
    """Reads the beginning of an answer for at most some seconds, by default ``HELD_SECONDS``.

    Then ``late`` is true, and the answer's body goes on with the read that hasn't ended.
    """

    def __init__(self, answer: Answer, seconds: float | None = None) -> None:
        self._answer = answer
        self._clock = asyncio.get_running_loop().time
        self._until = (answer.start_time or self._clock()) + (HELD_SECONDS if seconds is None else seconds)
        self.late = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        left, answer = self._until - self._clock(), self._answer
        if left > 0:
            read = asyncio.ensure_future(anext(answer.body, None))
            try:
                await asyncio.wait({read}, timeout=left)
                if read.done() and (chunk := read.result()) is not None:
                    return chunk
            except BaseException:
                await _close(read, _nothing)
                del read  # its error's traceback refers to this frame
                raise
            if not read.done():
                answer.body, answer.close = _resumed(read, answer.body), partial(_close, read, answer.close)
                left = 0
        self.late = left <= 0
        raise StopAsyncIteration


async def _resumed(read: asyncio.Future[bytes | None], body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    chunk = await read
    while chunk is not None:
        yield chunk
        chunk = await anext(body, None)


async def _close(read: asyncio.Future[bytes | None], close: Callable[[], Awaitable[None]]) -> None:
    read.cancel()
    await asyncio.wait({read})
    if not read.cancelled():
        read.exception()  # marks it as retrieved
    await close()


class Transport(ABC):
    """Sends requests to one upstream.

    A transport without connections of its own sends through another one. The owner of that one closes it.
    """

    @abstractmethod
    async def send(self, request: Outgoing) -> Answer:
        """Send the request and wait for the head of the answer.

        Returns error statuses as answers, too. Raises ``errors.UpstreamUnreachable``, ``errors.UpstreamTimeout``, or
        ``errors.UpstreamInterrupted`` if there is no answer.
        """

    async def retire(self) -> None:  # noqa: B027 - see the class
        """Close the connections once no answer is open. Requests that still hold this transport may send once more."""

    async def aclose(self) -> None:  # noqa: B027 - see the class
        """Close the connections."""
