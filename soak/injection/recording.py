"""Forward requests between proxy and server, and record them with their responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve

TIMEOUT = 300.0
"""Seconds that the server has for a response."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request for a chat completion, with the response's text and finish reason. They're empty after an error."""

    body: dict[str, Any]
    status: int
    text: str
    reason: str


class Recorder:
    """A proxy in front of a server that doesn't stream. ``exchanges`` may be cleared between two requests."""

    def __init__(self, upstream: str, model: str | None = None) -> None:
        """Create it. ``upstream`` is the server's URL without a path. ``model`` replaces the model of each request."""
        self.exchanges: list[Exchange] = []
        self._model = model
        self._upstream = upstream

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Serve on loopback, and yield the URL to use instead of the server's."""
        routes = [Route("/{path:path}", self._forward, methods=["GET", "POST"])]
        with serve(Starlette(routes=routes, lifespan=self._lifespan)) as url:
            yield url

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=self._upstream, trust_env=False, timeout=TIMEOUT) as self._http:
            yield

    async def _forward(self, request: Request) -> Response:
        body = sent = await request.body()
        is_chat = request.url.path.endswith("/chat/completions")
        if is_chat and self._model is not None:
            sent = msgspec.json.encode({**msgspec.json.decode(body), "model": self._model})
        kind = {"content-type": request.headers.get("content-type", "application/json")}
        answer = await self._http.request(request.method, request.url.path, content=sent, headers=kind)
        if is_chat:
            text, reason = completion_of(answer.content) if answer.status_code == 200 else ("", "")
            self.exchanges.append(Exchange(msgspec.json.decode(body), answer.status_code, text, reason))
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def completion_of(answer: bytes) -> tuple[str, str]:
    """Return the text and the finish reason of a chat completion."""
    choice = msgspec.json.decode(answer)["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"]
