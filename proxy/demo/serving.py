"""Serve an ASGI application on loopback during a ``with`` block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from proxy.server.http_protocol import BoundedProtocol

END_WITHIN = 10.0
"""Timeout for a server to stop, in seconds."""

TICK = 1.0
"""Seconds between updates of the ``date`` header."""

REST = 0.005
"""Seconds between checks for unfinished requests while the server stops."""


class Server(uvicorn.Server):
    """A server that stops without delay. uvicorn's own server polls, and takes up to a fifth of a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Stop the server. Call this from another thread, after the server has started."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has already stopped, and its loop is closed
                self._loop.call_soon_threadsafe(self._ending.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """See ``uvicorn.Server``."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(REST)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def serve(
    app: ASGIApp, *, http: type[asyncio.Protocol] | Literal["h11"] = BoundedProtocol, keepalive: int = 5
) -> Iterator[str]:
    """Serve an application on a free port of 127.0.0.1 in a thread. Yield the base URL without a trailing slash.

    ``http`` is the class that parses HTTP, or uvicorn's name for one. ``keepalive`` is the seconds until the server
    closes an idle connection.

    The server cancels requests that still run a second after the block ends. Raises ``RuntimeError`` if the application
    doesn't start or stop.
    """
    config = uvicorn.Config(
        app,
        http=http,
        lifespan="on",
        ws="none",
        log_config=None,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=keepalive,
    )
    server = Server(config)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))  # the system assigns the port, so servers don't race for one
        port = listener.getsockname()[1]
        thread = threading.Thread(target=_run, args=(server, listener), name=f"serve-{port}", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.005)
        if not server.started:
            raise RuntimeError("The application did not start; its log says why.")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.end()
            thread.join(END_WITHIN)
            if thread.is_alive():
                raise RuntimeError(f"The server did not end within {END_WITHIN:g} seconds.")


def _run(server: Server, listener: socket.socket) -> None:
    # uvicorn calls sys.exit if the application doesn't start. `serve` raises an error instead.
    with contextlib.suppress(SystemExit):
        server.run([listener])
