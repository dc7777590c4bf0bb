"""The proxy's exceptions, with the status, type, and code that the client gets. Subclasses inherit what they don't set.

Bodies have the shape of OpenAI's errors: ``{"error": {"message", "type", "param", "code"}}``. For clients of
Anthropic's API they have its shape: ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import msgspec

ErrorShape = Literal["openai", "responses", "anthropic"]
"""The API whose error format a client expects. ``responses`` differs from ``openai`` only in streams."""

# https://docs.claude.com/en/api/errors. The proxy's own errors have 503 instead of 529, which few HTTP clients know.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def anthropic_type(status: int) -> str:
    """Return the type of Anthropic's errors with a status."""
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


class Limit(NamedTuple):
    """The limit that refused a request: its setting below ``limits``, its size, and what was used."""

    name: str
    size: str
    used: str | None = None


class ProxyError(Exception):
    """The proxy failed on this request, or can't read its archive or records. Retry, and look into the log.

    The client sees ``message``. It says what to do, and never contains a key or an upstream's address. ``retry_after``
    is in seconds; ``None`` if a later retry wouldn't help. ``limit`` is the team's limit that refused the request.
    """

    status = 500
    type = "server_error"
    code = "proxy_error"
    retry_after: int | None = None
    limit: Limit | None = None
    final: ClassVar[bool] = False
    """Whether clients mustn't retry for hours."""

    def __init_subclass__(
        cls,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Set what differs from the base class."""
        super().__init_subclass__()
        cls.status = status or cls.status
        cls.type = type or cls.type
        cls.code = code or cls.code
        cls.retry_after = retry_after or cls.retry_after

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def retry_headers(self) -> list[tuple[str, str]]:
        """Return the headers that say whether and when to retry. The SDKs of OpenAI and Anthropic read the first.

        Some clients wait as long as ``retry-after`` says, even for days, so a final error has none.
        """
        if self.final:
            return [("x-should-retry", "false")]
        return [] if self.retry_after is None else [("retry-after", str(self.retry_after))]

    def body(self, shape: ErrorShape = "openai") -> bytes:
        """Return the error as JSON in the shape that the client expects."""
        if shape == "anthropic":
            error = {"type": anthropic_type(self.status), "message": self.message}
            return msgspec.json.encode({"type": "error", "error": error})
        return error_body(self.message, type=self.type, code=self.code, param=self.param)


class ConfigurationError(ProxyError):
    """The configuration is invalid. The message names file and line."""


class RequestError(ProxyError, status=400, type="invalid_request_error", code="invalid_request_error"):
    """The proxy can't serve the request. Follow the message."""


class Malformed(RequestError, code="malformed_request"):
    """The client's bytes aren't an HTTP/1.1 request, or two servers could read them differently."""


class BadBody(RequestError, code="invalid_body"):
    """The body isn't valid for its path, or a header value is unknown. `param` names the field."""


class BodyTooSlow(RequestError, status=408, code="request_timeout"):
    """The body arrived too slowly: it has 30 seconds, and one more for each 10,000 bytes."""


class BodyTooLarge(RequestError, status=413, code="request_too_large"):
    """The body is over `server.body_limit`, as sent or after decompression."""


class UnsupportedEncoding(RequestError, status=415, code="unsupported_content_encoding"):
    """The content encoding is unknown, or the body doesn't match it. Send gzip, deflate, br, zstd, or plain bytes."""


class NotAuthenticated(RequestError, status=401, type="authentication_error", code="invalid_api_key"):
    """The request has no key, or a key that isn't valid here. See `compaction-proxy keys new`."""


class ModelNotAllowed(RequestError, status=403, type="permission_error", code="model_not_allowed"):
    """The team may not use this model, or the body may name another one. See `teams.NAME.models`."""


class HostNotAllowed(RequestError, status=403, type="permission_error", code="host_not_allowed"):
    """The `Host` header has a name that the proxy doesn't serve. See `server.hosts`."""


class OriginNotAllowed(RequestError, status=403, type="permission_error", code="origin_not_allowed"):
    """A web page of another origin sent the request. See `server.cors_origins`."""


class ContentNotAllowed(RequestError, status=403, type="permission_error", code="content_not_allowed"):
    """The admin key may not read messages (`content: false`)."""


class PathNotAllowed(RequestError, status=403, type="permission_error", code="path_not_allowed"):
    """The team may not use this path. See `teams.NAME.paths`."""


class UnknownModel(RequestError, status=404, code="model_not_found"):
    """No route matches the model. Add it to `models`, or use one from `GET /v1/models`."""


class NotFound(RequestError, status=404, code="not_found"):
    """The proxy doesn't serve this path, or has no such record or archive entry for this key."""


class MethodNotAllowed(RequestError, status=405, code="method_not_allowed"):
    """The path doesn't support this method. The `allow` header has those that it supports."""


class UpgradeRequired(RequestError, status=426, code="upgrade_required"):
    """A WebSocket handshake. Use HTTP, which the `upgrade` header names (RFC 9110, 15.5.22)."""


class TooManyRequests(RequestError, status=429, type="requests", code="rate_limit_exceeded"):
    """The team has reached a limit on requests per minute or at once. Wait for `retry-after`."""

    def __init__(self, message: str, *, retry_after: int, limit: Limit | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.limit = limit


class SpendingExceeded(TooManyRequests, status=402, type="insufficient_quota", code="budget_exceeded"):
    """The team has used up its budget. The message says when it starts again. Ask the operator for a higher one."""

    final = True


class BudgetReserved(SpendingExceeded, status=429, code="budget_reserved"):
    """Requests in progress have reserved the rest of the team's budget. Wait for `retry-after`."""

    final = False


class ArchiveUnavailable(ProxyError, status=503, code="archive_unavailable", retry_after=5):
    """The proxy can't read its archive at the moment."""


class Overloaded(ProxyError, status=503, code="overloaded", retry_after=1):
    """The proxy has no capacity or memory left, or its store can't count the request. Wait for `retry-after`."""


class LoopDetected(RequestError, status=508, code="loop_detected"):
    """The request has passed this proxy before. Point `base_url` at the provider."""


class UpstreamError(ProxyError, status=502, code="upstream_error"):
    """The upstream returned no usable response."""


class UpstreamUnreachable(UpstreamError, code="upstream_unreachable"):
    """The proxy can't connect to the upstream. Check `base_url`, DNS, TLS, and the network."""


class UpstreamTimeout(UpstreamError, status=504, code="upstream_timeout"):
    """The upstream didn't respond before `server.deadline`."""


class UpstreamInterrupted(UpstreamError, code="upstream_interrupted"):
    """The upstream closed the connection in the middle of a response. It may have run the request."""


class TranslationFailed(UpstreamInterrupted, status=500, code="translation_failed"):
    """The proxy failed to translate a request or an answer. Report it, with the log line `translation.failed`."""


def error_body(message: str, *, type: str, code: str | None, param: str | None = None) -> bytes:
    """Return an error body in OpenAI's format."""
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
