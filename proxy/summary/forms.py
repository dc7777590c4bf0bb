"""Summary requests and their responses in each of the three APIs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from proxy.config.upstreams import Api
from proxy.constants import UNDECODABLE
from proxy.dialects.answers import json_objects
from proxy.http.headers import Headers
from proxy.summary.quality import SummaryFailed, SummaryRefused, Written
from proxy.upstream.transport import output_field

REQUIRED_OUTPUT = 4_096
"""The output to ask Anthropic's API for, in tokens, if a model rejects a larger one. All its models write this much."""

ADAPTIVE_THINKING = 8_000  # tokens of output for a model that decides itself how long it thinks
_REFUSALS = frozenset({400, 401, 403, 422})  # the statuses of requests in a form that an upstream doesn't take

_JSON: Headers = [("content-type", "application/json")]
_TEXT_TYPES = ("text", "output_text", None)
Messages = list[dict[str, Any]]
Fields = dict[str, msgspec.Raw]

_MOST_BREAKPOINTS = 4  # breakpoints that Anthropic's API accepts in a request


_THOUGHT = re.compile(
    rb'"(?:reasoning\w{0,20}|thinking)"\s{0,4}:\s{0,4}(?:"[^"]|\[\s{0,4}\{|[1-9])|"type"\s{0,4}:\s{0,4}"(?:thinking|reasoning)"'
)
"""Reasoning in an answer of any API. Quotes in a text are escaped, so texts don't match."""


class SummaryForm(ABC):
    """One API as summary calls use it, or a service with a path of its own.

    ``limits`` are the names of its fields for the output.
    """

    api: Api
    path: str
    headers: Headers = _JSON
    limits: tuple[str, ...]

    @abstractmethod
    def body(self, model: str, messages: Messages, most: int | None) -> dict[str, Any]:
        """Return the request, with a limit on its output of ``most`` tokens, or without one."""

    def continued(self, fields: Fields, model: str, most: int) -> bool:
        """Change a conversation's request so that its answer can be notes. Everything before the messages' end stays.

        Return whether that's possible. It isn't if the request prescribes a tool call or a format for the answer.
        """
        return False

    def joined(self, events: Sequence[Any]) -> Any:
        """Return the response that the events of a stream make up, as far as ``read`` needs it."""
        raise SummaryFailed("the response is a stream")

    @abstractmethod
    def read(self, answer: Any) -> Written:
        """Return the text of a decoded response. Raises ``SummaryFailed``, or the errors of a missing field."""


class _Chat(SummaryForm):
    api: Api = "chat"
    path = "/chat/completions"
    limits = ("max_tokens", "max_completion_tokens")

    def body(self, model: str, messages: Messages, most: int | None) -> dict[str, Any]:
        fields = {"model": model, "messages": messages, "stream": False}
        return fields if most is None else {**fields, output_field(model): most}

    def continued(self, fields: Fields, model: str, most: int) -> bool:
        if _value(fields, "response_format", {}).get("type", "text") != "text":
            return False
        if "web_search_options" in fields or "audio" in _value(fields, "modalities", []):
            return False
        if not _may_choose(fields, "tool_choice") or not _may_choose(fields, "function_call"):
            return False
        limit = "max_completion_tokens" if "max_completion_tokens" in fields else output_field(model)
        limit = "max_tokens" if "max_tokens" in fields else limit
        _drop(fields, "stream", "stream_options", "n", "stop", "prediction", "logprobs", "top_logprobs")
        _drop(fields, *self.limits, *(["store"] if _value(fields, "store", False) else []))
        fields[limit] = _raw(most + _thinking_budget(fields))
        _mark(fields, "messages")
        return True

    def joined(self, events: Sequence[Any]) -> Any:
        if failed := next((event for event in events if event.get("error")), None):
            return {**failed, "choices": [{"message": {}}]}
        choices = [choice for event in events for choice in _objects(event.get("choices"))]
        deltas = [delta for choice in choices if isinstance(delta := choice.get("delta"), Mapping)]
        message = {name: value for delta in deltas for name, value in delta.items() if value}
        message["content"] = "".join(_written(delta.get("content")) for delta in deltas)
        reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        return {"choices": [{"message": message, "finish_reason": reasons[-1] if reasons else "length"}]}

    def read(self, answer: Any) -> Written:
        choice = answer["choices"][0]
        message = choice["message"]
        if not isinstance(message, Mapping):
            raise SummaryFailed("the response isn't a chat completion")
        if answer.get("error") or choice.get("error"):
            raise SummaryFailed("the response contains an error")
        content = message.get("content")
        parts = _objects(content)
        called = message.get("tool_calls") or message.get("function_call")
        return Written(
            _written(content),
            "tool_calls" if called else choice.get("finish_reason"),
            refused=bool(message.get("refusal")) or any(part.get("refusal") for part in parts),
        )


class _Messages(SummaryForm):
    api: Api = "messages"
    path = "/messages"
    headers: Headers = [*_JSON, ("anthropic-version", "2023-06-01")]  # noqa: RUF012 - never changed
    limits = ("max_tokens",)

    def body(self, model: str, messages: Messages, most: int | None) -> dict[str, Any]:
        fields = {"model": model, "max_tokens": most or REQUIRED_OUTPUT, "stream": False}
        return {**fields, **_apart(messages, "messages", "system")}

    def continued(self, fields: Fields, model: str, most: int) -> bool:
        prescribed = "output_format" in fields or "format" in _value(fields, "output_config", {})
        if prescribed or not _may_choose(fields, "tool_choice"):
            return False
        _drop(fields, "stream", "stop_sequences")
        fields["max_tokens"] = _raw(most + _thinking_budget(fields))
        _mark(fields, "messages")
        return True

    def joined(self, events: Sequence[Any]) -> Any:
        failed = next((event for event in events if event.get("type") == "error"), None)
        deltas = [delta for event in events if isinstance(delta := event.get("delta"), Mapping)]
        text = "".join(str(delta["text"]) for delta in deltas if delta.get("type") == "text_delta")
        blocks = [event["content_block"] for event in events if event.get("type") == "content_block_start"]
        reason = next((delta["stop_reason"] for delta in deltas if delta.get("stop_reason")), "max_tokens")
        blocks = [block for block in blocks if block.get("type") != "text"]
        return failed or {"content": [*blocks, {"type": "text", "text": text}], "stop_reason": reason}

    def read(self, answer: Any) -> Written:
        if answer.get("error") or answer.get("type") == "error":
            raise SummaryFailed("the response contains an error")
        reason = answer.get("stop_reason")
        finish = {"max_tokens": "length", "end_turn": "stop", "tool_use": "tool_calls"}.get(reason, reason)
        blocks = _objects(answer["content"])
        called = any(str(block.get("type")).endswith("tool_use") for block in blocks)
        return Written(_text(blocks), "tool_calls" if called else finish, refused=reason == "refusal")


class _Responses(SummaryForm):
    api: Api = "responses"
    path = "/responses"
    limits = ("max_output_tokens",)

    def body(self, model: str, messages: Messages, most: int | None) -> dict[str, Any]:
        # Some servers require instructions, and refuse system messages.
        fields = {"model": model, "stream": False, "store": False, **_apart(messages, "input", "instructions")}
        return fields if most is None else {**fields, "max_output_tokens": most}

    def continued(self, fields: Fields, model: str, most: int) -> bool:
        form = _value(_value(fields, "text", {}), "format", {})
        if form.get("type", "text") != "text" or not _may_choose(fields, "tool_choice"):
            return False
        # Without `store`, items that the client sends without their content could not be found.
        _drop(fields, "stream", "stream_options", "background")
        fields["max_output_tokens"] = _raw(most)
        return True

    def joined(self, events: Sequence[Any]) -> Any:
        answer = next(event["response"] for event in reversed(events) if isinstance(event.get("response"), Mapping))
        items = [event["item"] for event in events if event.get("type") == "response.output_item.done"]
        return answer if answer.get("output") else {**answer, "output": items}

    def read(self, answer: Any) -> Written:
        if answer.get("error") or answer.get("status") == "failed":
            raise SummaryFailed("the response contains an error")
        items = [item for item in _objects(answer["output"]) if item.get("type") == "message"]
        items = [item for item in items if item.get("phase") != "commentary"]
        parts = [part for item in items for part in _objects(item.get("content"))]
        called = any(str(item.get("type")).endswith("_call") for item in _objects(answer["output"]))
        finish = "length" if answer.get("status") == "incomplete" else "tool_calls" if called else "stop"
        return Written(_text(parts), finish, refused=any(part.get("type") == "refusal" for part in parts))


CHAT: SummaryForm = _Chat()
FORMS: Mapping[str, SummaryForm] = {form.api: form for form in (CHAT, _Messages(), _Responses())}
"""By the name of the API, in the order of preference: most servers have chat completions. An API may have none."""


def read(form: SummaryForm, status: int, body: bytes) -> Written:
    """Return the text of a response. Raises ``SummaryFailed``."""
    if status != 200:
        kind = SummaryRefused if status in _REFUSALS else SummaryFailed
        raise kind(f"the summary model returned status {status}")
    try:
        events = body.lstrip()[:1] in (b"d", b"e", b":") and [*json_objects(body)]
        written = form.read(form.joined(events) if events else msgspec.json.decode(body))
        return replace(written, thought=_THOUGHT.search(body) is not None)
    except (*UNDECODABLE, KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise SummaryFailed("the response isn't an answer of the API") from error


def _apart(messages: Messages, conversation: str, system: str) -> dict[str, Any]:
    """Return the fields of a request whose API has a field for the system's messages."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    fields = {conversation: [message for message in messages if message["role"] != "system"]}
    return {**fields, system: "\n\n".join(texts)} if texts else fields


def _objects(content: Any) -> list[Mapping[str, Any]]:
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _written(content: Any) -> str:
    """Return the text of a content, which some servers, such as Mistral's, also stream as a list of parts."""
    return content if isinstance(content, str) else _text(_objects(content))


def _text(parts: list[Mapping[str, Any]]) -> str:
    """Return the text of content parts, without reasoning and images."""
    return "\n".join(
        part["text"]
        for part in parts
        if part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str) and part.get("thought") is not True
    )


def _value(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a decoded field, or ``default`` if it's missing or of another type than ``default``."""
    value = fields.get(name)
    if isinstance(value, msgspec.Raw):
        value = msgspec.json.decode(value)
    return value if isinstance(value, type(default)) else default


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _drop(fields: Fields, *names: str) -> None:
    for name in names:
        fields.pop(name, None)


def _may_choose(fields: Fields, name: str) -> bool:
    """Return whether the model may answer with a text instead of a tool call."""
    if name not in fields:
        return True
    choice = msgspec.json.decode(fields[name])
    return (choice.get("type", "") if isinstance(choice, dict) else choice) in (None, "auto", "none")


def _thinking_budget(fields: Fields) -> int:
    """Return the tokens that Claude may think in a request. They count toward its output."""
    thinking = _value(fields, "thinking", {})
    budget = thinking.get("budget_tokens")
    if isinstance(budget, int):
        return budget
    return ADAPTIVE_THINKING if thinking.get("type") in ("enabled", "adaptive") else 0


def _mark(fields: Fields, name: str) -> None:
    """Set a cache breakpoint at the end of the last message if the request has breakpoints elsewhere.

    Anthropic's cache serves only what ends at a breakpoint, or at most 20 blocks before one. The client's own
    breakpoints are on newer messages, which the request no longer has.
    """
    marks = sum(bytes(raw).count(b'"cache_control"') for raw in fields.values())
    if not 0 < marks < _MOST_BREAKPOINTS or "cache_control" in fields:
        return
    *before, last = msgspec.json.decode(fields[name], type=list[msgspec.Raw])
    message = msgspec.json.decode(last)
    if not isinstance(message.get("content"), str):
        return
    block = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
    marked = _raw({**message, "content": [block]})
    fields[name] = msgspec.Raw(b"[" + b",".join([*before, marked]) + b"]")
