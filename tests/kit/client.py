"""A client at the level of bytes."""

import http.client
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.types import ASGIApp

TIMEOUT = 60.0
"""Seconds until a test counts an answer as hanging."""

JSON = ("content-type", "application/json")
CHAT = "/v1/chat/completions"


class StartProxy(Protocol):
    """Starts a proxy in front of an upstream; it ends with the test, or with the module.

    ``upstream`` is the upstream's root URL (its API is below ``/v1``), ``overrides`` is laid over the configuration
    section by section, ``wrap`` puts an ASGI application around the proxy's. Returns the proxy's root URL, without a
    final slash.
    """

    def __call__(
        self,
        upstream: str,
        overrides: Mapping[str, Any] | None = None,
        *,
        wrap: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> str: ...


@dataclass(slots=True)
class Got:
    """A response. ``whole`` is false if the connection ended before the body did."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool = True

    def header(self, name: str) -> str | None:
        """The first header of a name (lower case)."""
        return next((value for key, value in self.headers if key == name), None)

    def all(self, name: str) -> list[str]:
        """The values of all headers of a name (lower case)."""
        return [value for key, value in self.headers if key == name]

    @property
    def error(self) -> dict[str, Any]:
        value = json.loads(self.body)
        error: dict[str, Any] = value["error"]
        assert set(value) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert self.header("content-type") == "application/json"
        return error


def ask(
    url: str,
    path: str = CHAT,
    body: bytes | Iterable[bytes] | None = b"{}",
    headers: Sequence[tuple[str, str]] = (JSON,),
    method: str | None = None,
) -> Got:
    """Send a request on its own connection. A body that isn't ``bytes`` is sent in chunks, without a length."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT)
    try:
        connection.putrequest(
            method or ("GET" if body is None else "POST"), path, skip_accept_encoding=True, skip_host=False
        )
        for name, value in headers:
            connection.putheader(name, value)
        if isinstance(body, bytes):
            connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
        elif body is not None:
            connection.putheader("transfer-encoding", "chunked")
            connection.endheaders(iter(body), encode_chunked=True)
        else:
            connection.endheaders()
        return received(connection.getresponse())
    finally:
        connection.close()


def received(response: http.client.HTTPResponse) -> Got:
    headers = [(name.lower(), value) for name, value in response.getheaders()]
    try:
        return Got(response.status, headers, response.read())
    except http.client.IncompleteRead as error:
        return Got(response.status, headers, error.partial, whole=False)


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 80), timeout=TIMEOUT)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    """Return everything up to some bytes. Fails if the other side closes earlier."""
    found = b""
    while wanted not in found:
        part = connection.recv(65_536)
        assert part, f"{wanted!r} did not come: {found!r}"
        found += part
    return found


def request_bytes(body: bytes, path: str = CHAT, headers: Sequence[tuple[str, str]] = (JSON,)) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chat(content: str = "Hello", **fields: Any) -> bytes:
    return json.dumps({"model": "gpt-4o-mini", "messages": [{"role": "user", "content": content}], **fields}).encode()
