"""What the two lanes have in common: a request goes in, an answer comes out as bytes in OpenAI's format."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

from proxy.http.headers import Credential
from proxy.http.headers import Headers as Headers


class Outgoing(msgspec.Struct, eq=False):
    """A chat completion on its way to an upstream.

    ``body`` is the JSON in OpenAI's format, whole; ``model`` the name the upstream knows (already in ``body``).
    ``headers`` are the client's, less hop-by-hop ones and less its credentials. ``credential`` is the caller's own key,
    used only where the upstream is configured without one. ``timeout`` is in seconds, for the whole attempt up to the
    first byte of the answer. ``bounded`` says that the sender cancels the attempt then.
    """

    body: bytes
    model: str
    stream: bool
    headers: Headers
    credential: Credential | None
    timeout: float
    bounded: bool = False


class Answer(msgspec.Struct, eq=False):
    """An upstream's answer, on its way back.

    ``body`` yields the bytes as they come; it raises ``errors.UpstreamInterrupted`` if the upstream breaks off.
    ``headers`` are lower case, without hop-by-hop ones. ``close`` ends the upstream's request at once; it may be
    called at any time, and twice. ``keeps_request`` says that the request stays in memory until the answer ends.
    """

    status: int
    headers: Headers
    body: AsyncIterator[bytes]
    close: Callable[[], Awaitable[None]]
    keeps_request: bool = False


class Transport(Protocol):
    """How requests reach one upstream."""

    async def send(self, request: Outgoing) -> Answer:
        """Send the request and wait for the head of the answer.

        An error status is an answer like any other. Raises ``errors.UpstreamUnreachable``,
        ``errors.UpstreamTimeout`` or ``errors.UpstreamInterrupted`` where there is no answer.
        """
        ...

    async def retire(self) -> None:
        """Close the lane's connections as soon as no answer is open; it may be used all the same, for a last time."""
        ...

    async def aclose(self) -> None:
        """Close the lane's connections."""
        ...
