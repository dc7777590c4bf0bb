"""Errors of each provider's form have a readable text, and odd JSON reads alike in all translations."""

import json
import sys
from typing import Any

import pytest

from proxy.upstream.bridge import messages, responses
from proxy.upstream.bridge.transport import Translator, _error_fields, decoded

SAID = "Too long"
FAULT = {"type": "extra_forbidden", "loc": ["body", "messages", 1, "name"], "msg": SAID, "input": {"secret": "x"}}
PLACED = f"body.messages.1.name: {SAID}"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ([{"error": {"code": 400, "message": SAID, "status": "INVALID_ARGUMENT"}}], SAID),
        ({"error": {"message": SAID}}, SAID),
        ({"error": {"message": SAID, "type": "invalid_request_error", "failed_generation": "{"}}, SAID),
        ({"error": {"code": "content_filter", "message": SAID, "innererror": {"code": "x", "message": "no"}}}, SAID),
        ({"error": SAID}, SAID),
        ({"error": {"message": {"detail": [FAULT]}}}, PLACED),
        ({"object": "error", "message": SAID, "type": "invalid_request_error", "code": "3280"}, SAID),
        ({"object": "error", "message": {"detail": [FAULT, FAULT]}}, f"{PLACED}; {PLACED}"),
        ({"detail": [FAULT]}, PLACED),
        ({"detail": SAID}, SAID),
        ({"Message": SAID}, SAID),
        ({"__type": "ValidationException", "message": SAID}, SAID),
        ({"statusCode": 401, "message": SAID}, SAID),
        ({"id": "1", "message": SAID}, SAID),
        ({"errors": [{"code": 7003, "message": SAID}], "success": False}, SAID),
        ({"fault": {"faultstring": SAID, "detail": {"errorcode": "x"}}}, SAID),
        ({"type": "about:blank", "title": "Bad Request", "detail": SAID}, SAID),
        ({"code": 7}, '{"code": 7}'),
        ([], "[]"),
        (SAID, SAID),
    ],
)
@pytest.mark.parametrize("translator", [messages.TRANSLATOR, responses.TRANSLATOR])
def test_text(error: Any, text: str, translator: Translator) -> None:
    made = translator.error(_error_fields(json.dumps(error).encode()), 400)
    assert made["error"]["message"] == text


@pytest.mark.parametrize(
    "raw", [b"Too long\n", b"<html><head><style>x</style></head>\n<h1>Too <b>long</b></h1></html>"]
)
def test_text_without_json(raw: bytes) -> None:
    assert _error_fields(raw)["message"] == SAID


@pytest.mark.parametrize("number", ["1" * 5_000, "9" * 400 + ".5", "-1e999", "12345678901234567890123"])
def test_a_number_of_any_size_is_read(number: str) -> None:
    value = decoded(f"[{number}, 1e400]".encode())[0]
    assert value == (int(number) if len(number) < 300 and "e" not in number else pytest.approx(value))
    assert abs(value) <= sys.float_info.max
