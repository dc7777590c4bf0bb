"""The section `server`: where to listen, and limits on requests."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from proxy.config.fields import Count, CountOrZero, Grace, HostName, Origin, Port, Seconds, Section, Size, Text, wrong
from proxy.config.suggestions import quoted

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")


def _host(host: str) -> str:
    if _HOST_NAME.fullmatch(host):
        return host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    try:
        parts = urlsplit(host if "://" in host else f"//{host}")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        name, port = "", None
    fix = f"host: {quoted(name) if ':' in name else name}" if name else "host: 127.0.0.1"
    raise wrong(
        "must be an address or name without a port",
        fix=f"{fix}{'' if port is None else f', and on its own line port: {port}'}",
        example="host: 127.0.0.1",
    )


Host = Annotated[Text, AfterValidator(_host)]
"""An IP address or a host name, without a port."""


class ServerSettings(Section):
    """Where to listen, and how much to take."""

    host: Host = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all of them."""
    port: Port = 8787
    """The port; 0 for any free one."""
    body_limit: Size = 64_000_000
    """The largest request body, in bytes or as text such as 64MB; also after decompression."""
    deadline: Seconds = 600
    """Seconds for a request until its answer begins, all attempts together."""
    drain: Grace = 30
    """Seconds that open answers have to end after a signal to stop."""
    keepalive: Seconds = 10
    """Seconds that a streaming client hears nothing while a summary is made; then comments keep it connected."""
    max_concurrent: Count = 1_000
    """Requests in work at the same time, streams until their end. Health and metrics don't count."""
    max_queue: CountOrZero = 100
    """Requests that may wait for one of those places; further ones are answered with 503 at once."""
    queue_timeout: Seconds = 5
    """Seconds that a request waits for a place, or for memory for its body; then it is answered with 503."""
    max_body_memory: Size | None = None
    """Bytes that the bodies of all requests in work may take together; twice body_limit at least. Left out: 1GB, or
    twice body_limit where that is more."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the proxy from a browser, such as https://app.example; * for all of them."""
    hosts: tuple[HostName, ...] = ()
    """Further host names that callers may use in the Host header. localhost and 127.0.0.1 are always served."""

    @property
    def body_memory(self) -> int:
        """Bytes for all bodies."""
        return self.max_body_memory or max(1_000_000_000, 2 * self.body_limit)
