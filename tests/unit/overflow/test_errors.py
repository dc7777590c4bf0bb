"""Find the upstream's sentence in any envelope, and put it into OpenAI's."""

import json
from typing import Any

import pytest

from proxy.overflow.errors import as_error, message_site

OWN = {"error": {"message": "Odd.", "type": "t", "param": None, "code": "c"}, "id": "1"}
REPORT = {"choices": None, "base_resp": {"status_code": 1008, "status_msg": "Odd."}}


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (OWN, OWN["error"]),
        ([OWN], OWN["error"]),
        ({"error": "Odd."}, {"message": "Odd."}),
        ({"error": {"code": 5}}, {"code": 5}),
        ({"error": {"message": "Odd.", "errors": [{"message": "Inner."}]}}, None),
        ({"message": "Odd.", "code": "odd", "data": None}, {"message": "Odd.", "code": "odd", "data": None}),
        (REPORT, {"message": "Odd.", "status_code": 1008, "code": 1008}),
        ({"Response": {"Error": {"Code": "C", "Message": "Odd."}, "RequestId": "r"}}, None),
        ({"ResponseMetadata": {"RequestId": "r", "Error": {"Code": "C", "Message": "Odd."}}}, None),
        ({"header": {"code": 10163, "message": "Odd."}}, {"message": "Odd.", "code": 10163}),
        ({"error_code": 336003, "error_msg": "Odd."}, {"message": "Odd.", "error_code": 336003, "code": 336003}),
        ({"detail": "Odd."}, {"message": "Odd."}),
        ({"detail": [{"loc": ["body"], "msg": "Odd."}, {"msg": "Odder."}]}, {"message": "Odd.", "loc": ["body"]}),
        ({"detail": {"error": "Odd."}}, {"message": "Odd."}),
        ({"object": "error", "choices": [], "message": "Odd."}, None),
        ({"choices": [{"index": 0, "error": {"message": "Odd.", "code": 5}}]}, {"message": "Odd.", "code": 5}),
        ({"choices": [{"index": 0, "error": "Odd."}]}, None),
        ({"response": {"error": {"message": "Odd."}}, "type": "response.failed"}, {"message": "Odd."}),
    ],
)
def test_an_error_under_status_200(value: Any, error: Any) -> None:
    whole = json.dumps(value).encode()
    for body in (whole, b"\xef\xbb\xbf\n" + whole, b": wait\n\nevent: error\ndata: " + whole + b"\n\n"):
        found = as_error(200, body)
        assert found is not None
        if error is None:
            assert found["error"]["message"] == "Odd."
        else:
            assert found["error"] == error


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Odd."}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {"content": "Odd."}, "finish_reason": None}], "base_resp": {"status_code": 0}},
        {"choices": [], "base_resp": {"status_code": 0, "status_msg": "success"}, "error": None},
        {"choices": []},
        {},
        [],
        "Odd.",
        7,
    ],
)
def test_what_is_no_error(value: Any) -> None:
    assert as_error(200, json.dumps(value).encode()) is None
    assert message_site(value) is None


@pytest.mark.parametrize("body", [b"", b"<html>Odd.</html>", b"Odd.", b'{"error": {"message": "Od'])
def test_what_cannot_be_read(body: bytes) -> None:
    assert as_error(200, body) is None
    assert as_error(502, body) is None


def test_a_text_as_an_event() -> None:
    assert as_error(200, b"data: [ERROR] Odd.\n\n") == {"error": {"message": "[ERROR] Odd."}}
    assert as_error(200, b"error: Odd.\n\n") == {"error": {"message": "Odd."}}
    assert as_error(200, b"data: Odd.\n\n") is None


def test_half_a_surrogate_pair() -> None:
    error = as_error(200, b'{"error": "Half of \\ud83d"}')
    assert error == {"error": {"message": "Half of \ud83d"}}
