"""Validate conversations like OpenAI, with the same error messages.

The messages and both forms of ``param`` are OpenAI's own, as quoted in public issues. The schema check returns
``messages[1]``, and the check of the conversation returns ``messages.[1]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "assistant", "user", "function", "tool", "developer")
PART_TYPES = {
    "user": ("text", "image_url", "input_audio", "file"),
    "assistant": ("text", "refusal"),
}
TEXT_ONLY = ("text",)
# Fields of each type of tool call, in the object named after the type.
CALL_FIELDS = {"function": ("name", "arguments"), "custom": ("name", "input")}
# An assistant message can omit its content if it has one of these.
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio")

OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens")

TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (type(None), "null"),
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a request. ``message``, ``param``, and ``code`` are those of OpenAI's error."""

    message: str
    param: str | None
    code: str | None = None


def faults(body: Message) -> list[Fault]:
    """Return all faults of a request's ``messages``, in order. OpenAI returns only the first.

    The check that each tool result follows its call runs only if every message is valid.
    """
    if "messages" not in body:
        return [_missing("messages")]
    messages = body["messages"]
    if not isinstance(messages, list):
        return [_wrong_type("messages", "an array of objects", messages)]
    if not messages:
        return [_empty("messages")]
    found = [fault for index, message in enumerate(messages) for fault in _message(f"messages[{index}]", message)]
    return found or list(_order(messages))


def parameter_faults(body: Message) -> list[Fault]:
    """Return the faults of the model and output parameters."""
    found = [] if isinstance(body.get("model"), str) else [Fault("you must provide a model parameter", None)]
    for name in OUTPUT_LIMITS:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            found.append(_wrong_type(name, "an integer", value))
        elif value < 1:
            wrong = f"Invalid '{name}': integer below minimum value. Expected a value >= 1, but got {value} instead."
            found.append(Fault(wrong, name, "integer_below_min_value"))
    return found


def _message(path: str, message: Any) -> Iterator[Fault]:
    if not isinstance(message, dict):
        yield _wrong_type(path, "an object", message)
        return
    if "role" not in message:
        yield _missing(f"{path}.role")
        return
    role = message["role"]
    if role not in ROLES:
        yield _unsupported(f"{path}.role", role, ROLES)
        return
    yield from _content(path, message)
    for key in ("name", "refusal"):
        if message.get(key) is not None:
            yield from _string(path, message, key)
    if role == "assistant" and message.get("tool_calls") is not None:
        yield from _tool_calls(f"{path}.tool_calls", message["tool_calls"])
    if role == "assistant" and message.get("function_call") is not None:
        yield from _called(f"{path}.function_call", message["function_call"], CALL_FIELDS["function"])
    if role == "tool":
        yield from _string(path, message, "tool_call_id")


def _content(path: str, message: Message) -> Iterator[Fault]:
    content = message.get("content")
    where = f"{path}.content"
    if content is None:
        if message["role"] == "assistant" and any(message.get(key) for key in INSTEAD_OF_CONTENT):
            return
        if "content" not in message:
            yield _missing(where)
        else:
            dotted = where.replace("[", ".[", 1)
            yield Fault("Invalid value for 'content': expected a string, got null.", dotted)
    elif isinstance(content, list):
        yield from _parts(where, content, PART_TYPES.get(message["role"], TEXT_ONLY))
    elif not isinstance(content, str):
        yield _wrong_type(where, "one of a string or array of objects", content)


def _parts(path: str, parts: list[Any], allowed: tuple[str, ...]) -> Iterator[Fault]:
    if not parts:
        yield _empty(path)
    for index, part in enumerate(parts):
        where = f"{path}[{index}]"
        if not isinstance(part, dict):
            yield _wrong_type(where, "an object", part)
        elif "type" not in part:
            yield _missing(f"{where}.type")
        elif part["type"] not in allowed:
            yield _unsupported(f"{where}.type", part["type"], allowed)
        elif part["type"] in ("text", "refusal"):
            yield from _string(where, part, part["type"])
        elif part["type"] not in part:
            yield _missing(f"{where}.{part['type']}")
        elif not isinstance(part[part["type"]], dict):
            yield _wrong_type(f"{where}.{part['type']}", "an object", part[part["type"]])


def _tool_calls(path: str, calls: Any) -> Iterator[Fault]:
    if not isinstance(calls, list):
        yield _wrong_type(path, "an array of objects", calls)
        return
    if not calls:
        yield _empty(path)
    for index, call in enumerate(calls):
        where = f"{path}[{index}]"
        if not isinstance(call, dict):
            yield _wrong_type(where, "an object", call)
            continue
        yield from _string(where, call, "id")
        kind = call.get("type")
        if kind is None:
            yield _missing(f"{where}.type")
        elif kind not in tuple(CALL_FIELDS):
            yield _unsupported(f"{where}.type", kind, tuple(CALL_FIELDS))
        elif kind not in call:
            yield _missing(f"{where}.{kind}")
        else:
            yield from _called(f"{where}.{kind}", call[kind], CALL_FIELDS[kind])


def _called(path: str, called: Any, fields: tuple[str, ...]) -> Iterator[Fault]:
    if not isinstance(called, dict):
        yield _wrong_type(path, "an object", called)
        return
    for key in fields:
        yield from _string(path, called, key)


@dataclass(slots=True)
class _OpenCalls:
    """The tool calls of the last assistant message, and the position of each result."""

    ids: list[str] = field(default_factory=list)
    answered: dict[str, int] = field(default_factory=dict)

    def unanswered(self, index: int) -> Iterator[Fault]:
        """Yield a fault if results are missing before the message at ``index``."""
        missing = [call for call in self.ids if call not in self.answered]
        if missing:
            yield Fault(
                "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
                "'tool_call_id'. The following tool_call_ids did not have response messages: " + ", ".join(missing),
                f"messages.[{index}].role",
            )

    def result(self, index: int, call: str) -> Iterator[Fault]:
        if not self.ids:
            yield Fault(
                "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with "
                "'tool_calls'.",
                f"messages.[{index}].role",
            )
        elif call not in self.ids:
            yield Fault(
                f"Invalid parameter: 'tool_call_id' of '{call}' not found in 'tool_calls' of previous message.",
                f"messages.[{index}].tool_call_id",
            )
        elif call in self.answered:
            yield Fault(
                f"Invalid parameter: Duplicate value for 'tool_call_id' of '{call}', in "
                f"messages[{self.answered[call]}] and messages[{index}].",
                f"messages.[{index}].tool_call_id",
            )
        self.answered.setdefault(call, index)


def _order(messages: list[Message]) -> Iterator[Fault]:
    asked = _OpenCalls()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            yield from asked.result(index, message["tool_call_id"])
            continue
        yield from asked.unanswered(index)
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        asked = _OpenCalls([call["id"] for call in calls or []])
    yield from asked.unanswered(len(messages) - 1)


def _string(path: str, owner: Message, key: str) -> Iterator[Fault]:
    if key not in owner:
        yield _missing(f"{path}.{key}")
    elif not isinstance(owner[key], str):
        yield _wrong_type(f"{path}.{key}", "a string", owner[key])


def _missing(path: str) -> Fault:
    return Fault(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def _empty(path: str) -> Fault:
    return Fault(
        f"Invalid '{path}': empty array. Expected an array with minimum length 1, but got an empty array instead.",
        path,
        "empty_array",
    )


def _wrong_type(path: str, expected: str, value: Any) -> Fault:
    got = next(name for kind, name in TYPE_NAMES if isinstance(value, kind))
    return Fault(f"Invalid type for '{path}': expected {expected}, but got {got} instead.", path, "invalid_type")


def _unsupported(path: str, value: Any, allowed: tuple[str, ...]) -> Fault:
    quoted = [f"'{name}'" for name in allowed]
    listed = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])}, and {quoted[-1]}"
    return Fault(f"Invalid value: '{value}'. Supported values are: {listed}.", path, "invalid_value")
