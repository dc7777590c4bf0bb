"""Names and addresses in `Host` headers and in `server.host`."""

from __future__ import annotations

import ipaddress

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def on_loopback(host: str) -> bool:
    """Return whether a server that listens on this address takes connections of its own machine only."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def without_port(host: str) -> str:
    """Return the name in a ``Host`` header."""
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) else host


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
