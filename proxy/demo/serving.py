"""An ASGI application on loopback for as long as a block of code runs."""

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
"""Seconds a server has to end."""

TICK = 1.0
"""Seconds after which a server brings the date of its answers up to date."""

REST = 0.005
"""Seconds between two looks at what a server that ends still has in work."""


class Server(uvicorn.Server):
    """A server that ends when it is told to. uvicorn's own takes a fifth of a second: it only looks now and then."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Have the server end. Called from another thread, once it has started."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself, and its loop is closed
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
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(REST)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.contextmanager
def serve(app: ASGIApp, *, http: type[asyncio.Protocol] | Literal["h11"] = BoundedProtocol) -> Iterator[str]:
    """Serve an application on a free port of 127.0.0.1, from a thread; yields the base URL, without a final slash.

    ``http`` is the class that parses HTTP, or uvicorn's name for one.

    Requests still running when the block ends are cancelled after a second. Raises ``RuntimeError`` if the application
    does not start, or does not end.
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
    )
    server = Server(config)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))  # free ports come from the system, so no two servers race for one
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
    # uvicorn leaves a process by sys.exit where the application does not start; here it is the caller who is told.
    with contextlib.suppress(SystemExit):
        server.run([listener])
