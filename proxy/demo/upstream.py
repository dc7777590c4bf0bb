"""A stand-in for OpenAI: it counts real tokens, returns OpenAI's errors, and answers from a script.

    upstream = StandIn(window=16_000, responder=my_responder)
    with serve(upstream.app) as url:
        ...                                # talk to f"{url}/v1"
    assert upstream.faults == []

It runs on loopback (``serving.serve``) or in process, and records every request.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.demo.counting import RequestCounter, Tokens
from proxy.demo.replies import Completion, Reply, Responder, ToolCall, event, is_summary_request, summarise
from proxy.demo.validity import Fault, faults, parameter_faults

__all__ = ["Fault", "Received", "Reply", "Responder", "StandIn", "ToolCall", "is_summary_request"]

DEFAULT_MODEL = "gpt-4o-mini"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(slots=True)
class Received:
    """A received request, the status of its response, and whether the client disconnected early (``abandoned``).

    ``body`` is the parsed JSON object, or empty if there is none. ``tokens`` is 0 for malformed requests. ``headers``
    ignores case.
    """

    method: str
    path: str
    headers: Headers
    raw: bytes
    body: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    faults: list[Fault] = field(default_factory=list)
    summary: bool = False
    status: int = 0
    abandoned: bool = False


class StandIn:
    """An upstream with one context window and a script.

    ``window`` bounds input and output together, ``max_output`` the output alone, both in tokens. A prompt counts as
    ``ratio`` times its real tokens. ``responder`` returns the replies, ``summariser`` those to the proxy's summary
    requests. ``/v1/models`` lists ``model``; a request may name any model.
    """

    def __init__(
        self,
        *,
        window: int = 16_000,
        max_output: int = 4_096,
        ratio: float = 1.0,
        responder: Responder | None = None,
        summariser: Responder = summarise,
        model: str = DEFAULT_MODEL,
    ) -> None:
        self.window = window
        self.max_output = max_output
        self.ratio = ratio
        self.responder = responder or acknowledge
        self.summariser = summariser
        self.model = model
        self.requests: list[Received] = []
        """Chat completion requests in order of arrival."""
        self.others: list[Received] = []
        """Requests to all other paths."""
        self.counter = RequestCounter()
        self._ids = itertools.count(1)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/{path:path}", self._echo, methods=METHODS),
            ]
        )

    @property
    def conversations(self) -> list[Received]:
        """Return the chat completion requests except summary requests."""
        return [received for received in self.requests if not received.summary]

    @property
    def summaries(self) -> list[Received]:
        """Return the proxy's summary requests."""
        return [received for received in self.requests if received.summary]

    @property
    def faults(self) -> list[Fault]:
        """Return the faults of all requests."""
        return [fault for received in self.requests for fault in received.faults]

    async def _chat(self, request: Request) -> Response:
        started = time.perf_counter()
        received = Received(request.method, request.url.path, request.headers, await request.body())
        self.requests.append(received)
        response = await self._answer(received, request.receive)
        received.status = response.status_code
        response.headers["x-request-id"] = f"req_{next(self._ids):032x}"
        response.headers["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1000))
        response.headers["openai-version"] = "2020-10-01"
        return response

    async def _answer(self, received: Received, receive: Receive) -> Response:
        refused = self._malformed(received) or self._too_long(received)
        if refused:
            return _error(refused)
        body = received.body
        reply = self.summariser(body) if received.summary else self.responder(body)
        received.abandoned = await _left(receive, reply.delay)
        if reply.go is not None and not body.get("stream"):
            received.abandoned = received.abandoned or await _left_before(receive, reply.go)
        if reply.status != 200:
            return _plain(reply, {})
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_output
        reply = reply.within(min(asked, self.max_output, self.window - received.tokens))
        identity = f"chatcmpl-{next(self._ids):08d}"
        completion = Completion(identity, body["model"], int(time.time()), reply, received.tokens)
        if not body.get("stream"):
            return _plain(reply, completion.whole())
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        events = [event(chunk) for chunk in completion.chunks(include_usage=include_usage)]
        return EventStream(received, reply, events)

    def _malformed(self, received: Received) -> Fault | None:
        """Parse the body. Return its first fault, or ``None``."""
        try:
            body = json.loads(received.raw)
        except ValueError:
            body = None
        if isinstance(body, dict):
            received.body = body
            received.faults = parameter_faults(body) + faults(body)
            received.summary = is_summary_request(body)
        else:
            received.faults = [Fault("We could not parse the JSON body of your request.", None)]
        return received.faults[0] if received.faults else None

    def _too_long(self, received: Received) -> Fault | None:
        """Count the request. Return an error if it doesn't fit, or ``None``."""
        body = received.body
        real = self.counter.request(body)
        size = Tokens(int(real.messages * self.ratio), int(real.functions * self.ratio))
        received.tokens = size.total
        name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
        asked = body.get(name) or 0
        parts = f"{size.messages} in the messages"
        parts += f", {size.functions} in the functions" if size.functions else ""
        limit = f"This model's maximum context length is {self.window} tokens. However, "
        if size.total > self.window:
            detail = f" ({parts})" if size.functions else ""
            return _overflow(
                f"{limit}your messages resulted in {size.total} tokens{detail}. "
                f"Please reduce the length of the messages{' or functions' if size.functions else ''}."
            )
        if asked > self.max_output:
            return Fault(
                f"{name} is too large: {asked}. This model supports at most {self.max_output} completion tokens, "
                f"whereas you provided {asked}.",
                name,
            )
        if size.total + asked > self.window:
            return _overflow(
                f"{limit}you requested {size.total + asked} tokens ({parts}, {asked} in the completion). "
                "Please reduce the length of the messages or completion."
            )
        return None

    async def _models(self, request: Request) -> Response:
        entry = {"id": self.model, "object": "model", "created": 1_700_000_000, "owned_by": "stand-in"}
        return await self._other(request, JSONResponse({"object": "list", "data": [entry]}))

    async def _echo(self, request: Request) -> Response:
        """Return a description of the request, with its body in base64."""
        arrived = {
            "method": request.method,
            "path": request.url.path,
            "query": request.url.query,
            "content_type": request.headers.get("content-type"),
            "body": base64.b64encode(await request.body()).decode(),
        }
        return await self._other(request, JSONResponse(arrived))

    async def _other(self, request: Request, response: Response) -> Response:
        raw = await request.body()
        self.others.append(Received(request.method, request.url.path, request.headers, raw, status=200))
        response.headers["x-request-id"] = f"req_{next(self._ids):032x}"
        return response


def acknowledge(body: dict[str, Any]) -> Reply:
    """Return the default reply, which describes the last message."""
    last = body["messages"][-1]
    return Reply(content=f"Message {len(body['messages'])}, from {last['role']}, was received.")


class EventStream(Response):
    """Send the events of a stream, with the pauses, error, or dropped connection of the reply."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, received: Received, reply: Reply, events: list[bytes]) -> None:
        super().__init__(headers=dict(reply.headers))
        del self.headers["content-length"]
        self.received = received
        self.reply = reply
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, part in enumerate(self._parts()):
            if await _left(receive, self.reply.pause):
                self.received.abandoned = True
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if number == 1 and self.reply.go is not None and await _left_before(receive, self.reply.go):
                self.received.abandoned = True
                return
        if self.reply.break_after is None or self.reply.error is not None:
            await send({"type": "http.response.body", "body": event("[DONE]")})

    def _parts(self) -> list[bytes]:
        if self.reply.error is None:
            return self.events[: self.reply.break_after]
        return [*self.events[: self.reply.break_after or 0], event(self.reply.error)]


class Broken(Response):
    """Send only the first half of a plain answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        half = bytes(self.body)[: len(self.body) // 2]
        await send({"type": "http.response.body", "body": half, "more_body": True})


async def _left(receive: Receive, seconds: float) -> bool:
    """Wait until the time is up or the client disconnects. Return whether it disconnected.

    Call this after reading the request's body.
    """
    if not seconds:
        return False
    leaving = asyncio.ensure_future(receive())
    done, _ = await asyncio.wait({leaving}, timeout=seconds)
    leaving.cancel()
    return bool(done)


async def _left_before(receive: Receive, event: threading.Event) -> bool:
    """Wait until an event is set or the client disconnects. Return whether it disconnected."""
    leaving = asyncio.ensure_future(receive())
    try:
        while not event.is_set():
            if (await asyncio.wait({leaving}, timeout=0.01))[0]:
                return True
        return False
    finally:
        leaving.cancel()


def _plain(reply: Reply, answer: Mapping[str, Any]) -> Response:
    content: Mapping[str, Any] | str = answer if reply.error is None else reply.error
    as_json = not isinstance(content, str)
    text = json.dumps(content) if as_json else content
    kind = Broken if reply.break_after is not None else Response
    media_type = "application/json" if as_json else "text/plain"
    return kind(text, reply.status, dict(reply.headers), media_type)


def _error(fault: Fault) -> Response:
    body = {
        "message": fault.message,
        "type": "invalid_request_error",
        "param": fault.param,
        "code": fault.code,
    }
    return JSONResponse({"error": body}, 400)


def _overflow(message: str) -> Fault:
    return Fault(message, "messages", "context_length_exceeded")
