"""Running the server: uvicorn, one or several worker processes."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

import structlog
import uvicorn
from uvicorn.supervisors import Multiprocess

from proxy.config import Loaded, Settings, read
from proxy.config.faults import said
from proxy.config.loading import assembled
from proxy.config.sources import Sources
from proxy.config.warnings import exposure
from proxy.errors import ConfigurationError
from proxy.limits.profiles import Profiles
from proxy.pipeline.measures import require
from proxy.pipeline.snapshot import listening
from proxy.server.app import Proxy, create_app
from proxy.server.http_protocol import BoundedProtocol
from proxy.server.memory import exempt_from_collection
from proxy.server.runtime import INSTANCE
from proxy.store.file import prepare
from proxy.store.opening import store_file
from proxy.telemetry.logs import configure

log = structlog.get_logger(__name__)

_STORE_FIX = "make the folder writable for the proxy's user, or store: {url: sqlite:////var/lib/NAME/compaction.db}"


def run(config: Path | None, host: str | None, port: int | None, workers: int) -> None:
    """Serve until a signal to stop; then open answers have ``server.drain`` seconds to end.

    Raises ``ConfigurationError`` before anything listens if the settings are wrong, or files for counting are missing.
    """
    loaded = None if config is None else read(config.absolute(), os.environ)
    settings = listening(Settings() if loaded is None else loaded.settings, host)
    profiles = Profiles()
    require(settings, profiles)
    # Worker processes must know each other's requests as their own, or a loop would pass from one to the next.
    os.environ[INSTANCE] = secrets.token_hex(8)
    configure()
    _require_store(settings)
    _allow_many_connections()
    # Once it has stopped, uvicorn sends itself the signal again, for whoever had a handler before. It ended well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _not_yet()
    for warning in (*(() if loaded is None else loaded.warnings), *exposure(settings, loaded)):
        log.warning("configuration.odd", warning=warning)
    server = settings.server
    options: dict[str, Any] = {
        "host": server.host,
        "port": server.port if port is None else port,
        "workers": workers,
        "loop": "uvloop" if os.name == "posix" else "asyncio",
        "http": BoundedProtocol,
        "ws": "none",
        "lifespan": "on",
        "access_log": False,
        "proxy_headers": False,
        "log_config": None,
        "server_header": False,
        "timeout_graceful_shutdown": int(server.drain),
        "timeout_keep_alive": 75,
    }
    if workers == 1:
        uvicorn.run(_application(settings, loaded), **options)
        return
    application = Worker(None if loaded is None else loaded.sources, host)
    processes = uvicorn.Config(application, factory=True, **options)
    Workers(processes, [processes.bind_socket()]).run()


def _application(settings: Settings, loaded: Loaded | None) -> Proxy:
    """Return the application of a process that does nothing else."""
    application = create_app(settings, loaded)
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
            raise ConfigurationError(said(f"{path} isn't a regular file", _STORE_FIX, "store.url"))
        # Opening the file here and closing it again would drop this process's locks on it.
        if not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigurationError(said(f"cannot create or write {path} ({reason})", _STORE_FIX, "store.url")) from error


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have: each request takes two, and 1,024 is a usual default."""
    if sys.platform != "win32":
        import resource

        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS calls it unlimited and then refuses more than this.
        wanted = 10_240 if most == resource.RLIM_INFINITY else most
        if now != resource.RLIM_INFINITY and now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _not_yet() -> None:
    """A signal to read the configuration anew ends nothing, however early it comes."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@dataclass(frozen=True)
class Worker:
    """Makes the application in a worker process. ``sources`` is the configuration as it was last right.

    ``host`` is the address that the command names in its place.
    """

    sources: Sources | None
    host: str | None

    def __call__(self) -> Proxy:
        """The application, with the configuration as it is on the disk, if that is right."""
        _not_yet()
        configure()
        if self.sources is None:
            return _application(listening(Settings(), self.host), None)
        try:
            loaded = read(self.sources.entry, os.environ)
        except ConfigurationError:  # which it finds, and tells, as soon as it looks at the files
            loaded = assembled(self.sources, os.environ)
        return _application(listening(loaded.settings, self.host), loaded)


class Workers(Multiprocess):
    """uvicorn's parent of the worker processes, which each put a changed configuration in force by themselves.

    It knows what was last right, for a worker that takes the place of one that died while the disk has what is wrong.
    SIGUSR2 has it replace the workers, one after another, by such as begin with the program as it is on the disk.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket]) -> None:
        super().__init__(config, sockets)
        self._replace = False
        if hasattr(signal, "SIGUSR2"):
            signal.signal(signal.SIGUSR2, self._asked_to_replace)

    def _asked_to_replace(self, *_: object) -> None:
        self._replace = True

    def keep_subprocess_alive(self) -> None:
        """See ``Multiprocess``."""
        worker = self.config.app
        if isinstance(worker, Worker) and worker.sources is not None:
            self._remember(worker.sources, worker.host)
        if self._replace:
            self._replace = False
            self.restart_all()
        super().keep_subprocess_alive()

    def _remember(self, known: Sources, host: str | None) -> None:
        if known.stamp() == known.stamp_as_read:
            return
        try:
            loaded: Loaded = read(known.entry, os.environ)
        except ConfigurationError:  # each worker tells it
            return
        self.config.app = Worker(loaded.sources, host)

    def handle_hup(self) -> None:
        """Pass SIGHUP on. A worker that is still starting reads the configuration as it is now."""
        for process in self.processes:
            if process.pid is not None and process.is_ready(timeout=1):
                os.kill(process.pid, signal.SIGHUP)
