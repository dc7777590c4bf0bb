"""Run the server: bind its addresses, and start uvicorn with one or several worker processes.

The addresses are bound before anything is logged. Metrics can have an address of their own. Several workers collect
theirs in a private folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
import uvicorn
from prometheus_client import start_http_server

from proxy.access.admin import LINK_PATH, SESSION_SECRET, AdminLink, admin_link
from proxy.config import Loaded, Settings, read
from proxy.config.checks import exposure
from proxy.config.document import Issue, error_text, line_of
from proxy.config.loading import assembled
from proxy.config.sources import Sources
from proxy.constants import __version__
from proxy.endpoints.records import configuration_hash
from proxy.errors import ConfigurationError
from proxy.http.headers import on_loopback
from proxy.limits.profiles import Profiles
from proxy.pipeline.runtime import INSTANCE, require
from proxy.server.app import Proxy
from proxy.server.http_protocol import BoundedProtocol, WorkerPool
from proxy.server.maintenance import exempt_from_collection
from proxy.store import store_file
from proxy.store.sqlite import prepare
from proxy.telemetry.logs import configure
from proxy.telemetry.metrics import FOLDER, WORKER_STARTS, registry

log = structlog.get_logger(__name__)

WORKER_START_SECONDS = 30
"""Seconds that a worker may take to start, or to respond to the parent's health check. The parent stops it after that.

uvicorn's default is 5. A worker on a busy machine takes longer to start, and uvicorn then cancels the rolling restart.
"""

SWITCH_SECONDS = 0.0005  # seconds after which a thread that waits for the interpreter lock gets it from another one
STARTUP_FAILURE = 3  # Exit status if the application can't start. It's uvicorn's own.

_STORE_FIX = "make the folder writable for the proxy's user, or store: {url: sqlite:////var/lib/NAME/compaction.db}"

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - shown, not listened on
"""For each address of all interfaces, one that a browser on this machine can open."""

_NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def run(config: Path | None, host: str | None, port: int | None, workers: int) -> None:
    """Serve until a signal to stop. Then open responses have ``server.drain`` seconds to finish.

    Raises ``ConfigurationError`` before anything is logged if the settings are wrong, the address can't be bound, or
    files for counting are missing.
    """
    loaded = None if config is None else read(config.absolute(), os.environ)
    settings = (Settings() if loaded is None else loaded.settings).listening(host)
    profiles = Profiles()
    require(settings, profiles)
    # All workers share one instance id. Otherwise, they would miss a loop that passes from one worker to another.
    os.environ[INSTANCE] = secrets.token_hex(8)
    os.environ[SESSION_SECRET] = secrets.token_hex(32)
    configure(settings.log.level, settings.log.format)
    os.umask(0o077)  # files that libraries make have content of requests, too
    _require_store(settings)
    # With an option, the file has no line to name.
    listeners = bind(settings, settings.server.port if port is None else port, None if host or port else loaded)
    _allow_many_connections()
    # After it has stopped, uvicorn raises the signal again for the previous handler. Exit with status 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _not_yet()
    warnings = [*(() if loaded is None else loaded.warnings), *exposure(settings, loaded)]
    for warning in warnings:
        log.warning("configuration.odd", warning=warning)
    server = settings.server
    port = listeners[0].getsockname()[1]
    address = f"{server.host}:{port}"
    log_start(settings, loaded, address, workers, len(warnings))
    options: dict[str, Any] = {
        "host": server.host,
        "port": port,
        "workers": workers,
        "loop": "uvloop" if os.name == "posix" else "asyncio",
        "http": BoundedProtocol,
        "interface": "asgi3",
        "ws": "none",
        "lifespan": "on",
        "access_log": False,
        "proxy_headers": False,
        "log_config": None,
        "server_header": False,
        "timeout_graceful_shutdown": int(server.drain),
        "timeout_keep_alive": 75,
        "timeout_worker_healthcheck": WORKER_START_SECONDS,
    }
    page = dashboard_address(settings, port)
    with admin_link(settings, os.environ, page) as link:
        ready = partial(announce, settings, page, link)
        if workers == 1:
            single = Single(uvicorn.Config(_application(settings, loaded), **options), ready)
            serve_metrics(settings, loaded)
            with contextlib.suppress(KeyboardInterrupt):  # as in uvicorn.run
                single.run(listeners)
            if not single.started:
                sys.exit(STARTUP_FAILURE)
            return
        application = Worker(None if loaded is None else loaded.sources, host)
        with folder_of_workers():
            serve_metrics(settings, loaded)
            WorkerPool(uvicorn.Config(application, factory=True, **options), listeners, ready).run()


class Single(uvicorn.Server):
    """uvicorn's server for one process. It calls ``ready`` as soon as it takes requests.

    Starting it raises ``ConfigurationError`` if another server listens on the port by then.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or ():
            try:
                one.listen(self.config.backlog)  # uvloop ignores its failure
            except OSError as error:
                raise refused(self.config.host, self.config.port, error) from error
        await super().startup(sockets)
        if self.started:
            self._ready()


def _application(settings: Settings, loaded: Loaded | None) -> Proxy:
    """Return the application of a process that does nothing else."""
    # Python's 5 ms start again at each `select` of the event loop, so a busy loop keeps threads from the store.
    sys.setswitchinterval(SWITCH_SECONDS)
    application = Proxy(settings, loaded)
    exempt_from_collection()
    return application


def _require_store(settings: Settings) -> None:
    """Raise ``ConfigurationError`` if the store's file can't be created or written."""
    path = store_file(settings.store.url)
    if path is None:
        return
    try:
        prepare(path)
        if not path.is_file():
            raise ConfigurationError(error_text(f"{path} isn't a regular file", _STORE_FIX, "store.url"))
        # Opening the file here and closing it again would drop this process's locks on it.
        if not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigurationError(
            error_text(f"cannot create or write {path} ({reason})", _STORE_FIX, "store.url")
        ) from error


def _allow_many_connections() -> None:
    """Raise the limit on open files to its maximum. Each request takes two, and 1,024 is a common default."""
    if sys.platform != "win32":
        import resource

        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS reports no limit but refuses more than this.
        wanted = 10_240 if most == resource.RLIM_INFINITY else most
        if now != resource.RLIM_INFINITY and now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _not_yet() -> None:
    """Ignore SIGHUP until the server can reload, so that an early signal doesn't end the process."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@dataclass(frozen=True)
class Worker:
    """Build the application in a worker process.

    ``sources`` is the last valid configuration. ``host`` is the address from the command line, which overrides the
    file's.
    """

    sources: Sources | None
    host: str | None

    def __call__(self) -> Proxy:
        """Return the application, with the configuration on disk if it's valid."""
        _not_yet()
        loaded = None
        if self.sources is not None:
            try:
                loaded = read(self.sources.entry, os.environ)
            except ConfigurationError:  # the worker reports it as soon as it checks the files
                loaded = assembled(self.sources, os.environ)
        settings = Settings() if loaded is None else loaded.settings
        configure(settings.log.level, settings.log.format)
        WORKER_STARTS.inc()
        return _application(settings.listening(self.host), loaded)

    def current(self) -> Worker:
        """Return the same with the configuration on disk if it's valid. The parent calls this before it needs it."""
        known = self.sources
        if known is None or known.stamp() == known.stamp_as_read:
            return self
        try:
            return Worker(read(known.entry, os.environ).sources, self.host)
        except ConfigurationError:  # each worker reports it
            return self


def log_start(settings: Settings, loaded: Loaded | None, address: str, workers: int, warnings: int) -> None:
    """Log one line. ``warnings`` is the number of warnings about the configuration."""
    modes = Counter(policy.mode for policy in settings.policies.values())
    log.info(
        "server.started",
        version=__version__,
        files=[] if loaded is None else [str(source.path) for source in loaded.sources.files],
        configuration=configuration_hash(settings),
        address=address,
        workers=workers,
        upstreams={name: _host(one.base_url) or one.provider for name, one in settings.upstreams.items()},
        store=_without_credentials(settings.store.url),
        policies=dict(sorted(modes.items())),
        teams=len(settings.teams),
        warnings=warnings,
    )


def _host(url: str | None) -> str | None:
    return None if url is None else urlsplit(url).netloc


def _without_credentials(url: str) -> str:
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


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


def dashboard_address(settings: Settings, port: int) -> str:
    """Return the URL of the dashboard for a browser on this machine."""
    host = settings.server.host
    return f"http://{_written(_WILDCARDS.get(host, host))}:{port}{LINK_PATH}"


def announce(settings: Settings, address: str, link: AdminLink | None) -> None:
    """Print where the dashboard is. Call this when the server takes requests, so that the line is the last one.

    Output that isn't a terminal may be kept or collected, so it gets the name of a private file in place of the token.
    """
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if link is not None:
        address = link.address if terminal else f"{address} (a link that works once is in {link.file})"
    elif not terminal and not on_loopback(settings.server.host):
        return
    with contextlib.suppress(OSError):  # a full disk or a closed pipe doesn't end the server
        print(f"Dashboard: {address}", flush=True)


def _written(host: str) -> str:
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
