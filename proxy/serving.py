"""Running the server: uvicorn, one or several worker processes."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path

import uvicorn

from proxy.app import Proxy, create_app
from proxy.config import Settings, load
from proxy.observe.logs import configure
from proxy.protocol import BoundedProtocol
from proxy.service import INSTANCE

CONFIG = "COMPACTION_PROXY_CONFIG"
"""The environment variable by which worker processes are told the configuration's file."""


def run(config: Path | None, host: str | None, port: int | None, workers: int) -> None:
    """Serve until a signal to stop; then open answers have ``server.drain`` seconds to end.

    Raises ``ConfigurationError`` before anything listens.
    """
    settings = load(config, os.environ)
    # Worker processes must know each other's requests as their own, or a loop would pass from one to the next.
    os.environ[INSTANCE] = secrets.token_hex(8)
    if config is not None:
        os.environ[CONFIG] = str(config.resolve())
    configure()
    _allow_many_connections()
    # Once it has stopped, uvicorn sends itself the signal again, for whoever had a handler before. It ended well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = settings.server
    uvicorn.run(
        create_app(settings) if workers == 1 else "proxy.serving:worker",
        factory=workers > 1,
        host=host or server.host,
        port=server.port if port is None else port,
        workers=workers,
        loop="uvloop" if os.name == "posix" else "asyncio",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(server.drain),
        timeout_keep_alive=75,
    )


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have: each request takes two, and 1,024 is a usual default."""
    if sys.platform != "win32":
        import resource

        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS calls it unlimited and then refuses more than this.
        wanted = 10_240 if most == resource.RLIM_INFINITY else most
        if now != resource.RLIM_INFINITY and now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def worker() -> Proxy:
    """The application in a worker process."""
    configure()
    path = os.environ.get(CONFIG)
    settings: Settings = load(Path(path) if path else None, os.environ)
    return create_app(settings)
