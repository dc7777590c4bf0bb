"""Bind the server's addresses before anything is logged, and tell the operator where the dashboard is.

Metrics can have an address of their own. Several workers collect theirs in a private folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import tempfile
from collections.abc import Iterator

from prometheus_client import start_http_server

from proxy.access.admin import LINK_PATH, AdminLink
from proxy.config import Loaded, Settings
from proxy.config.document import line_of
from proxy.config.issues import Issue, error_text
from proxy.errors import ConfigurationError
from proxy.http.headers import on_loopback
from proxy.telemetry.exposition import FOLDER, registry

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - shown, not listened on
"""For each address of all interfaces, one that a browser on this machine can open."""

_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def bind(settings: Settings, port: int, loaded: Loaded | None) -> list[socket.socket]:
    """Return sockets bound to each address of ``server.host``; 0 for any free port. They don't listen yet.

    Raises ``ConfigurationError`` if an address can't be bound. ``loaded`` is the file that the settings come from.
    """
    host = settings.server.host
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                bound.append(_bound(family, (address[0], port, *address[2:])))
            except OSError as error:
                # A machine without IPv6 may still have ::1 for localhost in its table of hosts.
                if error.errno not in _NO_SUCH_FAMILY or not (bound or host == "localhost"):
                    raise
            else:
                port = bound[0].getsockname()[1]
        if not bound:
            raise OSError(errno.EADDRNOTAVAIL, "cannot assign requested address")
    except OSError as error:
        for one in bound:
            one.close()
        raise refused(host, port, error, loaded) from error
    return bound


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there, it would let two programs share a port
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    one.set_inheritable(True)
    return one


def refused(host: str, port: int, error: OSError, loaded: Loaded | None = None) -> ConfigurationError:
    """Return the error for an address that can't be used, with a fix."""
    name, fix = "host", "use an address of this machine, for example --host 127.0.0.1"
    if error.errno == errno.EADDRINUSE:
        name, fix = "port", f"stop the other program, or use another port: --port {port + 1 if port < 65535 else 8787}"
    elif error.errno == errno.EACCES:
        name, fix = "port", "use a port above 1023, for example --port 8787"
    return _cannot_listen(f"{_written(host)}:{port}", error, fix, ("server", name), loaded)


def _cannot_listen(
    address: str, error: OSError, fix: str, setting: tuple[str, str], loaded: Loaded | None
) -> ConfigurationError:
    reason = (error.strerror or type(error).__name__).lower()
    text = error_text(f"cannot listen on {address} ({reason})", fix, ".".join(setting))
    located = [text] if loaded is None else loaded.sources.located([Issue(line_of(loaded.root, setting), text)])
    return ConfigurationError("\n".join(located))


def dashboard_address(settings: Settings, bound: list[socket.socket]) -> str:
    """Return the URL of the dashboard for a browser on this machine."""
    host = settings.server.host
    return f"http://{_written(_WILDCARDS.get(host, host))}:{bound[0].getsockname()[1]}{LINK_PATH}"


def announce(settings: Settings, address: str, link: AdminLink | None) -> None:
    """Print where the dashboard is. Call this when the server takes requests, so that the line is the last one.

    Output that isn't a terminal may be kept or collected, so it gets the name of a private file in place of the token.
    """
    terminal = sys.stdout.isatty()
    if link is not None:
        after = link.address if terminal else f"{address} (a link that works once is in {link.file})"
        print(f"Dashboard: {after}", flush=True)
    elif terminal or on_loopback(settings.server.host):
        print(f"Dashboard: {address}", flush=True)


def _written(host: str) -> str:
    """Return an address as it's written in a URL."""
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def folder_of_workers() -> Iterator[None]:
    """Create a private folder for the metrics of the workers to start, and remove it at the end.

    Raises ``ConfigurationError`` if that fails.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="compaction-proxy-metrics-")
    except OSError as error:
        raise ConfigurationError(
            error_text(
                f"cannot create a temporary folder for the metrics of the workers ({error.strerror})",
                "set TMPDIR to a folder that the proxy can write",
            )
        ) from error
    with folder as path:
        os.environ[FOLDER] = path
        yield


def serve_metrics(settings: Settings, loaded: Loaded | None) -> None:
    """Serve metrics on ``metrics.listen`` in a thread, if it's set. Raises ``ConfigurationError`` if that fails."""
    address = settings.metrics.address
    if address is None:
        return
    host, port = address
    try:
        start_http_server(port, host, registry())
    except OSError as error:
        fix = "use a free port of this machine, as in metrics: {listen: 127.0.0.1:9090}"
        raise _cannot_listen(str(settings.metrics.listen), error, fix, ("metrics", "listen"), loaded) from error
