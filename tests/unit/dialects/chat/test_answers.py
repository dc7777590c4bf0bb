"""Judge the first bytes of an answer, split at any byte."""

import json

import pytest

from proxy.dialects.answers import EVENT
from proxy.dialects.chat.answers import ChatAnswers

ANSWERS = ChatAnswers()


def whole(**choice: object) -> bytes:
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [{"index": 0, **choice}]}).encode()


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
WRITTEN = [
    whole(message={"role": "assistant", "content": "hi"}),
    whole(message={"role": "assistant", "content": None, "tool_calls": [CALL]}),
    whole(message={"role": "assistant", "content": [{"type": "text", "text": ""}]}),
    whole(message={"role": "assistant", "content": "", "reasoning_content": "Well"}),
    whole(message={"role": "assistant", "content": None, "refusal": "No."}),
    whole(text="hi"),
    b'{"error": null, "choices" : [\n {"message": {"content" :\n "hi"}}]}',
    b'{"echo": "\\"error\\": {}", "choices":[{"message":{"content":"hi"}}]}',
    b'\xef\xbb\xbf\r\n\r\n  {"choices":[{"message":{"content":"hi"}}]}',
    b"<html>hi</html>",
    b"Bad gateway",
]


@pytest.mark.parametrize("body", WRITTEN)
def test_an_answer_has_content(body: bytes) -> None:
    assert not ANSWERS.read_whole(body).empty


NOT_WRITTEN = [
    b"",
    b"\r\n \r\n",
    b"{}",
    b'{"choices":null,"base_resp":{"status_code":2013,"status_msg":"too long"}}',
    b'{"choices":[],"code":400,"message":"too long"}',
    b'{"error":{"message":"too long"},"choices":[{"message":{"content":"hi"}}]}',
    b'{"error" : "too long", "choices":[{"message":{"content":"hi"}}]}',
    b'{"detail":[{"msg":"too long","input":[{"role":"user","content":"hi"}]}]}',
    b'[{"error":{"message":"too long"}}]',
    whole(message={"role": "assistant", "content": ""}, finish_reason="error", error={"message": "too long"}),
]


@pytest.mark.parametrize("body", NOT_WRITTEN)
def test_an_error_or_nothing_is_no_answer(body: bytes) -> None:
    assert ANSWERS.read_whole(body).empty


@pytest.mark.parametrize("name", [b"data: x", b"event: x", b": x", b"id: 1", b"retry: 1", b"error: {}"])
def test_events_under_another_name_are_seen(name: bytes) -> None:
    for blank in (b"", b"\n\n", b"\xef\xbb\xbf"):
        body = blank + name
        assert EVENT.match(body)


ROLE = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
TOO_LONG = {"message": "the prompt is too long", "code": 400}
FAILED = [
    {"error": TOO_LONG},
    [{"error": TOO_LONG}],
    {**ROLE, "error": TOO_LONG},
    {"id": "c", "choices": [{"delta": {"content": ""}, "finish_reason": "error", "error": TOO_LONG}]},
    {"id": "c", "choices": None, "base_resp": {"status_code": 2013, "status_msg": "too long"}},
    {"Response": {"Error": {"Code": "x", "Message": "too long"}}},
    {"object": "error", **TOO_LONG},
    {"type": "response.failed", "response": {"status": "failed", "error": TOO_LONG}},
    {"detail": [{"msg": "too long"}]},
    {"header": {"code": 10_907, "message": "too long"}},
    json.dumps({"error": TOO_LONG}),
    TOO_LONG,
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("value", FAILED, ids=json.dumps)
def test_an_error_is_the_first_that_is_said(value: object, end: bytes) -> None:
    lines = [
        b": wait",
        b"",
        b"data: " + json.dumps(ROLE).encode(),
        b"",
        b"id: 1",
        b"data: " + json.dumps(value).encode(),
    ]
    events = b"\xef\xbb\xbf" + end.join([*lines, b"", b""])
    seen = [ANSWERS.event_reader().feed(events[:at]) for at in range(len(events) + 1)]
    assert set(seen) == {None, "error"}
    assert seen.index("error") >= len(events) - len(end)
    later = events + b'data: {"choices":[{"delta":{"content":"hi"}}]}' + end + end
    assert ANSWERS.event_reader().feed(later) == "error"
