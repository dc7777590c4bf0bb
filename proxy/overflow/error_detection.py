"""Find the part of a response that is an error: in a JSON value, a stream of events, or a successful response."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec

WHOLE_BODY = 1_000_000
"""Bytes up to which a body is parsed. Only the first ``PREFIX`` bytes of a longer body are read, as text."""
MAX_ITEMS = 8
MAX_DEPTH = 10
MAX_EVENTS = 64

ENVELOPES = ("error", "Error", "Response", "ResponseMetadata", "response", "base_resp", "fault", "header")
_EXCEPTION_KEY = re.compile(r"\w{0,40}[a-z]Exception")
"""Bedrock names the event for the error, such as ``validationException``."""

# A successful response contains an error only if it has one of these fields, ...
_ERROR_IN_SUCCESS = ("error", "Error", "errors", "base_resp", "Response", "ResponseMetadata", "fault", "header")
# ... or if it has none of _ANSWERED and its fields describe an error.
_ANSWERED = ("choices", "output", "content", "candidates")
_SURELY_ERROR = ("detail", "error_msg", "error_message", "errorMessage", "errmsg", "exception")
_SAID = ("message", "Message", "msg", "title")
_NUMBERED = (
    *("code", "Code", "status", "status_code", "statusCode", "errcode", "error_code", "errorCode", "__type", "success"),
)
_STATUS = ("status", "status_code", "statusCode")
_WELL = (0, "0", 200, "200")
_ERROR_TEXT = re.compile(r"\[error\]|error ?:", re.I)

UNREADABLE = (ValueError, RecursionError, msgspec.DecodeError)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    name: str
    data: str


def events(text: str) -> Iterator[StreamEvent]:
    """Yield the first events of a stream. Old llama.cpp servers send ``error:`` as a separate field."""
    if not text.startswith(("data:", "event:", "error:", ":", "id:", "retry:")):
        return
    blocks = text.replace("\r\n", "\n").replace("\r", "\n").split("\n\n", MAX_EVENTS)
    for block in blocks[:MAX_EVENTS]:
        name, data = "", []
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            if field == "event":
                name = value.strip()
            elif field in ("data", "error"):
                name = "error" if field == "error" else name
                data.append(value.strip())
        if data:
            yield StreamEvent(name, "\n".join(data))


def names_error(event: str) -> bool:
    """Return whether an event with this name is an error."""
    return "error" in event or "exception" in event


def says_error(value: object) -> bool:
    """Return whether a successful response or an event is an error. ``value`` is a string if it isn't JSON."""
    return bool((isinstance(value, str) and _ERROR_TEXT.match(value)) or error_part(value))


def error_part(value: object) -> object:
    """Return the error in a successful response or an event: its ``error`` field, or the value if it is an error."""
    if isinstance(value, list):
        return [part for item in value[:4] if (part := error_part(item))]
    if isinstance(value, str) and value.startswith("{"):
        value = parse(value)
    if not isinstance(value, dict):
        return None
    if "error" in (value.get("type"), value.get("object")) or _is_about_itself(value):
        return value
    response = value.get("response")  # the Responses API's ``response.failed``
    if isinstance(response, dict) and response.get("error"):
        return {"error": response["error"]}
    found = {key: value[key] for key in _ERROR_IN_SUCCESS if value.get(key) and not is_well(value[key])}
    return found or errors_of_choices(value.get("choices")) or exception_members(value)


def _is_about_itself(value: dict[str, object]) -> bool:
    if any(value.get(key) for key in _ANSWERED):
        return False
    if any(value.get(key) for key in _SURELY_ERROR):
        return True
    if any(type(number := value.get(key)) is int and number >= 400 for key in _STATUS):
        return True
    return any(isinstance(value.get(key), str) for key in _SAID) and any(key in value for key in _NUMBERED)


def is_well(value: object) -> bool:
    """Return whether a status report shows success. MiniMax and Spark add a report to every response."""
    return isinstance(value, dict) and (value.get("status_code") in _WELL or value.get("code") in _WELL)


def errors_of_choices(choices: object) -> object:
    """Return the errors in a list of choices."""
    if not isinstance(choices, list):
        return None
    return [choice["error"] for choice in choices[:4] if isinstance(choice, dict) and choice.get("error")]


def exception_members(value: dict[str, object]) -> list[object]:
    fields = islice(value.items(), MAX_ITEMS)
    return [field for key, field in fields if isinstance(field, dict) and _EXCEPTION_KEY.fullmatch(key)]


def parse(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        pass
    try:
        value: object = json.loads(text)
    except UNREADABLE:
        return None
    return value
