"""Find the upstream's sentence in an error, and put the error into OpenAI's envelope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.overflow.error_detection import (
    ENVELOPES,
    MAX_DEPTH,
    MAX_ITEMS,
    candidates,
    error_part,
    reports_success,
    says_error,
)

# An error's sentence is in one of ENVELOPES, in the first of _TEXT_FIELDS that is a string, or in one of _FURTHER_IN.
_TEXT_FIELDS = (
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
        if not (key in _REPORTS and reports_success(inner)) and (found := message_site(inner, depth + 1)):
            return found
    # A choice's text is the model's output, not an error.
    fields = ("error",) if any(key in value for key in ("delta", "finish_reason")) else _TEXT_FIELDS
    for key in fields:
        if isinstance(text := value.get(key), str) and text.strip():
            return MessageSite(value, key)
    return next((found for key in _FURTHER_IN if (found := message_site(value.get(key), depth + 1))), None)


def as_error(status: int, body: bytes) -> dict[str, Any] | None:
    """Return the error in a response, in OpenAI's envelope and the upstream's words; ``None`` if there is none.

    ``body`` is a whole decompressed body, or the start of a stream. An error in OpenAI's envelope stays unchanged.
    """
    for candidate in candidates(status, body):
        failed = candidate.failed or status >= 400
        if candidate.value is not None:
            if error := _enveloped(candidate.value, failed=failed):
                return error
        elif candidate.event and (failed or says_error(candidate.text)):
            return {"error": {"message": candidate.text}}
    return None


def _enveloped(value: object, *, failed: bool) -> dict[str, Any] | None:
    part = value if failed else error_part(value)
    if isinstance(value, list) and value:
        value = value[0]
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(error, dict) and isinstance(error.get("message"), str):
        return value
    if isinstance(part, list) and part and isinstance(part[0], str):
        return {"error": {"message": part[0]}}
    found = message_site(part)
    if found is None:
        return value if isinstance(value, dict) and error else None
    made = {"message": found.text, **{key: field for key, field in found.holder.items() if key != found.key}}
    if "code" not in made and (code := next((made[key] for key in _CODES if made.get(key)), None)) is not None:
        made["code"] = code
    return {"error": made}
