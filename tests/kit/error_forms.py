"""The catalogue's error messages in the error forms of each API, as a gateway would pass them on."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

from bench.overflow.lines import Line
from tests.kit.three_apis import error_body, event


def in_forms_of(api: str, lines: Iterable[Line]) -> list[Line]:
    """Return each line with a JSON error message and a failed status, once per form of an API.

    The status, code, and headers of the original are lost, so only the message remains to recognize.
    """
    return [
        replace(line, id=f"{line.id} as {name}", status=status, body=body, headers=(), endpoint=api, estimate=None)
        for line in lines
        if (message := _message(line)) is not None
        for name, status, body in _forms(api, message)
    ]


def _forms(api: str, message: str) -> Iterator[tuple[str, int, bytes]]:
    """Yield the name, the status, and the body of each way in which an API reports an error."""
    error = error_body(api, message, None)
    yield "body", 400, json.dumps(error).encode()
    if api != "responses":
        yield "event", 200, event(error)
        return
    begun = {"id": "resp_1", "object": "response", "status": "in_progress", "output": [], "error": None}
    failed = {**begun, "status": "failed", "error": {"code": "invalid_prompt", "message": message}}
    events = ({"type": "response.created", "response": begun}, {"type": "response.failed", "response": failed})
    yield "response.failed", 200, b"".join(map(event, events))
    yield "error", 200, event({"type": "error", "code": None, "message": message, "param": None, "sequence_number": 1})


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
