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

END_WITHIN = 10.0
"""Seconds a server has to end."""


@contextlib.contextmanager
def serve(app: ASGIApp, *, http: type[asyncio.Protocol] | Literal["auto", "h11"] = "auto") -> Iterator[str]:
    """Serve an application on a free port of 127.0.0.1, from a thread; yields the base URL, without a final slash.

    ``http`` is what reads HTTP, as uvicorn takes it.

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
    server = uvicorn.Server(config)
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
            server.should_exit = True
            thread.join(END_WITHIN)
            if thread.is_alive():
                raise RuntimeError(f"The server did not end within {END_WITHIN:g} seconds.")


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    # uvicorn leaves a process by sys.exit where the application does not start; here it is the caller who is told.
    with contextlib.suppress(SystemExit):
        server.run([listener])
