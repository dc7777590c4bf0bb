"""A typical agent: the official client, with the whole untrimmed history in every request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import openai
from openai.types.chat import ChatCompletionChunk

from proxy.demo.script import SYSTEM, TOOLS, task_message, tool_result

MAX_TOKENS = 1_000
"""Output limit of each request to ``/v1/messages``, which requires one."""


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
        working = False
        try:
            for turn in range(turns):
                if not working:
                    tasks += 1
                    self.messages.append({"role": "user", "content": task_message(tasks)})
                working = self._turn(stream=turn % 2 == 1)
                self.session.turns += 1
                on_turn()
        except (openai.APIError, httpx.HTTPError, EOFError, FailedError) as error:
            self.session.error = _words(error)
        self.session.seconds = time.perf_counter() - started
        return self.session

    def _turn(self, *, stream: bool) -> bool:
        """Send the history, and append the answer and the tool results. Return whether there are results."""
        answer = self._streamed() if stream else self._whole()
        self.messages.append(answer)
        for call in answer.get("tool_calls", ()):
            function = call["function"]
            result = tool_result(call["id"], function["name"], function["arguments"])
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return "tool_calls" in answer

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


class ResponsesAgent(Agent):
    """Do the same work with ``/v1/responses``. ``messages`` are its input items."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        super().__init__(client, model)
        self.messages = []

    def _turn(self, *, stream: bool) -> bool:
        tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
        raw = self.client.responses.with_raw_response.create(
            model=self.model,
            instructions=SYSTEM,
            store=False,
            stream=stream,
            tools=cast(Any, tools),
            extra_body={"input": self.messages},
        )
        self.session.headers.append(raw.headers)
        answer = cast(Any, raw.parse())
        if stream:
            with answer:  # an open stream would be closed by the garbage collector, which can deadlock the client
                answer = _last(answer)
        output = [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in output if item["type"] == "function_call"]
        self.messages += output
        for call in calls:
            result = tool_result(call["call_id"], call["name"], call["arguments"])
            self.messages.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        return bool(calls)


class MessagesAgent(Agent):
    """Do the same work with ``/v1/messages``, without Anthropic's client."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        super().__init__(client, model)
        self.messages = []

    def _turn(self, *, stream: bool) -> bool:
        tools = [
            {"name": made["name"], "description": made["description"], "input_schema": made["parameters"]}
            for made in (tool["function"] for tool in TOOLS)
        ]
        body = {"model": self.model, "max_tokens": MAX_TOKENS, "system": SYSTEM, "tools": tools, "stream": stream}
        response = self.client.post("/messages", cast_to=httpx.Response, body=body | {"messages": self.messages})
        self.session.headers.append(response.headers)
        content = _gather_blocks(response.text) if stream else response.json()["content"]
        self.messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        results = [tool_result(call["id"], call["name"], json.dumps(call["input"])) for call in calls]
        blocks = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        if blocks:
            self.messages.append({"role": "user", "content": blocks})
        return bool(blocks)


AGENTS: dict[str, type[Agent]] = {"chat": Agent, "responses": ResponsesAgent, "messages": MessagesAgent}
"""The agents by API."""


class FailedError(Exception):
    """A stream reported that the response failed."""


def _last(events: Iterable[Any]) -> Any:
    """Return the response at the end of a stream. Raises ``FailedError`` and ``EOFError``."""
    for event in events:
        if event.type == "response.failed":
            raise FailedError(f"{event.response.error.code}: {event.response.error.message}")
        if event.type == "response.completed":
            return event.response
    raise EOFError("The stream ended before its response was complete.")


def _gather_blocks(stream: str) -> list[dict[str, Any]]:
    """Return the content from a stream of Messages. Raises ``FailedError`` and ``EOFError``."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for line in stream.splitlines():
        event: Any = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {"type": None}
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                arguments = ""
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                blocks[-1]["text"] += event["delta"]["text"]
            case "content_block_delta":
                arguments += event["delta"]["partial_json"]
            case "content_block_stop" if arguments:
                blocks[-1]["input"] = json.loads(arguments)
            case "error":
                raise FailedError(f"{event['error']['type']}: {event['error']['message']}")
            case "message_stop":
                return blocks
    raise EOFError("The stream ended before its last event.")


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
    if isinstance(error, FailedError):
        return str(error)
    if not isinstance(error, openai.APIError):
        return f"{type(error).__name__}: {error}"
    status = f"{error.status_code} " if isinstance(error, openai.APIStatusError) else ""
    said = error.body.get("message") if isinstance(error.body, dict) else None
    return f"{status}{error.code or error.type or type(error).__name__}: {said or error.message}"
