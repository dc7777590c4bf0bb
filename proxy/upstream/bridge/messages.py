"""Translate ``/v1/messages`` to chat completions and back."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from proxy.dialects.parts import MESSAGES, OPAQUE, SILENT
from proxy.dialects.walk import row_of, strings, value_at
from proxy.errors import RequestError, UpstreamInterrupted, anthropic_type
from proxy.http import sse
from proxy.overflow import recognise
from proxy.upstream.bridge.chat import ChatTranslation, chat_translator, check_role, encoded
from proxy.upstream.bridge.completions import AnswerBuilder, Event, figures, is_cut
from proxy.upstream.bridge.returned import unique

OVERFLOW = "prompt is too long"  # the words by which Anthropic's clients, such as Claude Code, recognize an overflow

_BILLING = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's system prompt that is for Anthropic alone, and changes with each request."""

_NOTE = "[system note]"

_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""How the types of the tools that Anthropic runs begin."""

_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_FILE = {**dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT), "insert_line": _LINE}


def _edits(*names: str, **fields: Any) -> dict[str, Any]:
    command = {"type": "string", "enum": ["view", "create", "str_replace", "insert", *names]}
    return {"command": command, **_FILE, "view_range": {"type": "array", "items": _LINE}, **fields}


_CLIENT_TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": ("Run a command in a lasting shell, or restart it.", {"command": _TEXT, "restart": {"type": "boolean"}}),
    "text_editor_": ("View, create, and edit text files.", _edits()),
    "memory_": (
        "Read and write files in /memories, which remain after this conversation.",
        _edits("delete", "rename", old_path=_TEXT, new_path=_TEXT),
    ),
}
"""Descriptions and parameters of tools that the client runs, by how their types begin. Anthropic adds its own."""

_EFFORTS = ((4096, "high"), (2048, "medium"))  # By the least `budget_tokens`, as LiteLLM has them. Below, it's `low`.
_LONGEST_NAME = 64  # characters of a tool's name in chat completions

NO_TOOL = (
    "{place}: the upstream has chat completions only, and the proxy has no schema for a tool of type '{type}'. "
    "Fix: leave the tool out, or send it with an 'input_schema' and without its type."
)
NO_CHOICE = "tool_choice: Anthropic runs this tool, and the upstream doesn't (got {got}). Fix: use 'auto'."


class MessagesTranslation(ChatTranslation):
    """A request of ``/v1/messages`` as a chat request, and the way back."""

    table = MESSAGES
    counts = True
    silent = SILENT | {"media_type", "toolset_name", "provider_specific_fields"}

    def __init__(self, body: Mapping[str, Any], *, reasons: bool) -> None:
        self._model = body["model"]
        self._stops = body.get("stop_sequences") or ()
        self.names: dict[str, str] = {}
        messages, choice = body["messages"], body.get("tool_choice") or {}
        choice = {"type": choice} if isinstance(choice, str) else choice
        changes = [block for one in messages if one["role"] == "system" for block in _blocks(one.get("content"))]
        added = [value_at(block, "tool.definition") for block in changes]
        functions = list(self._functions([*(body.get("tools") or ()), *filter(None, added)]))
        effort = _effort(body)
        system = [block for block in _blocks(body.get("system")) if not str(block.get("text")).startswith(_BILLING)]
        self.given = {"system": system, "messages": [{"content": message.get("content")} for message in messages]}
        self.request = {
            **{name: body.get(name) for name in ("max_tokens", "temperature", "top_p")},
            "messages": [*self._converted("system", system), *self._messages(messages)],
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": self._choice(choice, functions),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _response_format(body),
            "reasoning_effort": effort if reasons else None,
            "stop": body.get("stop_sequences") or None,
            "user": (body.get("metadata") or {}).get("user_id"),
        }

    def _name(self, name: str) -> str:
        if len(name) <= _LONGEST_NAME:
            return name
        short = f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        self.names[short] = name
        return short

    def _functions(self, tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the functions for the tools that the client runs. Raises ``RequestError`` for one without a schema."""
        for place, tool in enumerate(tools):
            kind = tool.get("type") or "custom"
            known = next((known for begins, known in _CLIENT_TOOLS.items() if kind.startswith(begins)), None)
            if kind.startswith(_HOSTED):
                continue
            if kind != "custom" and "input_schema" not in tool and known is None:
                raise RequestError(NO_TOOL.format(place=f"tools[{place}]", type=kind), param="tools")
            description, properties = known or (None, {})
            made = {
                "name": self._name(tool["name"]),
                "description": tool.get("description", description),
                "parameters": {"type": "object", "properties": properties} | (tool.get("input_schema") or {}),
                "strict": tool.get("strict"),
            }
            yield {name: value for name, value in made.items() if value is not None}

    def _choice(self, choice: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> Any:
        kind, name = choice.get("type"), self._name(choice.get("name") or "")
        if (kind == "tool" and name not in [one["name"] for one in functions]) or (kind == "any" and not functions):
            raise RequestError(NO_CHOICE.format(got=name or kind), param="tool_choice")
        return {"any": "required", "tool": {"type": "function", "function": {"name": name}}}.get(str(kind), kind)

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the chat messages. Templates of open models have system messages at the beginning only."""
        talked = False
        for message in messages:
            role, blocks = message["role"], _blocks(message.get("content"))
            talked = talked or role != "system"
            if role == "system" and talked:
                role, blocks = "user", [_text(_NOTE), *blocks]
            yield from self._converted(role, blocks)

    def _converted(self, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the results in a message, and then the message without them."""
        made: dict[str, Any] = {"role": role, "content": []}
        for block in blocks:
            match row_of(block, MESSAGES).plays:
                case "call":
                    function = {"name": self._name(block["name"]), "arguments": encoded(block.get("input") or {})}
                    call = {"id": block["id"], "type": "function", "function": function}
                    made.setdefault("tool_calls", []).append(call)
                case "answer":
                    inner = [_text("[error]")] if block.get("is_error") else []
                    parts = [part for one in [*inner, *_blocks(block.get("content"))] for part in _parts(one, "tool")]
                    yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": parts}
                case "reasoning":
                    made.setdefault("thinking_blocks", []).append(block)
                case _:
                    made["content"] += _parts(block, role)
        if thoughts := [block["thinking"] for block in made.get("thinking_blocks", ()) if block.get("thinking")]:
            made["reasoning_content"] = "\n".join(thoughts)
        if made["content"] or len(made) > 2:
            yield made

    def builder(self) -> MessageBuilder:
        return MessageBuilder(self._model, self.names, self._stops, self.prompt)


def _blocks(content: Any) -> list[Any]:
    return [_text(content)] if isinstance(content, str) else [content] if isinstance(content, dict) else content or []


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(block: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
    """Return the parts of a chat message for a block: its text, or a label with what it says, and its media."""
    row, kind = row_of(block, MESSAGES), block["type"]
    if row.plays == "text":
        return [_text(block["text"])] if block["text"] else []
    media: list[dict[str, Any]] = []
    said = encoded(_shown(block, media))
    if role != "assistant" and row is not OPAQUE:
        said = "\n".join([text for name, text in strings(block, MESSAGES, row) if name])
    # Nothing is left of a file that only Anthropic has, so the request is refused.
    texts = [_text(f"\n[{kind}]\n{said}\n")] if said and kind != "container_upload" else []
    return [*texts, *media]


def _shown(value: Any, media: list[dict[str, Any]]) -> Any:
    """Return a value without what the model doesn't see, and add its images and files to ``media``."""
    if isinstance(value, list):
        return [_shown(one, media) for one in value]
    if not isinstance(value, dict):
        return value
    source = value.get("source")
    if isinstance(source, dict) and row_of(value, MESSAGES).plays == "media":
        url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
        if value["type"] == "image" and "file_id" not in source:
            media.append({"type": "image_url", "image_url": {"url": url}})
        elif "data" in source:
            file = {"filename": value.get("title") or "document.pdf", "file_data": url}
            media.append({"type": "file", "file": file})
        value = {**value, "source": None}
    return {name: _shown(one, media) for name, one in value.items() if name not in SILENT}


def _effort(body: Mapping[str, Any]) -> str | None:
    thinking, stated = body.get("thinking") or {}, (body.get("output_config") or {}).get("effort")
    match thinking.get("type"):
        case "disabled":
            return "none"
        case "enabled":
            budget = thinking.get("budget_tokens")
            known = budget if isinstance(budget, int) else 0
            return stated or next((effort for least, effort in _EFFORTS if known >= least), "low")
    return stated or ("medium" if thinking else None)


def _response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    form = body.get("output_format") or (body.get("output_config") or {}).get("format")
    return form and {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}


def _translation(body: dict[str, Any], *, reasons: bool) -> MessagesTranslation:
    """Translate a request. Raises ``RequestError`` if it has no messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise RequestError("'messages' must be a non-empty array of objects.", param="messages")
    for number, message in enumerate(messages):
        check_role(message, f"messages[{number}]")
    return MessagesTranslation(body, reasons=reasons)


def _error(fields: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return the error in Anthropic's shape, with its words for an overflow before the upstream's own."""
    message = str(fields.get("message") or "The upstream returned an error.")
    plain = msgspec.json.encode({"error": dict(fields)})
    if OVERFLOW not in message.lower() and recognise(status, plain) is not None:
        message = f"{OVERFLOW}: {message}"
    return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}


def _error_event(fields: Mapping[str, Any], status: int, number: int) -> bytes:
    return sse.encode(msgspec.json.encode(_error(fields, status)), "error")


TRANSLATOR = chat_translator(_translation, _error, _error_event, "anthropic")


UNREADABLE_CALL = "The model wrote a call whose arguments aren't JSON. Send the request again."

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}

_HELD = 1_024  # Characters of a call's arguments to hold. The client can't read a stream in which they aren't JSON.


class MessageBuilder(AnswerBuilder):
    """One message. ``names`` has the client's names of tools that have others at the upstream, and ``stops`` its texts
    to stop at. ``prompt`` is the proxy's count of the prompt, because servers report theirs at the end.
    """

    def __init__(self, model: str, names: Mapping[str, str], stops: Collection[str], prompt: int) -> None:
        self._prompt = prompt
        self._names = names
        self._stops = stops
        self._begun = False
        self._refused = False
        self._open: dict[str, Any] | None = None
        self._arguments = _Arguments()
        self.answer = {
            "id": unique("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if usage := chunk.get("usage"):
            self.answer["usage"] = _usage(usage)
        if not self._begun:
            self._begun = True
            self.answer["model"] = chunk.get("model") or self.answer["model"]
            usage = self.answer["usage"] if usage else {"input_tokens": self._prompt, "output_tokens": 0}
            yield {"type": "message_start", "message": {**self.answer, "content": [], "usage": usage}}
        for choice in chunk.get("choices") or ():
            yield from self._delta(choice["delta"])
            if reason := choice["finish_reason"]:
                self._end(reason, choice.get("stop_sequence"))

    def finish(self) -> Iterator[Event]:
        yield from self._close()
        delta = {name: self.answer[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": self.answer["usage"]}
        yield {"type": "message_stop"}

    def _end(self, reason: str, matched: str | None) -> None:
        self.answer["stop_reason"] = STOP_REASONS[reason]
        if reason == "stop" and self._refused:
            self.answer["stop_reason"] = "refusal"
        elif reason == "stop" and matched and matched in self._stops:
            self.answer |= {"stop_reason": "stop_sequence", "stop_sequence": matched}

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        blocks = delta.get("thinking_blocks") or ()
        for block in blocks:
            yield from self._thinks(block)
        if not blocks and (text := delta.get("reasoning_content")):
            yield from self._writes("thinking", text)
        self._refused = self._refused or bool(delta.get("refusal"))
        pictures = [f"\n![image]({url})\n" for url in delta.get("images") or ()]
        if text := "".join([delta.get("content") or "", delta.get("refusal") or "", *pictures]):
            yield from self._writes("text", text)
        for call in delta.get("tool_calls") or ():
            yield from self._calls(call)

    def _thinks(self, block: Mapping[str, Any]) -> Iterator[Event]:
        if block.get("type") == "redacted_thinking":
            yield from self._start(dict(block))
            return
        if text := block.get("thinking"):
            yield from self._writes("thinking", text)
        if signature := block.get("signature"):
            yield from self._continue("thinking")
            self.answer["content"][-1]["signature"] = signature
            yield self._change("signature_delta", signature=signature)

    def _writes(self, kind: str, text: str) -> Iterator[Event]:
        yield from self._continue(kind)
        self.answer["content"][-1][kind] += text
        yield self._change(f"{kind}_delta", **{kind: text})

    def _calls(self, call: Mapping[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            name = self._names.get(function["name"], function["name"])
            yield from self._start({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
            self._arguments = _Arguments()
        if text := self._arguments.add(function["arguments"]):
            yield self._change("input_json_delta", partial_json=text)

    def _continue(self, kind: str) -> Iterator[Event]:
        """Start a block, unless one of its kind is open. A signature ends its block."""
        if self._open is None or self._open["type"] != kind or self._open.get("signature"):
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: "", **signature})

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.answer["content"].append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "tool_use":
            block["input"], rest = self._arguments.end()
            if rest:
                yield self._change("input_json_delta", partial_json=rest)
        yield self._event("content_block_stop")

    def _change(self, type: str, **fields: str) -> Event:
        return self._event("content_block_delta", delta={"type": type, **fields})

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "index": len(self.answer["content"]) - 1, **fields}


class _Arguments:
    """The arguments of a call, as texts that the SDKs can read as JSON at any time."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._length = 0
        self._sent = 0
        self._next = _HELD

    def add(self, text: str) -> str:
        """Add a text. Return what the client can read now. Longer arguments are checked less often."""
        self._texts.append(text)
        self._length += len(text)
        if self._length < self._next:
            return ""
        self._next = self._length * 9 // 8
        written = "".join(self._texts)
        with contextlib.suppress(ValueError):
            if isinstance(from_json(written, allow_partial=True, allow_inf_nan=False), dict):
                sent, self._sent = self._sent, len(written)
                return written[sent:]
        return ""

    def end(self) -> tuple[msgspec.Raw, str]:
        """Return the arguments as an object, and what the client doesn't have yet. Raises ``UpstreamInterrupted``."""
        written = "".join(self._texts)
        if not self._sent:
            made = _object(written)
            return msgspec.Raw(made), made.decode()
        if not _is_object(written) and not is_cut(written):
            raise UpstreamInterrupted(UNREADABLE_CALL)
        return msgspec.Raw(_object(written)), written[self._sent :]


def _is_object(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    return False


def _object(text: str) -> bytes:
    """Return arguments as a JSON object. Models write line breaks in strings, an object in a string, or no JSON."""
    if _is_object(text):
        return text.encode()
    if is_cut(text):
        return msgspec.json.encode(from_json(text, allow_partial="trailing-strings"))
    with contextlib.suppress(ValueError, RecursionError, OverflowError):
        value = json.loads(text if text.strip() else "null", strict=False)
        value = json.loads(value, strict=False) if isinstance(value, str) else value
        if value is None or isinstance(value, dict):
            return msgspec.json.encode(value or {})
    return msgspec.json.encode({"arguments": text})


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the usage. Anthropic's prompt doesn't include what was read from a cache or written to one."""
    known = figures(usage)
    cache = {"cache_creation_input_tokens": known["put"], "cache_read_input_tokens": known["cached"]}
    sent = max(known["sent"] - known["put"] - known["cached"], 0)
    fields = {name: count for name, count in cache.items() if count}
    return {"input_tokens": sent, "output_tokens": known["written"], **fields}
