"""Values of the official SDKs' request types, made from their declarations, with a marker in place of each text."""

import base64
import functools
import itertools
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import typing_extensions

Value = dict[str, Any]

MARKER = re.compile(r"@\d+@")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IDS = {
    "id",
    "call_id",
    "tool_use_id",
    "tool_call_id",
    "approval_request_id",
    "tool_id",
    "file_id",
    "container_id",
    "container",
}
LABELS = {"name", "tool_name", "server_name", "server_label", "namespace", "filename", "mcp_server_name", "model"}
LABELS |= {"url", "image_url", "file_url", "server_url", "path", "working_directory", "user", "page_age", "keys"}
LABELS |= {"city", "country", "region", "timezone", "environment", "authorization", "tunnel_id", "require_approval"}
LABELS |= {"vector_store_ids", "allowed_domains", "blocked_domains", "tab_id", "download_id", "retrieved_at", "format"}
LABELS |= {"tool_names", "allowed_tools", "file_ids", "skill_id", "version", "domain", "value", "size", "stop_reason"}
LABELS |= {"pattern", "toolset_name"}
"""Strings without text of a conversation."""
SEALED = {"encrypted_content", "encrypted_stdout", "signature", "fingerprint", "data"}
OMITTED = {
    "cache_control",
    "citations",
    "annotations",
    "caller",
    "logprobs",
    "phase",
    "prompt_cache_breakpoint",
    "error",
}
OMITTED |= {"action", "allowed_callers", "env", "headers", "attributes", "filters", "configs", "file_id", "file_url"}
OMITTED |= {
    "function_call",
    "audio",
    "transformations",
    "output_schema",
    "tool_changes",
    "trigger",
    "input_examples",
    "user_location",
    "acknowledged_safety_checks",
}
"""Optional fields that values don't have."""
TEXT_FILE = "data:text/plain;base64,"
MOST = 60
"""Variants of a type, at most."""


@functools.cache
def variants(declared: Any) -> tuple[tuple[str, Value], ...]:
    """Return the values of each type in a union, with their names. Unions inside take each alternative in turn.

    All callers get the same values, so they plant texts in copies.
    """
    found = []
    for number, kind in enumerate(filter(typing_extensions.is_typeddict, _alternatives(declared))):
        seen: list[Value] = []
        for pick in range(MOST):
            value = _Builder(pick).value("", kind)
            if value not in seen:
                seen.append(value)
                found.append((f"{value.get('type') or value.get('role')}-{number}.{len(seen)}", value))
    return tuple(found)


def planted(value: Any, texts: Mapping[str, str] | str) -> Any:
    """Return a value with texts in place of its markers."""
    if isinstance(value, str):
        text = MARKER.sub(lambda found: texts if isinstance(texts, str) else texts[found[0]], value)
        opening, file, content = text.partition(TEXT_FILE)
        return opening + file + base64.b64encode(content.encode()).decode() if file else text
    if isinstance(value, dict):
        return {name: planted(inner, texts) for name, inner in value.items()}
    return [planted(inner, texts) for inner in value] if isinstance(value, list) else value


def markers(value: Any, name: str = "") -> dict[str, str]:
    """Return the markers in a value, each with the name of its field."""
    if isinstance(value, str):
        return dict.fromkeys(MARKER.findall(value), name)
    inner = (
        value.items()
        if isinstance(value, dict)
        else [(name, one) for one in (value if isinstance(value, list) else ())]
    )
    return {marker: field for key, one in inner for marker, field in markers(one, key).items()}


class _Builder:
    def __init__(self, pick: int) -> None:
        self._pick = pick
        self._numbers = itertools.count(1)

    def value(self, name: str, kind: Any, owner: Mapping[str, Any] | None = None) -> Any:
        """Return a value of a type. ``name`` is its field in the object that ``owner`` declares."""
        kind = _plain(kind)
        origin = get_origin(kind)
        if origin is Literal:
            return get_args(kind)[0]
        if origin in (Union, types.UnionType):
            choices = _alternatives(kind)
            self._pick, chosen = divmod(self._pick, len(choices))
            return self.value(name, choices[chosen], owner)
        if typing_extensions.is_typeddict(kind):
            return self._object(kind)
        if kind is str:
            return self._text(name, owner or {})
        if origin is dict or kind is object or origin is Mapping:
            return {"note": self._marker()}
        if kind in (int, float, bool):
            return kind(1)
        if get_args(kind):
            return [] if name == "annotations" else [self.value(name, get_args(kind)[0], owner)]
        return PIXEL  # bytes, or a file

    def _object(self, kind: Any) -> Value:
        hints, wanted = _fields(kind)
        return {name: self.value(name, hints[name], hints) for name in wanted}

    def _text(self, name: str, owner: Mapping[str, Any]) -> str:
        plain = "text/plain" in get_args(_plain(owner.get("media_type", str)))
        if name in IDS:
            return f"{name}_1"
        drawn = "image_generation_call" in get_args(_plain(owner.get("type", str)))
        if name == "code" and "message" in owner:
            return "code_a"
        if drawn or (name in SEALED and not plain):
            return PIXEL
        if name == "file_data":
            return f"{TEXT_FILE}{self._marker()}"
        if name in LABELS:
            return "https://host/a.png" if "url" in name else f"{name}_a"
        if name == "arguments":
            return f'{{"note": "{self._marker()}"}}'
        return self._marker()

    def _marker(self) -> str:
        return f"@{next(self._numbers)}@"


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the declared fields of an object, and the names of those that a value has."""
    hints = get_type_hints(kind, include_extras=True)
    needed = {name for name, hint in hints.items() if name in kind.__required_keys__ or _required(hint)}
    more = {name for name in hints.keys() - needed - OMITTED if name in IDS or _has_text(hints[name])}
    return hints, [name for name in hints if name in needed | more]


@functools.cache
def _alternatives(kind: Any) -> list[Any]:
    kind = _plain(kind)
    if get_origin(kind) not in (Union, types.UnionType):
        return [kind]
    inner = [_plain(one) for one in get_args(kind) if one is not type(None)]
    return [deep for one in inner for deep in _alternatives(one)]


def _plain(kind: Any) -> Any:
    wrappers = (Annotated, Required, NotRequired, typing_extensions.Required, typing_extensions.NotRequired)
    while get_origin(kind) in wrappers:
        kind = get_args(kind)[0]
    return kind


def _required(hint: Any) -> bool:
    return get_origin(hint) in (Required, typing_extensions.Required)


def _has_text(kind: Any) -> bool:
    return any(
        one in (str, object) or typing_extensions.is_typeddict(one) or any(map(_has_text, get_args(one)))
        for one in _alternatives(kind)
    )
