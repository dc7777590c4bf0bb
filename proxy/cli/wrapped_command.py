"""The command `run`: starts the proxy, and a program that uses it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from proxy.config import Settings, read
from proxy.errors import ConfigurationError
from proxy.pipeline.snapshot import listening
from proxy.server.app import create_app
from proxy.server.http_protocol import BoundedProtocol
from proxy.telemetry.logs import configure

LOOPBACK = "127.0.0.1"

SIGNALED = 128
"""A shell adds this to the number of the signal that ended a command."""


class _Server(uvicorn.Server):
    """A server in a thread. The main thread handles signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        await super().startup(sockets)
        self.ready.set()


def run_command(command: Sequence[str], config: Path | None) -> int:
    """Run a program with `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL` set to a proxy on a free port. Return its status.

    Raises ``ConfigurationError``.
    """
    loaded = None if config is None else read(config.absolute(), os.environ)
    settings = listening(Settings() if loaded is None else loaded.settings, LOOPBACK)
    # The terminal is the program's. A level in the file applies.
    configure(settings.log.level if "level" in settings.log.model_fields_set else "warning", settings.log.format)
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        app = create_app(settings, loaded)
        server = _Server(
            uvicorn.Config(app, http=BoundedProtocol, ws="none", lifespan="on", access_log=False, log_config=None)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.ready.wait(0.05):
                if not thread.is_alive():
                    raise ConfigurationError("The proxy can't start. The log has the reason.")
            return _finished(command, {"OPENAI_BASE_URL": f"{address}/v1", "ANTHROPIC_BASE_URL": address})
        finally:
            server.should_exit = True
            thread.join()


def _finished(command: Sequence[str], variables: dict[str, str]) -> int:
    try:
        program = subprocess.Popen(command, env={**os.environ, **variables})  # noqa: S603 - the operator's own command
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigurationError(f"{command[0]}: can't be started ({reason}). Fix: check its name") from error
    # The terminal sends Ctrl-C to the program, too, and it decides when to end.
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: program.terminate()),
    }
    try:
        status = program.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status if status >= 0 else SIGNALED - status
