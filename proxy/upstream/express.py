"""Send usual requests over aiohttp's pool in fewer steps than aiohttp's client takes.

A POST with a small body needs no redirects, cookies, compression, or tracing. Connections, TLS, name lookup, parser,
and the flow control of responses are aiohttp's. Some of these parts aren't public, so ``check`` looks for them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.helpers import TimerNoop
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDictProxy
from yarl import URL

from proxy.upstream.transport import Headers

PIECE_BYTES = 65_536  # a larger body isn't copied behind its head
WHOLE_BYTES = 2_000_000  # a larger body is written in pieces, so that other requests run in between

_UNUSUAL = frozenset({"connection", "content-length", "cookie", "expect", "host", "transfer-encoding"})
"""Headers that aiohttp's client interprets."""

_NO_TIMER = TimerNoop()
_name_of = itemgetter(0)

TARGETS, LONGEST_URL = 100, 2_048
"""Addresses to remember, and the characters of the longest one. A client can choose queries."""

_PARTS: dict[Callable[..., Any], Sequence[str]] = {
    aiohttp.TCPConnector.connect: ("req", "traces", "timeout"),
    ResponseHandler.set_response_params: (
        *("timer", "skip_payload", "read_until_eof", "auto_decompress", "read_bufsize"),
        *("max_line_size", "max_field_size"),
    ),
    ResponseHandler.read: (),
    Connection.release: (),
    Connection.close: (),
    StreamReader.on_eof: ("callback",),
    StreamReader.set_exception: ("exc",),
    ClientRequest: ("method", "url", "loop", "session"),
}
_ATTRIBUTES = ((ClientRequest, "request_info"), (RawResponseMessage, "code"), (RawResponseMessage, "headers"))


def check() -> None:
    """Raise ``RuntimeError`` if the installed aiohttp has other parts than this module uses, or needs more."""
    changed: list[Callable[..., Any]] = [part for part, name in _ATTRIBUTES if not hasattr(part, name)]
    for part, names in _PARTS.items():
        own = () if isinstance(part, type) else ("self",)
        try:
            inspect.signature(part).bind(**dict.fromkeys((*own, *names)))
        except TypeError:
            changed.append(part)
    for part in changed:
        raise RuntimeError(
            f"aiohttp {aiohttp.__version__} isn't supported: {part.__qualname__} has changed. "
            "Install the version in requirements.lock."
        )


class Response(Protocol):
    """The part of an ``aiohttp.ClientResponse`` that the proxy uses."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> CIMultiDictProxy[str]: ...
    @property
    def content(self) -> StreamReader: ...
    def close(self) -> None: ...


class _Received:
    """A response on a connection, which goes back to the pool at its end."""

    def __init__(self, connection: Connection, status: int, headers: CIMultiDictProxy[str], content: StreamReader):
        self.status = status
        self.headers = headers
        self.content = content
        self._connection: Connection | None = connection
        content.on_eof(callback=self._end)

    def close(self) -> None:
        """Close the connection if the response hasn't ended."""
        connection, self._connection = self._connection, None
        if connection is not None:
            if self.content.exception() is None:
                self.content.set_exception(exc=aiohttp.ClientConnectionError("Connection closed"))
            connection.close()

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        transport = connection.transport
        # The upstream may answer before it has the whole request.
        if transport is not None and transport.get_write_buffer_size():
            connection.close()
        else:
            connection.release()


class _Target(NamedTuple):
    """An address: aiohttp's request, which says how to connect, and the beginning of the head."""

    request: ClientRequest
    start: str


class Express:
    """Sends requests over the connections of a session."""

    def __init__(self, session: aiohttp.ClientSession, *, read_bufsize: int, line_size: int) -> None:
        """``read_bufsize`` and ``line_size`` are those of the session, in bytes."""
        assert session.connector is not None  # noqa: S101 - an open session has one
        self._session = session
        self._connector = session.connector
        self._read_bufsize = read_bufsize
        self._line_size = line_size
        self._targets: dict[str, _Target] = {}

    def post(self, url: str, headers: Headers, body: bytes) -> Awaitable[Response] | None:
        """Return the request, or ``None`` if it isn't usual. Headers must be in lower case."""
        if len(body) > WHOLE_BYTES or len(url) > LONGEST_URL:
            return None
        target = self._targets.get(url)
        if target is None:
            target = self._target(url)
        lines = (target.start, *map(": ".join, headers), f"content-length: {len(body)}\r\n\r\n")
        head, ends = "\r\n".join(lines), len(lines) + 2
        # Each line ends once. A value with a line of its own would be another header.
        if not head.isascii() or head.count("\n") != ends or head.count("\r") != ends:
            return None
        if "\0" in head or not _UNUSUAL.isdisjoint(map(_name_of, headers)):
            return None
        return self._sent(target.request, head.encode(), body)

    def _target(self, url: str) -> _Target:
        session = self._session
        address, loop = URL(url, encoded=True), asyncio.get_running_loop()
        request = ClientRequest(method="POST", url=address, loop=loop, session=session)
        start = f"POST {request.url.raw_path_qs} HTTP/1.1\r\nhost: {request.headers['host']}"
        if len(self._targets) >= TARGETS:
            self._targets.clear()
        made = self._targets[url] = _Target(request, start)
        return made

    async def _sent(self, request: ClientRequest, head: bytes, body: bytes) -> Response:
        try:
            connection = await self._connector.connect(req=request, traces=[], timeout=self._session.timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError("no connection in time") from error
        try:
            protocol, transport = connection.protocol, connection.transport
            assert protocol is not None  # noqa: S101 - the connection has just been taken
            assert transport is not None  # noqa: S101
            protocol.set_response_params(
                timer=_NO_TIMER,
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=self._read_bufsize,
                max_line_size=self._line_size,
                max_field_size=self._line_size,
            )
            if len(body) <= PIECE_BYTES:
                transport.write(head + body)
            else:
                transport.write(head)
                transport.write(body)
            while True:
                message, content = await protocol.read()
                if not 100 <= message.code < 200 or message.code == 101:
                    return _Received(connection, message.code, message.headers, content)
        except BaseException as error:
            connection.close()
            if isinstance(error, HttpProcessingError):
                raise aiohttp.ClientResponseError(
                    request.request_info, (), status=error.code, message=error.message
                ) from error
            raise


check()
