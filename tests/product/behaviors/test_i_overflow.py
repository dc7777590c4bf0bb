"""Requests that an upstream refuses as too long."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.front_door import (
    WITHOUT_A_MODEL,
    Front,
    always,
    archive_id,
    calling,
    front,
    once,
    result,
    system,
    talk,
    text_of,
    user,
    words,
)
from tests.kit.upstream import Reply

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "no-retry": {"overflow_retries": 0},
    "four": {"overflow_retries": 4},
    "hurried": {},
    "shortening": {"shorten_last_user_message": True},
    "streaming": {},
    "limit": {},
    "ratio": {},
    "explained": {},
    "batch": {},
    "overhead": {},
    "rate": {},
    "rate-passed-on": {"rate_limit_as_limit": False},
    **{f"kind-{number}": {} for number in range(10)},
}
"""Each test has its own callers, so that limits learned in one don't affect the others."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(POLICIES, tmp_path_factory.mktemp("overflow")) as running:
        yield running


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None, **fields}}


TOO_LONG = "This model's maximum context length is 8000 tokens. However, your messages resulted in 9100 tokens."

OVERFLOWS: dict[str, tuple[Reply, bool]] = {
    "400": (Reply(status=400, error=error(TOO_LONG, code="context_length_exceeded")), False),
    "413": (Reply(status=413, error=error("Request too large: prompt is too long: 9100 tokens > 8000 maximum")), False),
    "422": (Reply(status=422, error=error("Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8000. "
                                          "Given: 9100 `inputs` tokens and 512 `max_new_tokens`")), False),
    "429": (Reply(status=429, error=error(TOO_LONG)), False),
    "500": (Reply(status=500, error=error(TOO_LONG, type="server_error")), False),
    "200, JSON": (Reply(error=error(TOO_LONG, code=400)), False),
    "200, first event": (Reply(error=error(TOO_LONG, code=400)), True),
}  # fmt: skip
"""How upstreams say it, and whether the request was streamed."""


@pytest.mark.parametrize("kind", OVERFLOWS)
def test_73_overflows_are_recognised(kind: str, door: Front) -> None:
    reply, stream = OVERFLOWS[kind]
    policy = f"kind-{list(OVERFLOWS).index(kind)}"
    with door.scripted(responder=once(reply)):
        seen = door.ask(talk(5, 800), policy, stream=stream)
    assert seen.status == 200
    assert seen.headers["x-compaction-retries"] == "1"
    assert len(seen.conversations) == 2
    assert "8000" not in seen.response.text, "the client hears nothing of it"
    assert "Done." in seen.response.text


TOO_LARGE_A_MINUTE = Reply(
    status=429,
    error=error("Request too large on tokens per min (TPM): Limit 3000, Requested 9000.", type="tokens"),
    headers={"retry-after": "7"},
)


def test_73_a_rate_limit_that_one_request_exceeds_counts_as_overflow(door: Front) -> None:
    """The product goes further than the letter: waiting can't help a request that is larger than its limit."""
    with door.scripted(responder=once(TOO_LARGE_A_MINUTE)):
        seen = door.ask(talk(5, 800), "rate")
    assert (seen.status, seen.headers["x-compaction-retries"]) == (200, "1")
    assert [request.status for request in seen.conversations] == [429, 200]
    assert seen.conversations[-1].tokens <= 3_000


def test_73_such_a_rate_limit_passes_unchanged_if_the_policy_says_so(door: Front) -> None:
    with door.scripted(responder=always(TOO_LARGE_A_MINUTE)):
        seen = door.ask(talk(5, 800), "rate-passed-on")
    assert len(seen.conversations) == 1
    assert (seen.status, seen.headers["retry-after"]) == (429, "7")
    assert seen.response.json() == TOO_LARGE_A_MINUTE.error
    assert seen.headers["x-compaction-retries"] == "0"


REFUSED = Reply(
    status=400,
    error=error("The prompt is too long for this deployment.", code="context_length_exceeded", param="messages"),
)


@pytest.mark.parametrize(("policy", "retries"), [("default", 2), ("no-retry", 0), ("four", 4)])
def test_74_retries_are_few_and_each_is_smaller(policy: str, retries: int, door: Front) -> None:
    messages = [user("Look."), calling(("c1", "look", {})), result("c1", words(40_000))]
    with door.scripted(responder=always(REFUSED)):
        seen = door.ask(messages, policy, model="believed")
    sizes = [request.tokens for request in seen.conversations]
    assert len(sizes) - 1 == retries == int(seen.headers["x-compaction-retries"])
    assert all(after < before for before, after in itertools.pairwise(sizes))


def test_74_the_first_retry_waits_for_no_model(door: Front) -> None:
    go = threading.Event()
    held = always(Reply(content="Goal: NOTES.", go=go))
    started = time.perf_counter()
    try:
        with door.scripted(responder=once(REFUSED), summariser=held):
            seen = door.ask([system("Be brief."), *talk(10, 500), user("What now?")], "hurried")
    finally:
        go.set()
    assert time.perf_counter() - started < 20, "nobody waited until the summary was given up"
    assert len(seen.conversations) == 2
    assert seen.headers["x-compaction-summary"] == "digest"
    assert WITHOUT_A_MODEL in seen.text


def test_74_the_target_is_the_quoted_limit_or_else_a_ratio(door: Front) -> None:
    messages = [system("Be brief."), *talk(10, 500), user("What now?")]
    with door.scripted(window=5_000):
        seen = door.ask(messages, "limit")
    assert [request.status for request in seen.conversations] == [400, 200]
    assert seen.conversations[1].tokens <= 5_000
    with door.scripted(responder=once(REFUSED)):
        seen = door.ask(messages, "ratio")
    first, second = (request.tokens for request in seen.conversations)
    assert 0.1 * first < second < 0.9 * first


def test_75_the_last_refusal_is_the_upstreams_and_says_what_is_large(door: Front) -> None:
    huge = "START " + words(9_000)
    messages = [system(words(300, "head")), *talk(2, 100), user(huge)]
    with door.scripted(responder=always(REFUSED)):
        seen = door.ask(messages, "explained", model="believed")
    assert seen.status == 400
    assert REFUSED.error is not None
    assert not isinstance(REFUSED.error, str)
    own = REFUSED.error["error"]
    assert {name: value for name, value in seen.error.items() if name != "message"} == {
        name: value for name, value in own.items() if name != "message"
    }
    assert seen.error["message"].startswith(own["message"] + " ")
    added = seen.error["message"].removeprefix(own["message"])
    assert added.count("compaction proxy") == 1
    assert "last user message 9,0" in added
    assert "system messages 3" in added
    assert "Shorten the last user message" in added


def test_76_after_content_nothing_is_retried(door: Front) -> None:
    broken = Reply(content="One two three four five six seven.", error=error(TOO_LONG, code=400), break_after=3)
    with door.scripted(responder=always(broken)):
        seen = door.ask(talk(5, 800), "streaming", stream=True)
    assert len(seen.conversations) == 1
    assert seen.status == 200
    text = seen.response.text
    assert "One" in text
    assert TOO_LONG in text
    assert text.index("One") < text.index(TOO_LONG)
    assert "compaction proxy" not in text


def test_77_of_a_trailing_batch_the_largest_results_shrink(door: Front) -> None:
    sizes = {"c1": 50, "c2": 4_000, "c3": 300, "c4": 6_000, "c5": 400}
    messages: list[Any] = [
        system("Be brief."),
        user("Look at all of them."),
        calling(*((identity, "look", {"what": identity}) for identity in sizes)),
        *(result(identity, words(size, identity)) for identity, size in sizes.items()),
    ]
    with door.scripted(window=8_000):
        seen = door.ask(messages, "batch", model="believed")
    assert [request.status for request in seen.conversations] == [400, 200]
    assert seen.messages[:3] == messages[:3]
    assert [message["tool_call_id"] for message in seen.messages[3:]] == list(sizes)
    sent = {message["tool_call_id"]: message for message in seen.messages[3:]}
    for own in messages[3:]:
        small = sizes[own["tool_call_id"]] <= 400
        assert (sent[own["tool_call_id"]] == own) == small, "the small ones are whole"
    counter = door.upstream.counter
    large = [counter.message(sent[identity]) for identity in ("c2", "c4")]
    assert max(large) - min(large) < 0.2 * max(large), "both are held to one size"
    for identity in ("c2", "c4"):
        assert sent[identity]["content"].startswith(words(sizes[identity], identity)[:40])
        assert sent[identity]["content"].endswith(words(sizes[identity], identity)[-40:])


def test_78_a_huge_last_message_is_cut_only_where_that_is_allowed(door: Front) -> None:
    messages = [system("Be brief."), user("START " + words(24_000) + " END")]
    with door.scripted(window=8_000):
        refused = door.ask(messages, model="believed", caller=1)
        seen = door.ask(messages, "shortening", model="believed", caller=1)
    assert refused.status == 400
    assert refused.error["code"] == "context_length_exceeded"
    assert "maximum context length is 8000 tokens" in refused.error["message"]
    assert "Shorten the last user message" in refused.error["message"]
    assert refused.messages == messages, "what may not be shortened is sent as it came"
    assert seen.status == 200
    assert seen.messages[0] == messages[0]
    sent = text_of(seen.messages[-1])
    assert sent.startswith("START")
    assert sent.endswith("END")
    assert seen.steps == ["fit"]
    assert door.archived(archive_id(sent), "shortening", caller=1) == [messages[-1]]


@pytest.mark.parametrize("part", ["system messages", "tools and framing"])
def test_79_for_what_can_not_shrink_no_summary_is_paid(part: str, door: Front) -> None:
    huge = words(20_000)
    schema = {"type": "object", "properties": {}}
    description = huge if part.startswith("tools") else "Looks."
    tool = {"type": "function", "function": {"name": "look", "description": description, "parameters": schema}}
    messages = [system("Be brief." if part.startswith("tools") else huge), *talk(3, 200), user("What now?")]
    before = len(door.upstream.summaries)
    for number, model in enumerate(("m", "believed")):
        caller = number + 2 * part.startswith("tools")
        with door.scripted(window=16_000):
            seen = door.ask(messages, "overhead", model=model, caller=caller, tools=[tool])
        assert 1 <= len(seen.conversations) <= 3
        assert seen.conversations[0].body["tools"] == [tool]
        assert seen.status == 400
        assert seen.error["code"] == "context_length_exceeded"
        assert "maximum context length is 16000 tokens" in seen.error["message"]
        assert f"Shorten the {part}" in seen.error["message"]
    assert len(door.upstream.summaries) == before
