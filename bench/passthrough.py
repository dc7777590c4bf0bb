"""The reference: a minimal pass-through in Python. ``python -m bench.passthrough UPSTREAM PORT``.

It has Starlette, uvicorn (httptools, uvloop, no access log), and one aiohttp session. It forwards the response with
``send``, because Starlette's ``StreamingResponse`` watches for disconnects, which costs a third more.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

_NOT_PASSED_ON = frozenset({"connection", "keep-alive", "transfer-encoding", "host", "content-length"})


class Forward:
    """Post each request to the upstream and forward the response."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.session: aiohttp.ClientSession

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive)
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_PASSED_ON}
        url = self._upstream + request.url.path
        async with self.session.post(url, data=await request.body(), headers=headers) as answer:
            passed_on = [
                (name.lower(), value) for name, value in answer.raw_headers if name.lower() != b"transfer-encoding"
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": passed_on})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def Proxy(upstream: str) -> Starlette:
    """Return the application. ``upstream`` is a base URL."""
    forward = Forward(upstream)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            forward.session = session
            yield

    return Starlette(routes=[Route("/v1/{path:path}", forward, methods=["POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(
        Proxy(sys.argv[1]),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
    )
