"""Send requests to one upstream over a pool of connections that lasts as long as the upstream's configuration.

Upstreams close idle connections at any time, some after two seconds. So the pool checks each connection before it
reuses it. An upstream may still close one while the request is on its way. ``ClosedIdle`` tells this from other losses.

A POST with a small body needs no redirects, cookies, compression, or tracing. ``Express`` sends it over the pool in
fewer steps than aiohttp's client takes. Connections, TLS, name lookup, parser, and flow control are aiohttp's. Only
this module uses parts of aiohttp that its documents don't name.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import inspect
import io
import os
import select
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import structlog
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.helpers import TimerNoop
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from proxy.errors import UpstreamError, UpstreamInterrupted, UpstreamTimeout, UpstreamUnreachable
from proxy.http.headers import for_client
from proxy.upstream.transport import Answer, Headers

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 15.0  # time for name lookup, connection, and TLS handshake together

READ_BYTES = 32_768
"""Reading from an upstream pauses when a slow client leaves twice this many bytes unread. One read takes up to 256 KB.
With a larger value a paused stream takes over a megabyte, and no stream gets faster."""

WHOLE_BYTES = 1_000_000  # a larger body is written in pieces, so that other requests run in between
KEEPALIVE_SECONDS = 50.0  # Keep an idle connection this long. Load balancers often close theirs after 60 or 75 seconds.

IDLE_SECONDS = 2.0
"""Seconds after a request in which a lost connection counts as one that was idle.

Later, the upstream has probably begun to work on the request, and may have crashed.
"""

LINE_BYTES = 65_536  # longest line of a response's head

_MADE_UP = ("user-agent", "content-type")
_UNLIMITED = contextlib.nullcontext()


class _Request(aiohttp.ClientRequest):
    """A request without aiohttp's default ``accept`` headers. The client's own headers are sent unchanged."""

    DEFAULT_HEADERS = {}  # noqa: RUF012 - aiohttp's attribute


class Connections:
    """Sends requests to one upstream. Create it on the event loop that uses it."""

    def __init__(self, base_url: str, upstream: str) -> None:
        """``upstream`` is the name in the configuration, for error messages."""
        self._base_url = base_url
        self._upstream = upstream
        self._proxy = environment_proxy(base_url)
        self._session: aiohttp.ClientSession | None = None
        self._express: Express | None = None
        self._busy = 0
        self._retired = False

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        within: float | None,
        *,
        again: bool = False,
    ) -> Answer:
        """Send a request and wait for the response's head, for at most ``within`` seconds (``None``: without a limit).

        With ``again``, send it once more if the upstream closed an idle connection. Redirects aren't followed, because
        following one could send a key to another host. Raises ``UpstreamUnreachable``, ``UpstreamTimeout`` or
        ``UpstreamInterrupted``.
        """
        self._busy += 1
        try:
            async with _UNLIMITED if within is None else asyncio.timeout(within):
                try:
                    response = await self._request(method, url, headers, body)
                except ClosedIdle:
                    if not again:
                        raise
                    log.info("upstream.sent_again", upstream=self._upstream)
                    response = await self._request(method, url, headers, body)
        except BaseException as error:
            await self._done()
            if isinstance(error, aiohttp.ClientError | OSError):  # a TimeoutError is an OSError
                raise _upstream_error(error, within, self._upstream) from error
            if isinstance(error, UnicodeError):  # from the codec of international names
                raise _unreachable(self._upstream, "the host name isn't valid") from error
            raise
        if not 200 <= response.status <= 599:
            response.close()
            await self._done()
            raise UpstreamInterrupted(f"The upstream answered with status {response.status}, which isn't valid.")
        closed = False

        async def close() -> None:
            nonlocal closed
            # A response that was read to its end has already released its connection. Others close theirs here.
            response.close()
            if not closed:
                closed = True
                await self._done()

        return Answer(response.status, for_client(response.headers.items()), _Chunks(response), close)

    async def _done(self) -> None:
        self._busy -= 1
        if self._retired and not self._busy:
            await self.aclose()

    async def retire(self) -> None:
        """Close all connections once no answer is open. Later requests close their own."""
        self._retired = True
        if not self._busy:
            await self.aclose()

    def _request(
        self, method: str, url: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> Awaitable[Response]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                request_class=_Request,
                connector=Pool(limit=0, enable_cleanup_closed=False),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=READ_BYTES,
                max_field_size=LINE_BYTES,
                max_line_size=LINE_BYTES,
            )
            if self._proxy is None and _fits():
                self._express = Express(self._session)
        session = self._session
        if self._express is not None and method == "POST" and isinstance(body, bytes):
            usual = self._express.post(url, headers, body)
            if usual is not None:
                return usual
        given = CIMultiDict(headers)
        options: dict[str, Any] = {
            "headers": given,
            "allow_redirects": False,
            # Don't add headers that the client didn't send. An empty list is slower than ``None``.
            "skip_auto_headers": [name for name in _MADE_UP if name not in given] or None,
            "proxy": self._proxy,
        }
        data = io.BytesIO(body) if isinstance(body, bytes) and len(body) > WHOLE_BYTES else body
        # aiohttp retries idempotent requests (GET, HEAD, OPTIONS, PUT, DELETE) if the connection closes before the
        # response begins. It never retries a POST.
        return session.request(method, URL(url, encoded=True), data=data, **options)

    async def aclose(self) -> None:
        if self._session is not None:
            session, self._session, self._express = self._session, None, None
            await session.close()


def not_in_time(within: float | None) -> UpstreamTimeout:
    """Return the error for an upstream that sends no response in time (seconds)."""
    return UpstreamTimeout(
        f"The upstream did not answer within {within:.0f} seconds."
        if within
        else "The upstream did not answer in time."
    )


def _upstream_error(error: aiohttp.ClientError | OSError, within: float | None, upstream: str) -> UpstreamError:
    match error:
        case aiohttp.ConnectionTimeoutError():
            return _unreachable(upstream, f"no connection within {CONNECT_SECONDS:.0f} seconds")
        case TimeoutError():
            return not_in_time(within)
        case aiohttp.ClientConnectorCertificateError():
            return _unreachable(upstream, f"its TLS certificate isn't valid ({_fault(error)})")
        case aiohttp.ClientProxyConnectionError():
            return _unreachable(upstream, f"its HTTP proxy: {_reason(error.os_error)}")
        case aiohttp.ClientConnectorError():
            return _unreachable(upstream, _reason(error.os_error))
        case aiohttp.ClientResponseError():
            return UpstreamInterrupted("The upstream's answer isn't valid HTTP.")
        case _:
            return UpstreamInterrupted(
                f"The upstream closed the connection before it answered ({type(error).__name__})."
            )


def _unreachable(upstream: str, reason: str) -> UpstreamUnreachable:
    """Return the error for a failed connection. It names the upstream, never its address, which clients may not see."""
    return UpstreamUnreachable(
        f"Cannot connect to upstream '{upstream}': {reason}. "
        f"Try again later, or ask the operator to check upstreams.{upstream}."
    )


def _fault(error: aiohttp.ClientConnectorCertificateError) -> str:
    """Return OpenSSL's reason. If the authority is unknown, name the variable for a private one."""
    reason = getattr(error.certificate_error, "verify_message", "") or "unknown reason"
    private = "issuer" in reason or "self-signed" in reason
    return f"{reason}; for a private CA, SSL_CERT_FILE must name its file" if private else reason


def _reason(error: OSError) -> str:
    """Describe a failed connection attempt without its address."""
    if isinstance(error, socket.gaierror):
        return "the name server doesn't answer" if error.errno == socket.EAI_AGAIN else "name not found"
    if isinstance(error, ssl.SSLError):
        return "the TLS handshake failed"
    named = error.errno in errno.errorcode
    return os.strerror(error.errno).lower() if named and error.errno is not None else type(error).__name__


class _Chunks:
    """The body of an answer as it arrives. Raises ``UpstreamInterrupted`` if the upstream breaks off.

    This isn't a generator, because closing an unfinished generator takes an event loop task.
    """

    def __init__(self, response: Response) -> None:
        self._read = response.content.readany

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._read()
        except (aiohttp.ClientError, OSError) as error:
            # aiohttp keeps the error with the response. With its traceback, that would be a reference cycle.
            raise UpstreamInterrupted(
                f"The upstream broke off in the middle of its answer ({type(error).__name__})."
            ) from error.with_traceback(None)
        if not chunk:
            raise StopAsyncIteration
        return chunk


def environment_proxy(base_url: str) -> str | None:
    """Return the HTTP proxy that the environment names for an address (``HTTPS_PROXY``, ``NO_PROXY`` …)."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    proxies: Mapping[str, str] = getproxies()
    if proxy_bypass(host) or host in ("localhost", "127.0.0.1", "::1"):
        return None
    return proxies.get(parts.scheme)


class Pool(aiohttp.TCPConnector):
    """aiohttp's pool, with connections that are checked before they are used again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(keepalive_timeout=KEEPALIVE_SECONDS, **options)
        self._factory = functools.partial(_PooledConnection, loop=self._loop)  # type: ignore[assignment]


class ClosedIdle(aiohttp.ServerDisconnectedError):
    """The upstream closed a reused connection right after the request was sent, without a byte of a response.

    It had probably closed the connection before the request arrived. Browsers retry then, too, even a POST.
    """


class _PooledConnection(ResponseHandler):
    _requests = 0
    _sent = 0.0
    _received = False

    def set_response_params(self, **options: Any) -> None:
        """Prepare for a response. aiohttp calls this before each request."""
        self._requests += 1
        self._sent, self._received = self._loop.time(), False
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        self._received = True
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        """Fail the response. aiohttp calls this with ``OSError`` or its own errors when the connection is lost."""
        lost = isinstance(exc, OSError | aiohttp.ClientConnectionError)
        early = self._loop.time() - self._sent < IDLE_SECONDS
        if lost and early and self._requests > 1 and not self._received:
            exc = ClosedIdle()
        super().set_exception(exc, *cause)
        # aiohttp doesn't tell the reader of a body that its encoding is broken.
        body = self._payload
        if isinstance(exc, HttpProcessingError) and body is not None and not body.is_eof() and not body.exception():
            body.set_exception(aiohttp.ClientPayloadError("the transfer encoding isn't valid"))

    def is_connected(self) -> bool:
        """Return whether the connection is usable. aiohttp calls this when it takes one from the pool."""
        if not super().is_connected() or self.transport is None:
            return False
        # An idle connection may have its end or unexpected bytes, which the event loop would only notice later.
        connection = self.transport.get_extra_info("socket")
        if sys.platform == "win32":
            return not select.select([connection.fileno()], [], [], 0)[0]
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return not poll.poll(0)


PIECE_BYTES = 65_536  # a larger body isn't copied behind its head
USUAL_BYTES = 2_000_000  # a larger body takes the usual way, in pieces, so that other requests run in between

_UNUSUAL = frozenset({"connection", "content-length", "cookie", "expect", "host", "transfer-encoding"})
"""Headers that aiohttp's client interprets."""

_NO_TIMER = TimerNoop()
_name_of = itemgetter(0)

TARGETS, LONGEST_URL = 100, 2_048
"""Addresses to remember, and the characters of the longest one. A client can choose queries."""


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


PARTS: Mapping[Callable[..., Any], Sequence[str]] = {
    aiohttp.TCPConnector.connect: ("req", "traces", "timeout"),
    ResponseHandler.set_response_params: (
        *("timer", "read_until_eof", "auto_decompress", "read_bufsize", "max_line_size", "max_field_size"),
    ),
    ResponseHandler.read: (),
    Connection.release: (),
    Connection.close: (),
    StreamReader.on_eof: ("callback",),
    StreamReader.set_exception: ("exc",),
    ClientRequest: ("method", "url", "loop", "session"),
}
"""The parts of aiohttp that ``Express`` calls, and the arguments that it gives."""


@functools.cache
def _fits() -> bool:
    """Return whether the installed aiohttp takes these arguments. Otherwise, all requests take the usual way."""
    for part, names in PARTS.items():
        own = () if isinstance(part, type) else ("self",)
        try:
            inspect.signature(part).bind(**dict.fromkeys((*own, *names)))
        except TypeError as error:
            effect = "each request takes a little more CPU"
            log.warning("upstream.express_off", reason=f"{part.__qualname__}: {error}", effect=effect)
            return False
    return True


class Express:
    """Sends requests over the connections of a session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        assert session.connector is not None  # noqa: S101 - an open session has one
        self._session = session
        self._connector = session.connector
        self._targets: dict[str, _Target] = {}

    def post(self, url: str, headers: Headers, body: bytes) -> Awaitable[Response] | None:
        """Return the request, or ``None`` if it isn't usual. Headers must be in lower case."""
        if len(body) > USUAL_BYTES or len(url) > LONGEST_URL:
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
                read_bufsize=READ_BYTES,
                max_line_size=LINE_BYTES,
                max_field_size=LINE_BYTES,
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
