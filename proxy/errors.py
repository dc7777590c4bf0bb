"""The proxy's exceptions, with the status and code that the client gets.

    ProxyError                       500  proxy_error
    ├── ConfigurationError           (never reaches a client: a command prints it)
    ├── RequestError                 400  invalid_request_error
    │   ├── Malformed                400  malformed_request
    │   ├── BadBody                  400  invalid_body
    │   ├── BodyTooSlow              408  request_timeout
    │   ├── BodyTooLarge             413  request_too_large
    │   ├── UnsupportedEncoding      415  unsupported_content_encoding
    │   ├── NotAuthenticated         401  invalid_api_key
    │   ├── ModelNotAllowed          403  model_not_allowed
    │   ├── HostNotAllowed           403  host_not_allowed
    │   ├── OriginNotAllowed         403  origin_not_allowed
    │   ├── PathNotAllowed           403  path_not_allowed
    │   ├── UnknownModel             404  model_not_found
    │   ├── NotFound                 404  not_found
    │   ├── MethodNotAllowed         405  method_not_allowed
    │   ├── UpgradeRequired          426  upgrade_required
    │   ├── TooManyRequests          429  rate_limit_exceeded
    │   ├── ContextLengthExceeded    400  context_length_exceeded
    │   └── LoopDetected             508  loop_detected
    ├── Overloaded                   503  overloaded
    └── UpstreamError                502  upstream_error
        ├── UpstreamUnreachable      502  upstream_unreachable
        ├── UpstreamTimeout          504  upstream_timeout
        └── UpstreamInterrupted      502  upstream_interrupted

Bodies have the shape of OpenAI's errors: ``{"error": {"message", "type", "param", "code"}}``. For clients of
Anthropic's API they have its shape: ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ErrorShape = Literal["openai", "anthropic"]
"""The API whose error format a client expects."""

# https://docs.claude.com/en/api/errors. Anthropic's 529 is a 503 here, so that every HTTP client understands it.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ProxyError(Exception):
    """The base class of the proxy's errors.

    The client sees ``message``. It says what to do, and never contains a key or an upstream's address. ``retry_after``
    is in seconds; ``None`` if a later retry wouldn't help.
    """

    status = 500
    type = "server_error"
    code = "proxy_error"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self, shape: ErrorShape = "openai") -> bytes:
        """Return the error as JSON in the shape that the client expects."""
        if shape == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        return error_body(self.message, type=self.type, code=self.code, param=self.param)


class ConfigurationError(ProxyError):
    """The configuration is invalid. The message names file and line."""


class RequestError(ProxyError):
    """The proxy rejects the client's request."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request_error"


class Malformed(RequestError):
    """The client's bytes aren't an HTTP/1.1 request, or two servers could read them differently."""

    code = "malformed_request"


class BadBody(RequestError):
    """The body isn't valid for its path, and no upstream could accept it."""

    code = "invalid_body"


class BodyTooSlow(RequestError):
    """The body arrives too slowly."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(RequestError):
    """The body, as sent or after decompression, is over the configured limit."""

    status = 413
    code = "request_too_large"


class UnsupportedEncoding(RequestError):
    """The content encoding is unknown, or the body doesn't match it."""

    status = 415
    code = "unsupported_content_encoding"


class NotAuthenticated(RequestError):
    """The request has no key, or its key belongs to no team, although the configuration requires keys."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotAllowed(RequestError):
    """The team may not use this model."""

    status = 403
    type = "permission_error"
    code = "model_not_allowed"


class HostNotAllowed(RequestError):
    """The ``Host`` header has a name that the proxy doesn't serve."""

    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class OriginNotAllowed(RequestError):
    """A web page of another origin sent the request, and the configuration doesn't list that origin."""

    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class PathNotAllowed(RequestError):
    """The team may not use this path."""

    status = 403
    type = "permission_error"
    code = "path_not_allowed"


class UnknownModel(RequestError):
    """No route matches this model."""

    status = 404
    code = "model_not_found"


class NotFound(RequestError):
    """The proxy doesn't serve this path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path doesn't support this method."""

    status = 405
    code = "method_not_allowed"


class UpgradeRequired(RequestError):
    """A WebSocket handshake. The response's ``upgrade`` header must name the protocol to use (RFC 9110, 15.5.22)."""

    status = 426
    code = "upgrade_required"


class TooManyRequests(RequestError):
    """The team has exceeded a rate limit or a quota."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Overloaded(ProxyError):
    """The proxy has too many requests in progress."""

    status = 503
    code = "overloaded"
    retry_after = 1


class ContextLengthExceeded(RequestError):
    """The request doesn't fit, even compacted. The message names the parts and their sizes in tokens."""

    code = "context_length_exceeded"


class LoopDetected(RequestError):
    """The request has already passed through this proxy."""

    status = 508
    code = "loop_detected"


class UpstreamError(ProxyError):
    """The upstream returned no usable answer."""

    status = 502
    code = "upstream_error"


class UpstreamUnreachable(UpstreamError):
    """The proxy can't connect to the upstream: name, network, or TLS."""

    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    """The upstream didn't answer before the deadline."""

    status = 504
    code = "upstream_timeout"


class UpstreamInterrupted(UpstreamError):
    """The upstream broke off in the middle of its answer."""

    code = "upstream_interrupted"


def error_body(message: str, *, type: str, code: str | None, param: str | None = None) -> bytes:
    """Return an error body in OpenAI's format."""
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
