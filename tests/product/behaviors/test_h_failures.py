"""Failed summaries: the proxy sends a digest in their place, and no client gets an error."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kit.front_door import (
    WITHOUT_A_MODEL,
    Front,
    Seen,
    always,
    dropped,
    front,
    long_talk,
    summary_messages,
    words,
)
from tests.kit.upstream import Reply, ToolCall

BAD = "MODEL-WORDS-THAT-MUST-NOT-SHOW"

FAILURES = {
    "500": Reply(status=500, error={"error": {"message": BAD, "type": "server_error"}}),
    "429": Reply(status=429, error={"error": {"message": BAD, "code": "rate_limit_exceeded"}}),
    "401": Reply(status=401, error={"error": {"message": BAD, "code": "invalid_api_key"}}),
    "timeout": Reply(content=f"Goal: {BAD}.", delay=2),
}


def choice(message: dict[str, Any]) -> Reply:
    chosen = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": "stop"}
    return Reply(error={"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [chosen]})


EMPTY = {
    "empty": Reply(content=""),
    "whitespace": Reply(content=" \n\t "),
    "reasoning only": choice({"reasoning_content": BAD, "reasoning": BAD}),
    "a refusal": choice({"refusal": f"I cannot do that. {BAD}"}),
    "a refusal in words": Reply(content=f"I'm sorry, but I can't help with that. {BAD}"),
    "a call": Reply(tool_calls=(ToolCall("call_1", "look", json.dumps({"what": BAD})),)),
}

# Each case has a caller of its own: a model that fails one caller again and again is not asked by it for a while.
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"summary": {"timeout": 0.5}} for name in ("default", "failing", "empty")},
    "fallback": {"summary": {"timeout": 5, "model": "first", "fallback_model": "second"}},
    "patient": {"summary": {"timeout": 10}},
}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(POLICIES, tmp_path_factory.mktemp("failures")) as running:
        yield running


def digested(seen: Seen, messages: list[Any]) -> None:
    """The request went on, with a summary that no model wrote; the newest messages are as they came."""
    assert seen.status == 200
    assert seen.headers["x-compaction"] == "compacted"
    assert seen.headers["x-compaction-summary"] == "digest"
    assert len(seen.conversations) == 1
    assert len(summary_messages(seen.messages)) == 1
    assert WITHOUT_A_MODEL in seen.summary
    gone = dropped(messages, seen)
    assert len(gone) >= 8
    answer = next(message for message in reversed(gone) if message["role"] == "assistant")
    assert answer["content"][:60] in " ".join(seen.summary.split()), "a digest says what happened"
    assert BAD not in seen.text


@pytest.mark.parametrize("failure", FAILURES)
def test_67_a_digest_stands_in_after_a_failure(failure: str, door: Front) -> None:
    """Also if the whole conversation would still fit: the next turns continue the sent prompt."""
    messages = long_talk(f"67 {failure} ")
    with door.scripted(summariser=always(FAILURES[failure])):
        seen = door.ask(messages, "failing", caller=list(FAILURES).index(failure))
    # If the upstream refuses a transcript, the conversation's own model is asked once.
    assert len(seen.summaries) == (2 if failure == "401" else 1)
    digested(seen, messages)


@pytest.mark.parametrize("answer", EMPTY)
def test_68_a_digest_stands_in_for_no_answer(answer: str, door: Front) -> None:
    messages = long_talk(f"68 {answer} ")
    with door.scripted(summariser=always(EMPTY[answer])):
        seen = door.ask(messages, "empty", caller=list(EMPTY).index(answer))
    assert len(seen.summaries) == 1
    digested(seen, messages)


def test_69_a_summary_as_long_as_its_source_is_rejected(door: Front) -> None:
    """Even if its first lines would be enough: a model that ignores its limit has not summarized."""
    messages = long_talk("69 ")
    with door.scripted(summariser=always(choice({"content": f"Goal: {BAD}.\n" + words(14_000, "long")}))):
        seen = door.ask(messages, caller=1)
    assert len(seen.summaries) == 1
    digested(seen, messages)


def test_70_nobody_reads_an_error(door: Front) -> None:
    """Neither in this request nor in the next ones, which find the same digest."""
    messages = long_talk("70 ")
    page = Reply(error=f"<html><body>{BAD}: error generating summary</body></html>")
    with door.scripted(summariser=always(page)):
        seen = door.ask(messages, caller=2)
        more = [*messages, {"role": "assistant", "content": "This."}, {"role": "user", "content": "And?"}]
        again = door.ask(more, caller=2)
    digested(seen, messages)
    assert again.summary == seen.summary
    for sent in (seen.text, again.text, json.dumps(seen.response.json())):
        assert BAD not in sent
        assert "error generating" not in sent


def test_71_another_model_is_tried_once_before_that(door: Front) -> None:
    def second_best(body: dict[str, Any]) -> Reply:
        return Reply(content="Goal: NOTES of the second.") if body["model"] == "second" else FAILURES["500"]

    with door.scripted(summariser=second_best):
        seen = door.ask(long_talk("71 "), "fallback")
    assert [request.body["model"] for request in seen.summaries] == ["first", "second"]
    assert seen.headers["x-compaction-summary"] == "made"
    assert "NOTES of the second" in seen.summary
    messages = long_talk("71 again ")
    with door.scripted(summariser=always(FAILURES["500"])):
        seen = door.ask(messages, "fallback", caller=1)
    assert [request.body["model"] for request in seen.summaries] == ["first", "second"]
    digested(seen, messages)


def test_72_the_wait_is_bounded_and_shared(door: Front) -> None:
    messages = long_talk("72 ")
    started = time.perf_counter()
    with door.scripted(summariser=always(Reply(content="Goal: NOTES.", delay=20))):
        digested(door.ask(messages, caller=3), messages)
    assert time.perf_counter() - started < 17
    before = len(door.upstream.requests)
    with (
        door.scripted(summariser=always(Reply(content="Goal: NOTES of all.", delay=0.5))),
        ThreadPoolExecutor(4) as threads,
    ):
        all_seen = list(threads.map(lambda _: door.ask(messages, "patient"), range(4)))
    requests = door.upstream.requests[before:]
    assert [request.summary for request in requests].count(True) == 1
    sent = {request.raw for request in requests if not request.summary}
    assert len(sent) == 1, "all of them got the same one"
    assert b"NOTES of all" in sent.pop()
    assert [seen.status for seen in all_seen] == [200] * 4
