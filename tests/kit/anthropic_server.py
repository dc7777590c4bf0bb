"""A local stand-in for Anthropic's Messages API. It rejects the same requests."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from proxy.server.loopback import Server


@dataclass(frozen=True)
class Received:
    path: str
    query: str
    headers: dict[str, str]
    body: Any


class LocalServer:
    """A server on a free port of 127.0.0.1, in a thread, for the length of a ``with`` block."""

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.disconnected = threading.Event()
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = Starlette(routes=[Route("/{path:path}", self._handle, methods=["GET", "POST", "PUT"])])
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=1)
        self._server = Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.end()
        self._thread.join(10)
        self._socket.close()

    async def _handle(self, request: Request) -> Response:
        raw = await request.body()
        self.requests.append(
            Received(request.url.path, request.url.query, dict(request.headers), json.loads(raw) if raw else None)
        )
        return await self.answer(self.requests[-1])

    async def answer(self, received: Received) -> Response:
        return JSONResponse({"unexpected": True}, 418)


@dataclass
class Script:
    """A response of the stand-in. ``cut`` is the way a stream breaks after its first content, if it does."""

    blocks: list[dict[str, Any]] = field(default_factory=lambda: [{"type": "text", "text": "Hello there"}])
    error: tuple[int, str, str] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: str | None = None  # "event", "connection", "end", "hang"
    raw: bytes | None = None


class AnthropicServer(LocalServer):
    key = "made-up-anthropic-key"

    def __init__(self) -> None:
        super().__init__()
        self.script = Script()

    async def answer(self, received: Received) -> Response:
        script = self.script
        if (problem := self._problem(received)) is not None:
            return self._error(*problem)
        if script.error is not None:
            return self._error(*script.error)
        if script.raw is not None:
            return Response(script.raw, headers=script.headers)
        if received.body.get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream", headers=script.headers)
        return JSONResponse(
            self._message() | {"content": script.blocks, "stop_reason": self._stop_reason()}, headers=script.headers
        )

    def _error(self, status: int, kind: str, message: str) -> Response:
        return JSONResponse(
            {"type": "error", "error": {"type": kind, "message": message}}, status, headers=self.script.headers
        )

    def _problem(self, received: Received) -> tuple[int, str, str] | None:
        if received.path != "/v1/messages":
            return 404, "not_found_error", f"no such path: {received.path}"
        if received.headers.get("x-api-key") != self.key or "anthropic-version" not in received.headers:
            return 401, "authentication_error", "invalid x-api-key"
        for complaint in complaints(received.body):
            return 400, "invalid_request_error", complaint
        return None

    def _message(self) -> dict[str, Any]:
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-stand-in",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 21, "output_tokens": 7},
        }

    def _stop_reason(self) -> str:
        return "tool_use" if any(block["type"] == "tool_use" for block in self.script.blocks) else "end_turn"

    async def _stream(self) -> AsyncIterator[bytes]:
        yield event("message_start", message=self._message())
        for index, block in enumerate(self.script.blocks):
            for part in block_events(index, block):
                yield part
            if self.script.cut is not None:
                async for part in self._cut():
                    yield part
                return
        yield event(
            "message_delta",
            delta={"stop_reason": self._stop_reason(), "stop_sequence": None},
            usage={"output_tokens": 7},
        )
        yield event("message_stop")

    async def _cut(self) -> AsyncIterator[bytes]:
        if self.script.cut == "event":
            yield event("error", error={"type": "overloaded_error", "message": "Overloaded"})
        elif self.script.cut == "connection":
            raise ConnectionResetError
        elif self.script.cut == "hang":
            try:
                await asyncio.sleep(60)
            finally:
                self.disconnected.set()


def complaints(body: dict[str, Any]) -> Iterator[str]:
    """Return the reason for which Anthropic would reject a request."""
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        yield "max_tokens: Field required"
    roles = [message["role"] for message in body["messages"]]
    if roles != [("user", "assistant")[index % 2] for index in range(len(roles))]:
        yield f"roles must alternate, first user: {roles}"
    used: list[str] = []
    for message in body["messages"]:
        content = message["content"] if isinstance(message["content"], list) else []
        results = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
        if message["role"] == "user" and sorted(results) != sorted(used):
            yield f"tool_use ids {used} were answered with tool_result ids {results}"
        used = [block["id"] for block in content if block["type"] == "tool_use"]
    for tool in body.get("tools", []):
        if "input_schema" not in tool:
            yield "tools: input_schema: Field required"


def event(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    if block["type"] == "text":
        start, whole, kind, name = {"type": "text", "text": ""}, block["text"], "text_delta", "text"
    else:
        start, whole = block | {"input": {}}, json.dumps(block["input"])
        kind, name = "input_json_delta", "partial_json"
    yield event("content_block_start", index=index, content_block=start)
    middle = len(whole) // 2
    for piece in (whole[:middle], whole[middle:]):
        yield event("content_block_delta", index=index, delta={"type": kind, name: piece})
    yield event("content_block_stop", index=index)
