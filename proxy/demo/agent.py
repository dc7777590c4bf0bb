"""A typical agent: the official client, with the whole untrimmed history in every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import openai
from openai.types.chat import ChatCompletionChunk

from proxy.demo.script import SYSTEM, task_message, tool_result
from proxy.demo.tools import TOOLS


@dataclass(slots=True)
class Session:
    """The application's view: answered ``turns``, the ``error`` that ended the session, and each response's headers.

    ``seconds`` is wall-clock time.
    """

    turns: int = 0
    error: str | None = None
    headers: list[Mapping[str, str]] = field(default_factory=list)
    seconds: float = 0.0


class Agent:
    """Work on one task after another. A turn is one request to the model; every second turn streams.

    The client transforms ``messages``, which takes most of a turn's time. It sends ``extra_body`` unchanged.
    """

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client = client
        self.model = model
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.session = Session()

    def run(self, turns: int, on_turn: Callable[[], None]) -> Session:
        """Run up to ``turns`` turns. The first error ends the session."""
        started = time.perf_counter()
        tasks = 0
        try:
            for turn in range(turns):
                if self.messages[-1]["role"] != "tool":
                    tasks += 1
                    self.messages.append({"role": "user", "content": task_message(tasks)})
                self._turn(stream=turn % 2 == 1)
                self.session.turns += 1
                on_turn()
        except (openai.APIError, httpx.HTTPError, EOFError) as error:
            self.session.error = _words(error)
        self.session.seconds = time.perf_counter() - started
        return self.session

    def _turn(self, *, stream: bool) -> None:
        answer = self._streamed() if stream else self._whole()
        self.messages.append(answer)
        for call in answer.get("tool_calls", ()):
            function = call["function"]
            result = tool_result(call["id"], function["name"], function["arguments"])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _whole(self) -> dict[str, Any]:
        raw = self.client.chat.completions.with_raw_response.create(
            model=self.model, messages=[], tools=cast(Any, TOOLS), extra_body={"messages": self.messages}
        )
        self.session.headers.append(raw.headers)
        return raw.parse().choices[0].message.model_dump(exclude_none=True)

    def _streamed(self) -> dict[str, Any]:
        raw = self.client.chat.completions.with_raw_response.create(
            model=self.model, messages=[], tools=cast(Any, TOOLS), stream=True, extra_body={"messages": self.messages}
        )
        self.session.headers.append(raw.headers)
        with raw.parse() as chunks:
            return gather(chunks)


def gather(chunks: Iterable[ChatCompletionChunk]) -> dict[str, Any]:
    """Return the assistant message from a stream. Raises ``EOFError`` if the stream ends early."""
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    finished = False
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finished = finished or choice.finish_reason is not None
            for delta in choice.delta.tool_calls or ():
                call = calls.setdefault(
                    delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += delta.id or ""
                if delta.function:
                    call["function"]["name"] += delta.function.name or ""
                    call["function"]["arguments"] += delta.function.arguments or ""
    if not finished:
        raise EOFError("The stream ended before its finish reason.")
    message: dict[str, Any] = {"role": "assistant"}
    if content or not calls:
        message["content"] = content
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def _words(error: Exception) -> str:
    """Format an error as one line: its status, code, and message."""
    if not isinstance(error, openai.APIError):
        return f"{type(error).__name__}: {error}"
    status = f"{error.status_code} " if isinstance(error, openai.APIStatusError) else ""
    said = error.body.get("message") if isinstance(error.body, dict) else None
    return f"{status}{error.code or type(error).__name__}: {said or error.message}"
