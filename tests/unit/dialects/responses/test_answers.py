"""Judge the first events of a stream and the end of an answer."""

import json
from typing import Any

import pytest

from proxy.dialects.responses.answers import ResponsesAnswers
from tests.kit.response_items import item_events

ANSWERS = ResponsesAnswers()

USAGE = {
    "input_tokens": 1200,
    "input_tokens_details": {"cached_tokens": 1024},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 1207,
}
PART = {"type": "output_text", "text": "hi there", "annotations": [], "logprobs": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [PART]}
TOOLS = [{"type": "function", "name": "t", "parameters": {"properties": {"usage": {"type": "string"}, "error": {}}}}]
FAILURE = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}


def response(**fields: Any) -> dict[str, Any]:
    frame = {"id": "resp_1", "object": "response", "status": "completed", "error": None, "incomplete_details": None}
    after = {"output": [MESSAGE], "tools": TOOLS, "usage": USAGE, "user": None, "metadata": {"usage": "x"}}
    return {**frame, "instructions": 'Say "error": {"a": 1}', **after, **fields}


def stream(*events: tuple[str, dict[str, Any]]) -> bytes:
    return b"".join(
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n".encode()
        for number, (kind, fields) in enumerate(events)
    )


BEGUN = response(status="in_progress", output=[], usage=None)
ANNOUNCED = [("response.created", {"response": BEGUN}), ("response.queued", {"response": BEGUN})]
ANNOUNCED.append(("response.in_progress", {"response": BEGUN}))
INCOMPLETE = response(status="incomplete", output=[], incomplete_details={"reason": "max_output_tokens"})


def kind_and_place(body: bytes, step: int = 1) -> tuple[str | None, int]:
    """Return the kind of a stream, and the bytes after which it's known."""
    start = ANSWERS.event_reader()
    for at in range(0, len(body), step):
        if found := start.feed(body[at : at + step]):
            return found, at + step
    return None, len(body)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (list(item_events(0, MESSAGE)), "content"),
        ([("response.output_item.added", {"item": {"type": "reasoning", "id": "rs_1", "summary": []}})], "content"),
        ([("response.completed", {"response": response()})], "content"),
        ([("response.completed", {"response": response(output=[])})], "end"),
        ([("response.incomplete", {"response": INCOMPLETE})], "end"),
        ([("response.failed", {"response": response(status="failed", output=[], error=FAILURE)})], "error"),
        ([("response.failed", {"response": response(status="failed", output=[])})], "error"),
        ([("error", {**FAILURE, "param": None})], "error"),
        ([("response.of_the_future", {"n": 1})], "content"),
    ],
)
@pytest.mark.parametrize("step", [1, 100_000])
def test_a_stream_is_judged_by_its_first_event_after_the_announcements(
    events: list[tuple[str, dict[str, Any]]], kind: str, step: int
) -> None:
    quiet = stream(*ANNOUNCED)
    assert kind_and_place(b": comment\n\n" + quiet, step)[0] is None
    found, place = kind_and_place(quiet + stream(*events), step)
    assert found == kind
    assert step > 1 or place > len(quiet)


@pytest.mark.parametrize("size", [10, 50_000])
@pytest.mark.parametrize("streamed", [True, False])
def test_the_tail_of_an_answer_has_its_usage(*, size: int, streamed: bool) -> None:
    long = {**MESSAGE, "content": [{**PART, "text": 'a "usage": {"input_tokens": 1} ' * size}]}
    done = response(output=[long])
    body = stream(*ANNOUNCED, ("response.completed", {"response": done})) if streamed else json.dumps(done).encode()
    for step in (1000, len(body)):
        tail = ANSWERS.tail()
        for at in range(0, len(body), step):
            tail.add(body[at : at + step])
        finished = tail.finished()
        assert (finished.prompt, finished.output, finished.cached, finished.empty) == (1200, 7, 1024, False)


def test_a_stream_that_ends_after_its_announcement_was_given_up() -> None:
    assert ANSWERS.gives_up(stream(*ANNOUNCED))
    assert ANSWERS.gives_up(stream(*ANNOUNCED) + b"data: [DONE]\n\n")
    assert not ANSWERS.gives_up(stream(*ANNOUNCED, ("response.incomplete", {"response": INCOMPLETE})))
    assert not ANSWERS.gives_up(b"")
