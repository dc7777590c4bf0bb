"""How real servers refuse a field of a request by its name."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """A server's refusal: its status and body."""

    status: int
    body: bytes


def _json(value: Any, status: int = 400) -> Refusal:
    return Refusal(status, json.dumps(value).encode())


def _openai(field: str, value: Any) -> Refusal:
    message = f"Unsupported parameter: '{field}' is not supported with this model."
    error = {"message": message, "type": "invalid_request_error", "param": field, "code": "unsupported_parameter"}
    return _json({"error": error})


def _older_openai(field: str, value: Any) -> Refusal:
    message = f"Unrecognized request argument supplied: {field}"
    return _json({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})


def _detail(field: str, value: Any) -> list[dict[str, Any]]:
    loc = ["body", *(int(name) if name.isdigit() else name for name in field.split("."))]
    return [{"type": "extra_forbidden", "loc": loc, "msg": "Extra inputs are not permitted", "input": value}]


def _pydantic(field: str, value: Any) -> Refusal:
    return _json({"detail": _detail(field, value)}, 422)


def _mistral(field: str, value: Any) -> Refusal:
    outer = {"object": "error", "type": "invalid_request_error", "param": None, "code": None}
    return _json({**outer, "message": {"detail": _detail(field, value)}}, 422)


def _google(field: str, value: Any) -> Refusal:
    said = f'Invalid JSON payload received. Unknown name "{field}": Cannot find field.'
    violations = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [{"description": said}]}
    return _json([{"error": {"code": 400, "message": said, "status": "INVALID_ARGUMENT", "details": [violations]}}])


def _groq(field: str, value: Any) -> Refusal:
    return _json({"error": {"message": f"property '{field}' is unsupported", "type": "invalid_request_error"}})


def _plain(field: str, value: Any) -> Refusal:
    said = f"Failed to deserialize the JSON body into the target type: unknown field `{field}`, expected one of `model`"
    return Refusal(422, f"{said}, `messages`, `max_new_tokens` at line 1 column 42".encode())


def _bedrock(field: str, value: Any) -> Refusal:
    said = f"Malformed input request: #: extraneous key [{field}] is not permitted, please reformat your input and try"
    return _json({"message": f"{said} again."})


def _xai(field: str, value: Any) -> Refusal:
    first, *others = field.split("_")
    said = f"Argument not supported on this model: {first}{''.join(map(str.capitalize, others))}"
    return _json({"code": "Client specified an invalid argument", "error": said})


def _zhipu(field: str, value: Any) -> Refusal:
    return _json({"error": {"code": "1210", "message": f"{field}参数非法。请检查文档。"}})


WORDINGS: dict[str, Callable[[str, Any], Refusal]] = {
    "OpenAI": _openai,
    "older OpenAI": _older_openai,
    "pydantic": _pydantic,
    "Mistral": _mistral,
    "Google": _google,
    "Groq": _groq,
    "plain": _plain,
    "Bedrock": _bedrock,
    "xAI": _xai,
    "Zhipu": _zhipu,
}
"""Refusals of a field and its value, by the server."""
