"""Convert LiteLLM's answers to OpenAI's format without LiteLLM's own fields, and its exceptions to error responses.

LiteLLM changes statuses (529 becomes 500), wraps the provider's JSON in its own words, and raises the same class for a
refused connection as for a bug. This module reads the provider's status and headers, or the network's error, from the
chain of causes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import structlog

from proxy.errors import UpstreamError, UpstreamInterrupted, UpstreamTimeout, UpstreamUnreachable, error_body
from proxy.overflow import recognise
from proxy.overflow.patterns import excluded
from proxy.upstream.transport import JSON, Headers

log = structlog.get_logger(__name__)

UNREACHABLE = "Cannot reach the model's provider. Try again later, or ask the operator to check the upstream."
TIMEOUT = "The model's provider did not answer in time. Try again, or send a smaller request."
INTERRUPTED = "The model's provider broke off in the middle of its answer. Send the request again."
UNUSABLE = "The model's provider returned an unreadable answer. Try again later."
UNTRANSLATABLE = "The proxy can't translate the request for this model's provider"

OVERFLOW_CODE = "context_length_exceeded"

# (type, code) that OpenAI's clients expect with a status.
_KINDS: Mapping[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "model_not_found"),
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
_SERVER_KIND = ("server_error", None)
_CLIENT_KIND = ("invalid_request_error", None)

# Headers in which providers send the request id.
_REQUEST_IDS = ("x-request-id", "request-id", "x-amzn-requestid")

_LONGEST_MESSAGE = 4_000
_CHAIN = 10
_PREFIXES = re.compile(r"^(?:(?:litellm\.)?\w*(?:Error|Exception)\b(?: - |: ))++")
_ADDED = re.compile(
    r"\.? ?Handle with `litellm\.|\n?Received M(?:odel Group|essages)=|\nAvailable Model Group| LiteLLM Retried:"
    r"|\nTraceback | Arguments: |, Original Response:"
)
_SECRETS = re.compile(r"\b(?:sk|key|AIza)[-_]?[A-Za-z0-9_-]{16,}")

_TOP = ("id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier")
_CHOICE = ("index", "finish_reason", "logprobs")
_MESSAGE = (
    *("role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations", "images"),
    *("reasoning_content", "thinking_blocks"),  # clients must send them back, or tools after reasoning fail
)
_TOOL_CALL = ("index", "id", "type", "function")
_USAGE = (
    *("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details"),
    *("inference_geo", "server_tool_use", "service_tier", "speed"),  # the price depends on them
)

# Fields that OpenAI always writes, even as null.
_KEPT_NULLS = frozenset({"content", "finish_reason"})


def completion(response: Any) -> dict[str, Any]:
    """Convert a LiteLLM ``ModelResponse`` to a ``chat.completion``."""
    return _clean(response.model_dump(warnings=False), part="message")


def chunk(response: Any) -> dict[str, Any]:
    """Convert a LiteLLM ``ModelResponseStream`` to a ``chat.completion.chunk``."""
    cleaned = _clean(response.model_dump(warnings=False), part="delta")
    if "usage" in cleaned and not any(choice["delta"] or choice["finish_reason"] for choice in cleaned["choices"]):
        cleaned["choices"] = []  # OpenAI's usage chunk has no choices.
    return cleaned


def request_id(response: Any) -> Headers:
    """Return ``x-request-id``, the provider's request id, from LiteLLM's copy of the headers."""
    copied = getattr(response, "_hidden_params", {}).get("additional_headers") or {}
    headers = {name.removeprefix("llm_provider-"): str(value) for name, value in copied.items() if value}
    return [header for header in answer_headers(headers) if header[0] == "x-request-id"]


def _clean(answer: Mapping[str, Any], *, part: str) -> dict[str, Any]:
    cleaned = _only(answer, _TOP)
    cleaned["choices"] = [_choice(choice, part) for choice in answer.get("choices") or ()]
    usage = answer.get("usage")
    # LiteLLM reports a prompt of 0 tokens if the provider reported nothing.
    if usage and usage.get("prompt_tokens"):
        cleaned["usage"] = {key: _present(value) for key, value in _only(usage, _USAGE).items()}
    else:
        cleaned.pop("usage", None)
    return cleaned


def _choice(choice: Mapping[str, Any], part: str) -> dict[str, Any]:
    cleaned = _only(choice, _CHOICE)
    cleaned.setdefault("finish_reason", None)
    message = choice.get(part) or {}
    cleaned[part] = _only(message, _MESSAGE)
    if part == "message":
        cleaned[part].setdefault("content", None)
    if calls := message.get("tool_calls"):
        cleaned[part]["tool_calls"] = [_only(call, _TOOL_CALL) for call in calls]
        if part == "message":
            for call in cleaned[part]["tool_calls"]:
                call.pop("index", None)
    return cleaned


def _only(value: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: _present(value[name]) for name in fields if value.get(name) not in (None, [])}


def _present(value: Any) -> Any:
    """Remove nulls, which LiteLLM writes for every field that the provider omits."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None or key in _KEPT_NULLS}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value


class Refusal(NamedTuple):
    """An error status with headers and body, in OpenAI's format."""

    status: int
    headers: Headers
    body: bytes


def refusal(error: Exception, *, hidden: tuple[str, ...]) -> Refusal:
    """Return the provider's error response in a LiteLLM exception.

    ``hidden`` are texts to hide from clients: keys and addresses. Raises ``UpstreamUnreachable``, ``UpstreamTimeout``,
    or ``UpstreamInterrupted`` if the provider sent no response.
    """
    _raise_network_error(error)
    status, headers = _head(error)
    if status is None:
        return _without_provider(error, hidden)
    return _of_provider(error, status, headers, hidden)


def _raise_network_error(error: BaseException) -> None:
    """Raise the network error behind an exception. A variable for it would make a reference cycle."""
    for cause in _chain(error):
        if isinstance(cause, TimeoutError | httpx.TimeoutException) or type(cause).__name__ == "Timeout":
            raise UpstreamTimeout(TIMEOUT) from error
        if isinstance(cause, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.ProxyError):
            raise UpstreamUnreachable(UNREACHABLE) from error
        if isinstance(cause, httpx.TransportError):
            raise UpstreamInterrupted(INTERRUPTED) from error


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an exception, of its causes, and of exceptions in its attributes.

    LiteLLM keeps exceptions in variables of frames that are in their own tracebacks. These reference cycles include
    the request.
    """
    dropped: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and id(one) not in dropped:
            dropped.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__, *vars(one).values()]


def _of_provider(error: Exception, status: int, headers: Mapping[str, str], hidden: tuple[str, ...]) -> Refusal:
    reply = _provider_message(error)
    message = _hide(reply.message, hidden) or UNUSABLE
    kind, code = _KINDS.get(status, _SERVER_KIND if status >= 500 else _CLIENT_KIND)
    code = reply.code or code
    if _is_overflow(error, status, message):
        status, (kind, code) = (400 if status >= 500 else status), (_CLIENT_KIND[0], OVERFLOW_CODE)
    return Refusal(status, answer_headers(headers), error_body(message, type=kind, code=code))


def _without_provider(error: Exception, hidden: tuple[str, ...]) -> Refusal:
    """Return the response if LiteLLM itself failed: on the request (400), or on the provider's response (502)."""
    log.error("translation.failed", of="request or response", errors=[type(cause).__name__ for cause in _chain(error)])
    if getattr(error, "status_code", 500) in (400, 422):
        reason = _hide(_provider_message(error).message, hidden)[:200]
        message = f"{UNTRANSLATABLE}: {reason}" if " " in reason else f"{UNTRANSLATABLE}. Check its messages and tools."
        return Refusal(400, [JSON], error_body(message, type=_CLIENT_KIND[0], code="untranslatable_request"))
    return Refusal(502, [JSON], UpstreamError(UNUSABLE).body())


def answer_headers(headers: Mapping[str, str]) -> Headers:
    """Return those of a provider's headers that OpenAI's clients use."""
    kept: Headers = [JSON]
    if retry_after := headers.get("retry-after"):
        kept.append(("retry-after", retry_after))
    if request_id := next(filter(None, map(headers.get, _REQUEST_IDS)), None):
        kept.append(("x-request-id", request_id))
    return kept


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_CHAIN):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _head(error: Exception) -> tuple[int | None, Mapping[str, str]]:
    """Return status and headers of the provider's error response; no status if there was none.

    LiteLLM's own status replaces the 200 of a stream with an error event, and a 400 that LiteLLM recognizes as a bad
    key. Other statuses of a provider stay.
    """
    mapped = getattr(error, "status_code", None)
    for cause in _chain(error):
        if isinstance(cause, httpx.HTTPStatusError):
            status = cause.response.status_code
            if status <= 400 and isinstance(mapped, int) and 400 <= mapped < 500:
                status = mapped
            return (status if status >= 400 else 502), cause.response.headers
    if isinstance(mapped, int) and type(error).__name__ == "MidStreamFallbackError":
        return mapped, {}
    return None, {}


class _ProviderMessage(NamedTuple):
    message: str
    code: str | None = None


def _provider_message(error: Exception) -> _ProviderMessage:
    """Return the provider's message and error code, without LiteLLM's additions."""
    text = _PREFIXES.sub("", str(getattr(error, "message", None) or error))
    inner = _json_in(text)
    if inner is None:
        text = _ADDED.split(text, maxsplit=1)[0]
        return _ProviderMessage(text.strip()[:_LONGEST_MESSAGE])
    fields = inner.get("error", inner)
    if isinstance(fields, str):
        return _ProviderMessage(fields[:_LONGEST_MESSAGE])
    code = next((fields[key] for key in ("type", "status") if isinstance(fields.get(key), str)), None)
    message = fields.get("message") or fields.get("detail") or json.dumps(fields)
    return _ProviderMessage(str(message)[:_LONGEST_MESSAGE], None if code == "invalid_request_error" else code)


def _json_in(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in a text, also within an array or the repr of Python's ``bytes``."""
    start = text.find("{")
    if start < 0 or start > 200:
        return None
    for candidate in (text, text.replace("\\'", "'").replace("\\\\", "\\"), text.replace("\\n", " ")):
        try:
            value, _ = json.JSONDecoder().raw_decode(candidate, candidate.find("{"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("error", value), dict | str):
            return value
    return None


def _is_overflow(error: Exception, status: int, message: str) -> bool:
    if recognise(status, error_body(message, type="", code=None)) is not None:
        return True
    recognized = type(error).__name__ == "ContextWindowExceededError"
    return recognized and not excluded((), (message,))


def _hide(message: str, hidden: tuple[str, ...]) -> str:
    for secret in hidden:
        message = message.replace(secret, "[hidden]")
    return _SECRETS.sub("[hidden]", message)


def hidden_texts(base_url: str | None, *keys: str | None) -> tuple[str, ...]:
    """Return the texts to hide in messages: keys, base URL, host with and without the port. Longest first."""
    parts = urlsplit(base_url or "")
    texts = {base_url, parts.netloc, parts.hostname, *keys}
    return tuple(sorted((text for text in texts if text), key=len, reverse=True))
