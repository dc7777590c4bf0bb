"""The section `server`: where to listen, and limits on requests."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Annotated, ClassVar
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
    """Where to listen, and limits on requests."""

    main: ClassVar[str | None] = "port"

    host: Host = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all addresses."""
    port: Port = 8787
    """The port to listen on; 0 for any free port."""
    body_limit: Size = 64_000_000
    """Maximum size of a request body, also after decompression: bytes, or text like 64MB."""
    deadline: Seconds = 600
    """Seconds until the response must start, all attempts together."""
    drain: Grace = 30
    """Seconds that open responses have to finish after a signal to stop."""
    keepalive: Seconds = 10
    """Seconds of silence in a stream while the proxy makes a summary. Then it sends heartbeat comments."""
    max_concurrent: Count = 1_000
    """Maximum concurrent requests. A stream counts until it ends. Health checks and metrics don't count."""
    max_queue: CountOrZero = 100
    """Maximum requests that wait for a free slot. Further requests get 503 immediately."""
    queue_timeout: Seconds = 5
    """Seconds that a request waits for a slot, or for memory for its body. Then it gets 503."""
    max_body_memory: Size | None = None
    """Maximum bytes of all request bodies together, at least twice body_limit. Default: 1GB, or twice body_limit if
    that is more."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the proxy from a browser, like https://app.example; * for all origins."""
    hosts: tuple[HostName, ...] = ()
    """Additional host names to accept in the Host header. localhost and 127.0.0.1 are always accepted."""

    @property
    def body_memory(self) -> int:
        """Return the maximum bytes of all request bodies together."""
        return self.max_body_memory or max(1_000_000_000, 2 * self.body_limit)
