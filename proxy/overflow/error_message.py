"""Find the upstream's sentence in an error, and put the error into OpenAI's envelope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.overflow.error_detection import (
    ENVELOPES,
    MAX_DEPTH,
    MAX_ITEMS,
    WHOLE_BODY,
    error_part,
    events,
    is_well,
    names_error,
    parse,
    says_error,
)

# An error's sentence is in one of ENVELOPES, in the first of _WORDS that is a string, or in one of _FURTHER_IN.
_WORDS = (
    *("message", "Message", "msg", "error_message", "errorMessage", "error_msg", "errmsg", "status_msg", "detail"),
    *("error", "faultstring", "exception", "title"),
)
_FURTHER_IN = ("detail", "errors", "message", "choices")
_REPORTS = ("base_resp", "header")
_CODES = ("Code", "error_code", "errorCode", "errcode", "status_code", "statusCode")


@dataclass(frozen=True, slots=True)
class MessageSite:
    """The place of an upstream's sentence about an error: ``holder[key]``, within the value that was searched."""

    holder: dict[str, Any]
    key: str

    @property
    def text(self) -> str:
        """Return the sentence, unchanged."""
        text: str = self.holder[self.key]
        return text


def message_site(value: object, depth: int = 0) -> MessageSite | None:
    """Return the place of an error's sentence; ``None`` if no sentence is a string."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, list):
        return next((found for item in value[:MAX_ITEMS] if (found := message_site(item, depth + 1))), None)
    if not isinstance(value, dict):
        return None
    for key in ENVELOPES:
        inner = value.get(key)
        if not (key in _REPORTS and is_well(inner)) and (found := _further_in(inner, depth)):
            return found
    # A choice's text is the model's output, not an error.
    words = ("error",) if any(key in value for key in ("delta", "finish_reason")) else _WORDS
    for key in words:
        if isinstance(text := value.get(key), str) and text.strip():
            return MessageSite(value, key)
    return next((found for key in _FURTHER_IN if (found := _further_in(value.get(key), depth))), None)


def _further_in(inner: object, depth: int) -> MessageSite | None:
    return message_site(inner, depth + 1) if isinstance(inner, dict | list) else None


def as_error(status: int, body: bytes) -> dict[str, Any] | None:
    """Return the error in a response, in OpenAI's envelope and the upstream's words; ``None`` if there is none.

    ``body`` is a whole decompressed body, or the start of a stream. An error in OpenAI's envelope stays unchanged.
    """
    text = body[:WHOLE_BODY].decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    value = parse(text)
    if value is not None:
        return _enveloped(value, failed=status >= 400)
    for event in events(text):
        failed = status >= 400 or names_error(event.name)
        value = parse(event.data)
        if value is None and (failed or says_error(event.data)):
            return {"error": {"message": event.data}}
        if error := _enveloped(value, failed=failed):
            return error
    return None


def _enveloped(value: object, *, failed: bool) -> dict[str, Any] | None:
    part = value if failed else error_part(value)
    if isinstance(value, list) and value:
        value = value[0]
    if (
        isinstance(value, dict)
        and isinstance(error := value.get("error"), dict)
        and isinstance(error.get("message"), str)
    ):
        return value
    if isinstance(part, list) and part and isinstance(part[0], str):
        return {"error": {"message": part[0]}}
    found = message_site(part)
    if found is None:
        return value if isinstance(value, dict) and value.get("error") else None
    error = {"message": found.text, **{key: field for key, field in found.holder.items() if key != found.key}}
    if "code" not in error and (code := next((error[key] for key in _CODES if error.get(key)), None)) is not None:
        error["code"] = code
    return {"error": error}
