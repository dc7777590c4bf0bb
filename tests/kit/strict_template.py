"""Chat completions behind a strict chat template, as vLLM serves Mistral's models."""

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REFUSAL = {
    "object": "error",
    "message": "After the optional system message, conversation roles must alternate user/assistant/user/assistant/...",
    "type": "BadRequestError",
    "param": None,
    "code": 400,
}


def mistral_accepts(messages: Sequence[Any]) -> bool:
    """Check like the chat templates of Mistral 7B v0.3, Nemo, and Small, which skip calls and results."""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    counted = [m for m in rest if m["role"] not in ("tool", "function") and not m.get("tool_calls")]
    return all((m["role"] == "user") == (place % 2 == 0) for place, m in enumerate(counted))


class StrictTemplate:
    """An upstream that refuses other messages. ``refused`` are the roles in the refused requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.refused: list[list[str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not scope["path"].endswith("/chat/completions"):
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        messages = json.loads(body)["messages"]
        if not mistral_accepts(messages):
            self.refused.append([message["role"] for message in messages])
            await JSONResponse(REFUSAL, 400)(scope, receive, send)
            return

        async def again() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)
