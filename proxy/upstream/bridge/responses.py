"""Translate ``/v1/responses`` to chat completions.

A tool that the client runs becomes a function, whatever its type. Its calls come back as items of that type.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from proxy.dialects.parts import RESPONSES, SILENT, Part
from proxy.dialects.walk import file_text, row_of, value_at
from proxy.errors import RequestError
from proxy.http import sse
from proxy.upstream.bridge.chat import ChatTranslation, chat_translator, check_role
from proxy.upstream.bridge.responses_answers import CallItem, ResponseBuilder
from proxy.upstream.bridge.returned import is_verifiable
from proxy.upstream.bridge.transport import openai_error

_Object = dict[str, Any]

_SAME = ("parallel_tool_calls", "safety_identifier", "service_tier", "temperature", "top_p", "user")
"""Fields that both APIs have."""

_STATE = ("previous_response_id", "conversation", "prompt")  # fields that refer to something stored at the server

NO_STATE = (
    "This model's upstream has no Responses API, so it keeps no responses. Send the whole conversation in 'input', "
    "without '{name}'."
)
NO_REFERENCES = (
    "This model's upstream has no Responses API, and the proxy doesn't have one of the items. Send the items "
    "themselves instead of 'item_reference', for example with store: false."
)
NO_NAME = "tools: a tool has no 'type', or a function no 'name'. Fix: add it."
NO_PART = (
    "{path}: the upstream has chat completions only, which can't take this '{kind}'. Fix: send its text, or its data "
    "as a data: URL, or use a model with the Responses API."
)
NO_TOOL = (
    "tool_choice: the upstream has chat completions only, and can't be told to call {tool}. Fix: use 'auto', or a tool "
    "in 'tools' that the client runs."
)

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}
_OPERATION = {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}
_DIFF = {"type": "string", "description": "A V4A diff, without the lines that begin and end the patch."}

_CLIENT_TOOLS: Mapping[str, tuple[_Object, _Object]] = {
    "function": ({}, {}),
    "custom": ({"content": ""}, {"content": _TEXT}),
    "tool_search": ({}, {}),
    "local_shell": (
        {"type": "exec", "command": [], "env": {}},
        {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER},
    ),
    "shell": ({"commands": []}, {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}),
    "apply_patch": ({"type": "update_file", "path": ""}, {"type": _OPERATION, "path": _TEXT, "diff": _DIFF}),
}
"""Tools that the client runs: the fields that each call has, and the properties of parameters without a schema."""

_LONGEST_NAME = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class ResponsesTranslation(ChatTranslation):
    """A request of ``/v1/responses`` as a chat request, and the way back."""

    table = RESPONSES
    silent = SILENT | {
        *("acknowledged_safety_checks", "container_id", "detail", "execution", "filename", "format", "name"),
        *("namespace", "output_format", "tools", "url"),
    }

    def __init__(self, body: Mapping[str, Any], *, reasons: bool) -> None:
        given = body["input"]
        items: list[_Object] = [{"role": "user", "content": given}] if isinstance(given, str) else given
        loading = (item for item in items if _row(item).effect == "loads")
        self._asked = body
        self._functions = _Functions(tool for holder in (body, *loading) for tool in holder.get("tools") or ())
        effort = (body.get("reasoning") or {}).get("effort")
        self.request = {
            **{name: body[name] for name in _SAME if name in body},
            "messages": self._messages(items),
            "tool_choice": self._functions.choice(body.get("tool_choice")),
            "tools": list(self._functions.chat.values()),
            "max_tokens": body.get("max_output_tokens"),
            "response_format": _response_format((body.get("text") or {}).get("format") or {}),
            "reasoning_effort": effort if reasons else None,
        }
        self.given = {"instructions": body.get("instructions"), "input": items}
        self.names = self._functions.given

    def _messages(self, items: Iterable[_Object]) -> list[_Object]:
        """Return the messages. What the assistant thinks, says, and calls before a result is one message."""
        instructions = self._asked.get("instructions")
        made: list[_Object] = [{"role": "system", "content": instructions}] if instructions else []
        for number, item in enumerate(items):
            for message in self._translated(item, f"input[{number}]"):
                if made and made[-1]["role"] == message["role"] == "assistant":
                    _join(made[-1], message)
                else:
                    made.append(message)
        return made

    def _translated(self, item: _Object, path: str) -> list[_Object]:
        kind, row, id = _kind(item), _row(item), item.get("call_id") or item.get("id")
        if row.plays == "reference":
            raise RequestError(NO_REFERENCES, param="input")
        if row.plays == "message":
            check_role(item, path)
            return _message(item["role"], item.get("content"), path)
        if row.plays == "reasoning":
            sealed = item.get("encrypted_content")
            return _thought(item, _unsealed(sealed))
        if row.plays == "call" and id:
            name = self._functions.name(item.get("namespace") or "", item.get("name") or kind.removesuffix("_call"))
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": _arguments(item, row)}}
            return [{"role": "assistant", "content": None, "tool_calls": [call]}]
        if row.plays == "answer" and id:
            return [message | {"tool_call_id": id} for message in _message("tool", self._output(item, row), path)]
        if kind == "compaction_trigger" or (row.plays == "prefix" and not item.keys() - SILENT):
            raise RequestError(NO_PART.format(path=path, kind=kind), param=path)
        role = {"prefix": "user", "system": "system"}.get(row.plays, "assistant")
        return [] if kind == "additional_tools" else _message(role, _inlined(item), path)

    def _output(self, item: _Object, row: Part) -> Any:
        """Return the output of a call: a text, or a list of parts."""
        if row.effect == "loads":
            loaded = [self._functions.name(space, name) for space, name, _ in _flat(item.get("tools") or ())]
            return json.dumps({"loaded": loaded})
        output = item.get("output") or ""
        output = [output] if isinstance(output, dict) else output
        if isinstance(output, list) and all(isinstance(part, dict) and part.get("type") for part in output):
            return output
        text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
        return f"[failed]\n{text}".rstrip("\n") if item.get("status") == "failed" else text

    def builder(self) -> ResponseBuilder:
        return ResponseBuilder(self._asked, self._functions.calls, _sealed)


class _Functions:
    """The functions for a request's tools. ``chat`` has their definitions, and ``calls`` the items for their calls."""

    def __init__(self, tools: Iterable[_Object]) -> None:
        self.chat: dict[str, _Object] = {}
        self.calls: dict[str, CallItem] = {}
        self._names: dict[tuple[str, str], str] = {}
        for tool in sorted(_flat(tools), key=lambda one: one[0] != ""):  # names without a namespace don't change
            self._offer(*tool)

    def name(self, namespace: str, name: str) -> str:
        """Return the name of a function. In a namespace, it's one that no other function has."""
        chosen = name
        if namespace and (namespace, name) not in self._names:
            chosen = _NOT_IN_NAMES.sub("_", f"{namespace.rstrip('_')}__{name}")
            if len(chosen) > _LONGEST_NAME or chosen in self._names.values():
                digest = hashlib.sha256(f"{namespace}\n{name}".encode()).hexdigest()[:8]
                chosen = f"{chosen[: _LONGEST_NAME - 9]}_{digest}"
        return self._names.setdefault((namespace, name), chosen)

    @property
    def given(self) -> dict[str, str]:
        """The tools' own names, by the functions'."""
        return {chosen: name for (_, name), chosen in self._names.items()}

    def choice(self, asked: Any) -> Any:
        """Return the choice of a tool. Raises ``RequestError`` for one that the client doesn't run.

        Few servers know a choice of several functions, so the others are no longer offered.
        """
        if isinstance(asked, str) and asked not in ("any", "required", "tool"):
            return asked
        mode = asked.get("type") if isinstance(asked, dict) else asked
        if mode not in (None, "auto", "none", "required", "any", "tool"):
            listed = asked.get("allowed_tools") or asked
            wanted = listed.get("tools") or () if mode == "allowed_tools" else [asked]
            names = [name for name, call in self.calls.items() if any(_means(one, name, call) for one in wanted)]
            if len(names) == 1 and mode != "allowed_tools":
                return {"type": "function", "function": {"name": names[0]}}
            self.chat = {name: self.chat[name] for name in names}
            mode = listed.get("mode")
        if mode not in ("auto", "none") and asked:
            if not self.chat:
                raise RequestError(NO_TOOL.format(tool=json.dumps(asked)), param="tool_choice")
            mode = "required"
        return mode

    def _offer(self, namespace: str, name: str, tool: _Object) -> None:
        if not name or not isinstance(kind := tool.get("type"), str):
            raise RequestError(NO_NAME, param="tools")
        if kind not in _CLIENT_TOOLS or not _is_local(tool):
            return
        chosen = self.name(namespace, name)
        always, properties = _CLIENT_TOOLS[kind]
        schema = {"properties": properties, "required": [one for one in properties if one in always]}
        function: _Object = {
            "name": chosen,
            "description": _description(tool),
            "parameters": {"type": "object", "properties": {}, **(tool.get("parameters") or schema)},
        }
        function |= {"strict": True} if tool.get("strict") else {}
        self.chat[chosen] = {"type": "function", "function": function}
        fields = {"name": name, **({"namespace": namespace} if namespace else {})}
        if kind not in ("function", "custom"):
            fields = {"execution": "client"} if kind == "tool_search" else {}
        self.calls[chosen] = CallItem("custom_tool_call" if kind == "custom" else f"{kind}_call", always, fields)


def _flat(tools: Iterable[_Object]) -> Iterator[tuple[str, str, _Object]]:
    """Yield tools with their namespaces and names. The first of a namespace has the namespace's description, too."""
    for tool in tools:
        namespace = str(tool.get("name")) if tool.get("type") == "namespace" else ""
        for number, one in enumerate((tool.get("tools") or ()) if namespace else [tool]):
            whole = one | (one.get("function") or {})
            texts = (whole.get("description"), tool.get("description") if namespace and not number else "")
            name = whole.get("name") or ("" if one.get("type") in ("function", "custom") else one.get("type"))
            yield namespace, name, whole | {"description": "\n\n".join(filter(None, texts))}


def _is_local(tool: _Object) -> bool:
    """Return whether the client runs a tool. The provider runs some searches, and shells in containers."""
    if tool["type"] == "tool_search":
        return bool(tool.get("execution") == "client")
    return not str(value_at(tool, "environment.type")).startswith("container")


def _description(tool: _Object) -> str:
    format, skills = tool.get("format") or {}, value_at(tool, "environment.skills")
    grammar = f"Format:\n```{format.get('syntax')}\n{format['definition']}\n```" if format.get("definition") else ""
    return "\n\n".join(filter(None, (tool.get("description"), grammar, json.dumps(skills) if skills else "")))


def _means(choice: _Object, name: str, call: CallItem) -> bool:
    kind, namespace = choice.get("type"), call.fields.get("namespace")
    if kind in ("function", "custom"):
        wanted = choice.get("name") or value_at(choice, "function.name")
        return wanted in (name, call.fields.get("name")) and choice.get("namespace") in (None, namespace)
    return call.type == f"{kind}_call" if kind != "namespace" else namespace == choice.get("name")


def _kind(item: _Object) -> str:
    return item.get("type") or ("message" if "role" in item else "item_reference")


def _row(item: _Object) -> Part:
    return row_of(item | {"type": _kind(item)}, RESPONSES)


def _join(message: _Object, more: _Object) -> None:
    """Add what the assistant does next to its message."""
    for name in more.keys() - {"role"}:
        old, new = message.get(name), more[name]
        both = f"{old}\n{new}" if isinstance(new, str) else [*(old or ()), *(new or ())]
        message[name] = both if old and new else old or new


def _thought(item: _Object, blocks: Iterable[Any] | None) -> list[_Object]:
    """Return reasoning as a message that the assistant's next one joins. Only its writer reads what is encrypted."""
    parts = item.get("content") or item.get("summary") or ()
    texts = [parts] if isinstance(parts, str) else [part.get("text") for part in parts]
    fields = {"reasoning_content": "\n".join(filter(None, texts)), "thinking_blocks": list(blocks or ())}
    kept = {name: value for name, value in fields.items() if value}
    return [{"role": "assistant", "content": None, **kept}] if kept else []


def _sealed(blocks: Iterable[Any]) -> str | None:
    """Return blocks of thinking for ``encrypted_content``: those that their writer can verify."""
    kept = [block for block in blocks if is_verifiable(block)]
    return json.dumps(kept, separators=(",", ":")) if kept else None


def _unsealed(content: Any) -> list[Any]:
    """Return the blocks of thinking in ``encrypted_content``. Another provider's is only for that provider."""
    try:
        blocks = json.loads(content) if isinstance(content, str) else ()
    except (ValueError, RecursionError):
        return []
    return [block for block in blocks if is_verifiable(block)] if isinstance(blocks, list) else []


def _arguments(item: _Object, row: Part) -> str:
    given: Any = item.get(row.arguments) or {}
    if row.answer == "custom_tool_call_output":
        given = {"content": item.get(row.arguments)}
    more = {path: value for path in row.reads or () if (value := value_at(item, path))}
    given = {**given, **more} if more else given
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _message(role: str, content: Any, path: str) -> list[_Object]:
    """Return a message. Media that only a user or a result may have follow in a message of the user's."""
    if not isinstance(content, list):
        return [{"role": role, "content": content or ""}]
    parts = [_part(part, f"{path}.content[{number}]") for number, part in enumerate(content)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if len(texts) == len(parts):
        return [{"role": role, "content": "\n".join(texts)}]
    if role in ("user", "tool"):
        return [{"role": role, "content": parts}]
    media = [part for part in parts if part["type"] != "text"]
    return [{"role": role, "content": "\n".join(texts)}, {"role": "user", "content": media}]


def _part(part: Any, path: str) -> _Object:
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    row = row_of(part, RESPONSES)
    if row.plays != "media":
        known = "text" if row.plays == "text" else "refusal"
        text = file_text(part) or (part.get(known) if isinstance(part, dict) else part)
        return {"type": "text", "text": text if isinstance(text, str) else json.dumps(_without_images(part, []))}
    url = value_at(part, "image_url.url") or part.get("image_url")
    if isinstance(url, str) and url:
        detail = {"original": "high"}.get(part.get("detail"), part.get("detail"))
        return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail else {})}}
    if part.get("file_data"):
        return {"type": "file", "file": {name: part[name] for name in ("filename", "file_data") if part.get(name)}}
    if isinstance(part.get(kind), dict):  # chat completions' own parts, such as audio
        return {"type": kind, kind: part[kind]}
    raise RequestError(NO_PART.format(path=path, kind=kind), param=path)


def _inlined(item: _Object) -> list[_Object]:
    if item.get("type") == "image_generation_call" and item.get("result"):
        item = item | {"result": f"data:image/{item.get('output_format') or 'png'};base64,{item['result']}"}
    images: list[_Object] = []
    text = json.dumps(_without_images(item, images), ensure_ascii=False)
    return [{"type": "input_text", "text": text}, *images]


def _without_images(value: Any, images: list[_Object]) -> Any:
    if isinstance(value, dict):
        return {name: _without_images(value[name], images) for name in value if name == "type" or name not in SILENT}
    if isinstance(value, list):
        return [_without_images(one, images) for one in value]
    if isinstance(value, str) and value.startswith("data:image/"):
        images.append({"type": "input_image", "image_url": value})
        return "[image]"
    return value


def _response_format(format: _Object) -> _Object | None:
    if format.get("type") != "json_schema":
        return format if format.get("type") == "json_object" else None
    schema = {name: value for name, value in format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _translation(body: dict[str, Any], *, reasons: bool) -> ResponsesTranslation:
    """Translate a request. Raises ``RequestError`` for state that only the server has."""
    for name in _STATE:
        if body.get(name) is not None:
            raise RequestError(NO_STATE.format(name=name), param=name)
    items = body.get("input")
    if not isinstance(items, str) and not (isinstance(items, list) and all(isinstance(one, dict) for one in items)):
        raise RequestError("'input' must be a string or an array of objects.", param="input")
    return ResponsesTranslation(body, reasons=reasons)


def _error_event(fields: Mapping[str, Any], status: int, number: int) -> bytes:
    event = {
        "type": "error",
        "code": fields.get("code") or fields.get("type"),
        "message": str(fields.get("message") or "The upstream returned an error."),
        "param": fields.get("param"),
        "sequence_number": number,
    }
    return sse.encode(msgspec.json.encode(event), "error")


TRANSLATOR = chat_translator(_translation, openai_error, _error_event, "openai")
