"""The catalogue's error messages in the error forms of each API, as a gateway would pass them on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from bench.overflow.lines import Line

Form = Callable[[str], tuple[int, bytes]]
"""Returns the status and body for a message."""


def _json(status: int, value: object) -> tuple[int, bytes]:
    return status, json.dumps(value).encode()


def _events(*events: Mapping[str, Any]) -> tuple[int, bytes]:
    named = (
        "".join((f"event: {event['type']}\n" if "type" in event else "", "data: ", json.dumps(event), "\n\n"))
        for event in events
    )
    return 200, "".join(named).encode()


def _openai(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _anthropic(message: str) -> dict[str, Any]:
    error = {"type": "invalid_request_error", "message": message}
    return {"type": "error", "error": error, "request_id": "req_011CSHoEeqs5C35K2UUqR7Fy"}


def _failed(message: str) -> tuple[int, bytes]:
    response = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "error": None}
    error = {"code": "invalid_prompt", "message": message}
    failed = {"type": "response.failed", "response": {**response, "status": "failed", "error": error}}
    return _events({"type": "response.created", "response": response}, failed)


def _response_error(message: str) -> tuple[int, bytes]:
    return _events({"type": "error", "code": None, "message": message, "param": None, "sequence_number": 1})


FORMS: dict[str, dict[str, Form]] = {
    "chat": {"body": lambda message: _json(400, _openai(message)), "event": lambda message: _events(_openai(message))},
    "responses": {
        "body": lambda message: _json(400, _openai(message)),
        "response.failed": _failed,
        "error": _response_error,
    },
    "messages": {
        "body": lambda message: _json(400, _anthropic(message)),
        "error": lambda message: _events(_anthropic(message)),
    },
}
"""The ways in which each API reports an error."""


def in_forms_of(api: str, lines: Iterable[Line]) -> list[Line]:
    """Return each line with a JSON error message and a failed status, once per form of an API.

    The status, code, and headers of the original are lost, so only the message remains to recognize.
    """
    found = []
    for line in lines:
        message = _message(line)
        if message is None:
            continue
        for name, form in FORMS[api].items():
            status, body = form(message)
            found.append(
                replace(
                    line, id=f"{line.id} as {name}", status=status, body=body, headers=(), endpoint=api, estimate=None
                )
            )
    return found


def _message(line: Line) -> str | None:
    if line.status < 400:
        return None
    try:
        value = json.loads(line.body)
    except ValueError:
        return None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None
