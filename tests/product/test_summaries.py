"""Summaries seen from both ends: what the client gets, and what the summary model is asked."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.demo.replies import Responder, ToolCall
from proxy.demo.serving import serve
from proxy.demo.upstream import Reply, StandIn
from tests.kit.scripted import chat, client, proxied, words

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}

LONG = chat(7, 1_000)
"""A conversation just over the trigger."""


def numbered() -> Responder:
    """A summary model that numbers its summaries."""
    numbers = itertools.count(1)
    return lambda body: Reply(content=f"Goal: SUMMARY-{next(numbers)} says that the user asked numbered questions.")


@contextlib.contextmanager
def summarising(
    upstream: StandIn,
    folder: Path,
    summary: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The URL of a proxy in front of the upstream."""
    with serve(upstream.app) as url:
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": {"summary": dict(summary or {}), **(policy or {})}},
        }
        with proxied(settings, folder) as entrance:
            yield entrance


def ask(caller: openai.OpenAI, messages: list[Any]) -> Mapping[str, str]:
    """The headers of an answer."""
    return caller.chat.completions.with_raw_response.create(model="m", messages=messages).headers


def asked(upstream: StandIn) -> str:
    """Everything that the summary model was asked."""
    return json.dumps([request.body for request in upstream.summaries])


def sent(upstream: StandIn) -> str:
    """The messages of the last conversation that reached the upstream."""
    return json.dumps(upstream.conversations[-1].body["messages"])


def test_made_once_for_all_who_wait(tmp_path: Path, waiting: Callable[[int], bool]) -> None:
    go = threading.Event()
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content="Goal: SUMMARY-1.", go=go))
    with (
        summarising(upstream, tmp_path) as url,
        client(url) as caller,
        ThreadPoolExecutor(8) as threads,
    ):
        asked = [threads.submit(ask, caller, LONG) for _ in range(8)]
        assert waiting(8)
        go.set()
        headers = [one.result() for one in asked]
    assert len(upstream.summaries) == 1
    assert {h["x-compaction-summary"] for h in headers} == {"made"}
    assert len({request.raw for request in upstream.conversations}) == 1
    assert len(upstream.conversations) == 8


def test_a_restarted_proxy_makes_none_anew(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    with summarising(upstream, tmp_path) as url, client(url) as caller:
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
        assert ask(caller, LONG)["x-compaction-summary"] == "stored"
    with summarising(upstream, tmp_path) as url, client(url) as caller:
        assert ask(caller, LONG)["x-compaction-summary"] == "stored"
    assert len(upstream.summaries) == 1
    assert len({json.dumps(request.body["messages"]) for request in upstream.conversations}) == 1


def test_the_next_one_is_made_from_the_one_before(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    with summarising(upstream, tmp_path) as url, client(url) as caller:
        messages = LONG[:-1]
        while len(upstream.summaries) < 2:
            assert len(messages) < 100
            number = len(messages)
            messages = [*messages, {"role": "user", "content": f"Question {number}: " + words(700, f"n{number}x")}]
            ask(caller, messages)
            messages = [*messages, {"role": "assistant", "content": f"Answer {number}."}]
            time.sleep(0.02)
    first, second = (json.dumps(request.body) for request in upstream.summaries)
    assert "Question 0:" in first
    assert "SUMMARY-1" not in first
    assert "<previous_summary>" in second
    assert "SUMMARY-1" in second
    assert "Question 0:" not in second
    assert "Question 17:" in second


def test_an_edited_history_gets_a_summary_of_its_own(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    edited = [dict(message) for message in LONG]
    edited[3]["content"] = edited[3]["content"].replace("Question 1:", "Question one:")
    with summarising(upstream, tmp_path) as url, client(url) as caller:
        ask(caller, LONG)
        assert "SUMMARY-1" in sent(upstream)
        assert ask(caller, edited)["x-compaction-summary"] == "made"
        assert "SUMMARY-2" in sent(upstream)
        assert "SUMMARY-1" not in sent(upstream)
        rewound = [*LONG[:9], {"role": "user", "content": "Let us begin again."}]
        assert ask(caller, rewound)["x-compaction"] == "none"
        assert "SUMMARY" not in sent(upstream)
        assert ask(caller, LONG)["x-compaction-summary"] == "stored"
        assert "SUMMARY-1" in sent(upstream)
    assert "SUMMARY" not in asked(upstream)


def test_callers_share_nothing(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    with (
        summarising(upstream, tmp_path) as url,
        client(url, "sk-first") as first,
        client(url, "sk-second") as second,
    ):
        assert ask(first, LONG)["x-compaction-summary"] == "made"
        assert ask(second, LONG)["x-compaction-summary"] == "made"
        assert "SUMMARY-2" in sent(upstream)
        assert ask(first, LONG)["x-compaction-summary"] == "stored"
        assert "SUMMARY-1" in sent(upstream)
    keys = [request.headers["authorization"] for request in upstream.summaries]
    assert keys == ["Bearer sk-first", "Bearer sk-second"]


BAD = "MODEL-WORDS-THAT-MUST-NOT-SHOW"
REJECTED = {
    "500": Reply(status=500, error={"error": {"message": BAD, "type": "server_error"}}),
    "401": Reply(status=401, error={"error": {"message": BAD, "code": "invalid_api_key"}}),
    "429": Reply(status=429, error={"error": {"message": BAD, "code": "rate_limit_exceeded"}}),
    "slow": Reply(content=f"Goal: {BAD}.", delay=3),
    "empty": Reply(content=""),
    "nothing": Reply(content=None),
    "spaces": Reply(content=" \n\t "),
    "refusal": Reply(content=f"I'm sorry, but I can't help with that. {BAD}"),
    "longer than its source": Reply(content=f"Goal: {BAD}.\n" + words(14_000, "long")),
    "truncated": Reply(error=f'{{"choices": [{{"message": {{"content": "{BAD}'),
    "a web page": Reply(error=f"<html><body>{BAD}</body></html>"),
    "an error in a 200": Reply(error={"error": {"message": BAD, "code": 500}}),
    "a call": Reply(tool_calls=(ToolCall("call_1", "look", json.dumps({"what": BAD})),)),
    "cut off": Reply(content=f"Goal: {BAD}.", finish_reason="length"),
    "broken connection": Reply(content=f"Goal: {BAD}.", break_after=0),
}


@pytest.mark.parametrize("name", REJECTED)
def test_without_a_summary_there_is_a_digest(name: str, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, max_output=15_000, summariser=lambda body: REJECTED[name])
    summary = {"timeout": 1, "fallback_model": "second-best"}
    with summarising(upstream, tmp_path, summary) as url, client(url) as caller:
        headers = ask(caller, LONG)
        assert headers["x-compaction"] == "compacted"
        assert headers["x-compaction-summary"] == "digest"
        assert ask(caller, LONG)["x-compaction-summary"] == "digest"
    assert [request.body["model"] for request in upstream.summaries] == ["m", "second-best"]
    assert BAD not in sent(upstream)
    assert "put together without a model" in sent(upstream)
    assert "- Answer 4" in sent(upstream), "a digest says what happened"
    assert {request.status for request in upstream.conversations} == {200}
    assert len({request.raw for request in upstream.conversations}) == 1, "the prompt stays the same"
    assert upstream.faults == []


def test_the_fallback_is_asked_once(tmp_path: Path) -> None:
    def decide(body: dict[str, Any]) -> Reply:
        return Reply(content="Goal: SUMMARY-2.") if body["model"] == "second-best" else REJECTED["500"]

    upstream = StandIn(window=WINDOW, summariser=decide)
    with summarising(upstream, tmp_path, {"fallback_model": "second-best"}) as url, client(url) as caller:
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    assert [request.body["model"] for request in upstream.summaries] == ["m", "second-best"]
    assert "SUMMARY-2" in sent(upstream)


def test_a_policys_own_prompt(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    prompt = "OUR-WORDS {not a field}\n<transcript>\n{messages}\n</transcript>"
    with summarising(upstream, tmp_path, {"prompt": prompt}) as url, client(url) as caller:
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    (request,) = upstream.summaries
    (message,) = request.body["messages"]
    assert message["content"].startswith("OUR-WORDS {not a field}\n<transcript>\n[user] Question 0:")


def test_only_the_newest_tokens_where_the_policy_says_so(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    with summarising(upstream, tmp_path, {"trim_tokens_to_summarize": 2_500}) as url, client(url) as caller:
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    (request,) = upstream.summaries
    assert request.tokens < 2_500 + 600
    assert "Question 0:" not in asked(upstream)
    assert "Question 0:" in sent(upstream), "the user's own words stay"


def routed(main: str, other: str, key: str | None, window: int) -> dict[str, Any]:
    """Settings with a summary model at an upstream of its own."""
    upstream = {"base_url": f"{other}/v1", **({"api_key": key} if key else {})}
    profile = {**PROFILE, "context_window": window}
    return {
        "upstreams": {"main": {"base_url": f"{main}/v1"}, "other": upstream},
        "models": [
            {"match": "summariser", "upstream": "other", "model": "small", "profile": profile},
            {"match": "*", "upstream": "main", "profile": PROFILE},
        ],
        "policies": {"default": {"summary": {"model": "summariser"}}},
    }


def test_a_small_summary_model_reads_in_parts(tmp_path: Path) -> None:
    main, other = StandIn(window=WINDOW), StandIn(window=4_000, max_output=2_000, summariser=numbered())
    with (
        serve(main.app) as url,
        serve(other.app) as small,
        proxied(routed(url, small, "sk-other", 4_000), tmp_path) as entrance,
        client(entrance) as caller,
    ):
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    assert main.summaries == []
    assert len(other.requests) >= 4
    assert {request.status for request in other.requests} == {200}
    assert max(request.tokens for request in other.requests) <= 4_000
    assert {request.body["model"] for request in other.requests} == {"small"}
    assert {request.headers["authorization"] for request in other.requests} == {"Bearer sk-other"}
    assert "notes on part 2" in json.dumps(other.requests[-1].body)
    assert "SUMMARY" in sent(main)


def test_a_summary_model_smaller_than_believed_still_summarises(tmp_path: Path) -> None:
    main, other = StandIn(window=WINDOW), StandIn(window=6_000, max_output=2_000, summariser=numbered())
    with (
        serve(main.app) as url,
        serve(other.app) as small,
        proxied(routed(url, small, "sk-other", WINDOW), tmp_path) as entrance,
        client(entrance) as caller,
    ):
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    assert [request.status for request in other.requests].count(400) <= 2
    assert "SUMMARY" in sent(main)


def test_the_callers_key_goes_nowhere_else(tmp_path: Path) -> None:
    main, other = StandIn(window=WINDOW), StandIn(window=WINDOW, summariser=numbered())
    with serve(main.app) as url, serve(other.app) as elsewhere:
        settings = routed(url, elsewhere, None, WINDOW)
        with proxied(settings, tmp_path) as entrance, client(entrance, "sk-callers-own") as caller:
            ask(caller, LONG)
    assert "sk-callers-own" in main.requests[0].headers["authorization"]
    assert len(other.requests) == 1
    assert "authorization" not in other.requests[0].headers
    assert "sk-callers-own" not in str(other.requests)


def test_prepared_in_the_background_nobody_waits(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content="Goal: SUMMARY-1.", delay=0.1))
    origins = []
    with summarising(upstream, tmp_path) as url, client(url) as caller:
        messages = chat(5, 1_000)[:-1]
        for number in range(24):
            messages = [*messages, {"role": "user", "content": f"Question {number}: " + words(300, f"n{number}x")}]
            headers = ask(caller, messages)
            if "x-compaction-summary" in headers:
                origins.append(headers["x-compaction-summary"])
            messages = [*messages, {"role": "assistant", "content": f"Answer {number}: " + words(300, f"m{number}x")}]
            until = time.monotonic() + 30
            while not all(summary.status for summary in upstream.summaries) and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.05)
    assert len(origins) >= 10
    assert origins[0] == "stored", "the turn that crossed the trigger did not wait"
    assert set(origins) == {"stored"}
    assert len(upstream.summaries) <= 4
