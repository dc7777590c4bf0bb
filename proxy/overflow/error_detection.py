"""Find the errors in a response: a JSON value, the events of a stream, or a part of a successful response."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec

from proxy.overflow.cleaning import PREFIX

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
_ONLY_IN_ERRORS = ("detail", "error_msg", "error_message", "errorMessage", "errmsg", "exception")
_MESSAGES = ("message", "Message", "msg", "title")
_STATUS = ("status", "status_code", "statusCode")
_CODES = (*_STATUS, "code", "Code", "errcode", "error_code", "errorCode", "__type", "success")
_SUCCESS = (0, "0", 200, "200")
_ERROR_TEXT = re.compile(r"\[error\]|error ?:", re.I)

UNREADABLE = (ValueError, RecursionError, msgspec.DecodeError)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of a response that may be an error. ``value`` is its JSON, ``None`` if it isn't JSON.

    ``event``: it is an event of a stream. ``failed``: the event's name, or else the status, is an error, so the whole
    value describes it.
    """

    text: str
    value: object
    failed: bool
    event: bool = False


def candidates(status: int, body: bytes) -> Iterator[Candidate]:
    """Yield the parts of a response that may be errors: the JSON body, or the events of a stream.

    ``body`` is a whole decompressed body, or the start of a stream. A failed body that is neither yields its text.
    """
    text = body[: WHOLE_BODY if len(body) <= WHOLE_BODY else PREFIX].decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    failed = status >= 400
    if len(body) <= WHOLE_BODY and text[:1] in '{["' and (value := parse(text)) is not None:
        yield Candidate(text, value, failed)
    elif found := list(_events(text)):
        for name, data in found:
            yield Candidate(data, parse(data), names_error(name), event=True)
    elif failed:
        yield Candidate(text, None, failed)


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and data of a stream's first events. Old llama.cpp servers send ``error:`` as a separate field."""
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
            yield name, "\n".join(data)


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
    found = {key: value[key] for key in _ERROR_IN_SUCCESS if value.get(key) and not reports_success(value[key])}
    return found or _errors_of_choices(value) or _exceptions(value)


def further_errors(value: object) -> list[object]:
    """Return the errors of a failed response outside the usual fields: in its choices, and Bedrock's exceptions."""
    return [*(_errors_of_choices(value) or ()), *_exceptions(value)] if isinstance(value, dict) else []


def _is_about_itself(value: dict[str, object]) -> bool:
    if any(value.get(key) for key in _ANSWERED):
        return False
    if any(value.get(key) for key in _ONLY_IN_ERRORS):
        return True
    if any(type(number := value.get(key)) is int and number >= 400 for key in _STATUS):
        return True
    return any(isinstance(value.get(key), str) for key in _MESSAGES) and any(key in value for key in _CODES)


def reports_success(value: object) -> bool:
    """Return whether a status report shows success. MiniMax and Spark add a report to every response."""
    return isinstance(value, dict) and (value.get("status_code") in _SUCCESS or value.get("code") in _SUCCESS)


def _errors_of_choices(value: dict[str, object]) -> list[object] | None:
    choices = value.get("choices")
    if not isinstance(choices, list):
        return None
    return [choice["error"] for choice in choices[:4] if isinstance(choice, dict) and choice.get("error")]


def _exceptions(value: dict[str, object]) -> list[object]:
    fields = islice(value.items(), MAX_ITEMS)
    return [field for key, field in fields if isinstance(field, dict) and _EXCEPTION_KEY.fullmatch(key)]


def parse(text: str) -> object:
    """Return the value of a JSON text, or ``None``."""
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        pass
    try:
        value: object = json.loads(text)  # accepts lone surrogates
    except UNREADABLE:
        return None
    return value
