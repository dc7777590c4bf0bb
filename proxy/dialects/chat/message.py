"""Read and write the JSON of chat messages.

A message is the JSON object of OpenAI's chat completions. Clients may send any JSON value, so every function here
accepts any value and treats unknown shapes as empty.
"""

from __future__ import annotations

import json
from typing import Any

from proxy.compaction.format import ForeignSummary, Rewrite
from proxy.compaction.turn import Call, Kind
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.parts import is_text_part, parts_of
from proxy.dialects.unit_json import Message, decode, digest, replace_field

KINDS: dict[str, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "result",
    "function": "result",
}
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio")


def role_of(message: Message) -> str:
    """Return the role; empty if there is none."""
    return _text_or_none(message.get("role")) or ""


def answered_call(message: Message, role: str) -> str | None:
    """Return the id of the call that a result answers; for a legacy ``function`` message, the function's name."""
    return _text_or_none(message.get("name" if role == "function" else "tool_call_id"))


def content_digest(message: Message) -> bytes:
    """Return a digest of the content alone, by which repeated results are found."""
    return digest(message.get("content"))


def is_empty(message: Message) -> bool:
    """Return whether a message has neither content nor calls."""
    return message.get("content") in (None, "", []) and not any(message.get(key) for key in _INSTEAD_OF_CONTENT)


def foreign_summary(message: Message) -> ForeignSummary | None:
    """Return the summary that another tool wrote into a message; ``None`` if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return find_summary(str(message.get("role")), [content], listed=False)
    texts = [part["text"] for part in parts_of(message) if is_text_part(part)]
    return find_summary(str(message.get("role")), texts, listed=True)


def calls_of(message: Message) -> tuple[Call, ...]:
    """Return the tool calls of an assistant message.

    They include the legacy ``function_call``, with the function's name as its id.
    """
    calls = []
    for call in _list(message.get("tool_calls")):
        if isinstance(call, dict):
            function = call.get("function") or call.get("custom")
            name = function.get("name") if isinstance(function, dict) else None
            calls.append(Call(_text_or_none(call.get("id")) or "", _text_or_none(name) or ""))
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        name = _text_or_none(legacy.get("name")) or ""
        calls.append(Call(name, name))
    return tuple(calls)


def arguments_of(message: Message) -> list[tuple[str, str]]:
    """Return the name and the arguments of each tool call, as text."""
    found = []
    calls = [c for c in _list(message.get("tool_calls")) if isinstance(c, dict)]
    functions = [call.get("function") or call.get("custom") for call in calls]
    for function in [*functions, message.get("function_call")]:
        if isinstance(function, dict):
            arguments = function.get("arguments", function.get("input"))
            found.append((_text_or_none(function.get("name")) or "", _as_text(arguments)))
    return found


def replaceable_text(message: Message) -> str | None:
    """Return the text that ``replace_text`` replaces: the content or its text parts; ``None`` if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in _list(content) if is_text_part(part)]
    return "\n".join(texts) if texts else None


def replace_text(raw: bytes, text: str) -> bytes:
    """Replace the text of a message (see ``replaceable_text``).

    A string remains a string. In a list of parts, the first text part gets the new text, the other text parts are
    removed, and the remaining parts are kept.
    """
    content = decode(raw).get("content")
    if not isinstance(content, list):
        return replace_field(raw, "content", text)
    first = next(i for i, part in enumerate(content) if is_text_part(part))
    rest = [part for part in content[first + 1 :] if not is_text_part(part)]
    return replace_field(raw, "content", [*content[:first], {**content[first], "text": text}, *rest])


def replace_arguments(raw: bytes, rewrite: Rewrite) -> bytes:
    """Replace the arguments of function calls. Return ``raw`` itself if ``rewrite`` keeps them all."""
    message = decode(raw)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed = [_rewritten_call(call, "function", rewrite) for call in calls]
        if changed != calls:
            raw = replace_field(raw, "tool_calls", changed)
    legacy = _rewritten_call(message, "function_call", rewrite)
    if legacy is not message and isinstance(legacy, dict):
        raw = replace_field(raw, "function_call", legacy["function_call"])
    return raw


def _rewritten_call(call: Any, key: str, rewrite: Rewrite) -> Any:
    """Return a call with other arguments; the same object if they stay."""
    function = call.get(key) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    rewritten = rewrite(_text_or_none(function.get("name")) or "", arguments)
    return call if rewritten is None else {**call, key: {**function, "arguments": rewritten}}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
