"""Send the response to one request: uvicorn's cycle, with a head that is checked as a whole."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import Any, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from proxy.http.request_body import CONNECTION, Connection

_CONTROLS = frozenset((*range(0x20), 0x7F))
_NOT_IN_NAMES = bytes(sorted(_CONTROLS.union(b'()<>@,;:[]={} \t\\"')))
_NOT_IN_VALUES = bytes(sorted(_CONTROLS.difference(b"\t")))
"""Bytes that would end a header, or that RFC 9110 doesn't allow in its name. uvicorn refuses the same ones."""

_name_of, _value_of = itemgetter(0), itemgetter(1)


class Cycle(RequestResponseCycle):
    """One request and its response.

    uvicorn searches each name and each value for invalid bytes, which takes as long as the rest of a small response's
    head. Here all names are searched at once, and all values.

    ``pieces`` are those of a large body that the application hasn't read, and ``waiting`` is the bytes that they take.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.pieces: list[bytes] = []
        self.waiting = 0

    @property
    def connection(self) -> Connection:
        """Return what the application knows of the connection. It doesn't refer to the cycle, which has the scope."""
        return cast(Connection, cast(Scope, self.scope)[CONNECTION])

    async def receive(self) -> Any:
        """Return the next message of ASGI: the bytes that have arrived since the one before."""
        message: Any = await super().receive()
        pieces = self.pieces
        if pieces and message["type"] == "http.request":
            self.pieces, self.waiting = [], 0
            message["body"] = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return message

    async def send(self, message: Any) -> None:
        """Send a message of ASGI."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started:
            if kind != "http.response.start":
                raise RuntimeError(f"Expected ASGI message 'http.response.start', but got {kind!r}.")
            self._begin(message["status"], [*self.default_headers, *message.get("headers", ())])
        elif kind != "http.response.body" or self.response_complete:
            raise RuntimeError(f"Unexpected ASGI message {kind!r} after the head of a response.")
        else:
            self._go_on(message.get("body", b""), more=message.get("more_body", False))

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Write the head. ASGI demands names in lower case."""
        self.response_started = True
        self.waiting_for_100_continue = False
        fields = dict(headers)
        check_headers(headers)
        lines = [STATUS_LINE[status][:-2], *map(b": ".join, headers)]
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            self.chunked_encoding = True
        elif (length := fields.get(b"content-length")) is not None:
            self.expected_content_length = int(length)
            self.chunked_encoding = False
        elif self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        if b"close" in [token.strip() for token in fields.get(b"connection", b"").lower().split(b",")]:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        lines += (b"", b"")
        self.transport.write(b"\r\n".join(lines))

    def _go_on(self, body: bytes, *, more: bool) -> None:
        """Write a piece of the body."""
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            piece = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(piece if more else piece + b"0\r\n\r\n")
        else:
            if len(body) > self.expected_content_length:
                raise RuntimeError("Response content longer than Content-Length")
            self.expected_content_length -= len(body)
            self.transport.write(body)
        if more:
            return
        if self.expected_content_length:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def check_headers(headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse headers that a client could read as other ones. Raises ``RuntimeError``."""
    names = b"".join(map(_name_of, headers))
    if len(names.translate(None, _NOT_IN_NAMES)) != len(names):
        raise RuntimeError("Invalid HTTP header name.")
    values = b"".join(map(_value_of, headers))
    if len(values.translate(None, _NOT_IN_VALUES)) != len(values):
        raise RuntimeError("Invalid HTTP header value.")


class CoalescingTransport:
    """The transport of one response, which holds its first write until the second one.

    uvicorn writes the head of a response and its body separately, and each write is a system call and a packet of its
    own: together about a tenth of the CPU time of a small request. A head that no body follows within the same turn of
    the event loop is written alone.
    """

    __slots__ = ("_flush", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | bytearray | memoryview[Any] | None = None
        self._flush: asyncio.Handle | None = None

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write bytes. The first ones wait for the next call, or for the next turn of the event loop."""
        if self._flush is None:
            self._head = data
            self._flush = self._loop.call_soon(self.flush)
        elif self._head is None:
            self._transport.write(data)
        else:
            head, self._head = self._head, None
            self._flush.cancel()
            self._transport.write(b"".join((head, data)))

    def flush(self) -> None:
        """Write the held bytes."""
        head, self._head = self._head, None
        if head is not None:
            self._transport.write(head)

    def close(self) -> None:
        """Write the held bytes and close the connection."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or about to be."""
        return self._transport.is_closing()
