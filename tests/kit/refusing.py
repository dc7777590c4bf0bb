"""An upstream that answers the first request for a model with given bytes, and every later one as OpenAI would."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from tests.kit.upstream import Completion, Reply, event, is_summary_request, summarise

ANSWER = "All is well."


@dataclass(frozen=True, slots=True)
class First:
    """The response to a model's first request. ``pieces`` are the chunks of the body."""

    status: int
    pieces: Sequence[bytes]
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


@dataclass
class Refusing:
    """``firsts`` by model; ``asked`` has the requests by model, without those for summaries."""

    firsts: dict[str, First] = field(default_factory=dict)
    asked: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _lifespan(receive, send)
            return
        body = json.loads(await _whole(receive))
        if is_summary_request(body):
            await _answer(body, summarise(body), send)
            return
        asked = self.asked.setdefault(body["model"], [])
        asked.append(body)
        if len(asked) > 1:
            await _answer(body, Reply(content=ANSWER), send)
            return
        first = self.firsts[body["model"]]
        headers = [(name.encode(), value.encode()) for name, value in first.headers]
        await send({"type": "http.response.start", "status": first.status, "headers": headers})
        for piece in first.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _answer(body: dict[str, Any], reply: Reply, send: Send) -> None:
    completion = Completion("chatcmpl-1", body["model"], 1, reply, 0)
    chunks = [event(chunk) for chunk in completion.chunks(include_usage=False)]
    stream = bool(body.get("stream"))
    data = b"".join([*chunks, event("[DONE]")]) if stream else json.dumps(completion.whole()).encode()
    kind = b"text/event-stream" if stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": data})


async def _lifespan(receive: Receive, send: Send) -> None:
    for done in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{done}.complete"})


async def _whole(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
