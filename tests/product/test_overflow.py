"""An upstream refuses a prompt as too long, seen from the official client."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit.overflow_wordings import CARRIED, WORDINGS, Worded
from tests.kit.scripted import behind, chat, client
from tests.kit.upstream import Agent, Received, Reply, StandIn, decide, gather, summarise

BELIEVED = {"context_window": 64_000, "tokenizer": "o200k_base"}
TURNS = 60
MOST_REFUSED = 2


@contextlib.contextmanager
def overbelieved(
    upstream: StandIn,
    folder: Path,
    *,
    wording: str = "openai",
    profile: Mapping[str, Any] | None = BELIEVED,
    policy: Mapping[str, Any] | None = None,
) -> Iterator[openai.OpenAI]:
    """A client of a proxy that takes its upstream's window for larger than it is, or does not know it."""
    app = Worded(upstream.app, {**WORDINGS, **CARRIED}[wording])
    with behind(app, folder, profile=profile, policy=policy) as url, client(url) as caller:
        yield caller


def each_retry_is_smaller(requests: list[Received]) -> bool:
    """Whether what follows on a refusal is smaller than what was refused."""
    pairs = itertools.pairwise(requests)
    return all(after.tokens < before.tokens for before, after in pairs if before.status != 200)


@pytest.mark.parametrize("wording", ["openai", "gemini", "llama.cpp without figures"])
def test_the_limit_of_an_unknown_model_is_learned(wording: str, tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, max_output=2_000, responder=decide)
    with overbelieved(upstream, tmp_path, wording=wording, profile=None) as caller:
        session = Agent(caller, "some-model").run(TURNS, lambda: None)
    assert (session.error, session.turns, upstream.faults) == (None, TURNS, [])
    refused = [request for request in upstream.requests if request.status != 200]
    assert 1 <= len(refused) <= MOST_REFUSED
    assert sum(int(headers["x-compaction-retries"]) for headers in session.headers) == len(refused)
    assert each_retry_is_smaller(upstream.conversations)
    assert len(upstream.summaries) <= TURNS * 2 // 3


@pytest.mark.parametrize("wording", CARRIED)
def test_a_refusal_is_never_seen(wording: str, tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    messages = chat(8, 700)
    with overbelieved(upstream, tmp_path, wording=wording) as caller:
        whole = caller.chat.completions.with_raw_response.create(model="whole", messages=messages)
        streamed = caller.chat.completions.with_raw_response.create(model="streamed", messages=messages, stream=True)
        said = [whole.parse().choices[0].message.content, gather(streamed.parse())["content"]]
    assert all("was received" in words for words in said)
    assert [answer.headers["x-compaction-retries"] for answer in (whole, streamed)] == ["1", "1"]
    assert [answer.status_code for answer in (whole, streamed)] == [200, 200]
    assert [request.status for request in upstream.conversations] == [400, 200, 400, 200]


def test_an_upstream_that_refuses_everything_is_asked_three_times(tmp_path: Path) -> None:
    refusal = Reply(status=400, error={"error": {"message": "Prompt is too long.", "type": "invalid_request_error"}})
    answers = [refusal] * 12
    upstream = StandIn(window=64_000, responder=lambda body: answers.pop() if answers else Reply(content="Well again."))
    with overbelieved(upstream, tmp_path) as caller:
        for asked in range(4):
            with pytest.raises(openai.BadRequestError, match="Prompt is too long"):
                caller.chat.completions.create(model="m", messages=chat(8, 700))
            assert len(upstream.conversations) <= 3 * (asked + 1)
        answers.clear()
        caller.chat.completions.create(model="m", messages=chat(8, 700))
    assert upstream.conversations[-1].body["messages"] == chat(8, 700), "guesses that did not help are not kept"


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_retry_waits_for_no_model(stream: bool, tmp_path: Path) -> None:
    go = threading.Event()

    def held(body: dict[str, Any]) -> Reply:
        return Reply(content=summarise(body).content, go=go)

    upstream = StandIn(window=8_000, summariser=held)
    asked = 0
    messages = chat(8, 700)
    with overbelieved(upstream, tmp_path) as caller:
        caller.chat.completions.create(model="m", messages=messages[:1])  # the tables are read once, before that
        answer: Any = caller.chat.completions.with_raw_response.create(model="m", messages=messages, stream=stream)
        assert not any(summary.status for summary in upstream.summaries), "none could be waited for"
        assert answer.headers["x-compaction"] == "compacted"
        assert answer.headers["x-compaction-retries"] == "1"
        assert answer.headers["x-compaction-summary"] == "digest"
        said = gather(answer.parse())["content"] if stream else answer.parse().choices[0].message.content
        assert "was received" in said
        go.set()
        while asked < 100 and answer.headers["x-compaction-summary"] != "stored":
            time.sleep(0.05)
            answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages)
            assert answer.headers["x-compaction-retries"] == "0"
            asked += 1
        assert answer.headers["x-compaction-summary"] == "stored", "the summary was made in the background"
    assert [request.status for request in upstream.conversations] == [200, 400, 200] + [200] * asked


@pytest.mark.parametrize("wording", ["openai", "openrouter", "vllm"])
def test_room_for_the_output_that_was_asked_for(wording: str, tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, max_output=16_000)
    with overbelieved(upstream, tmp_path, wording=wording, policy={"output": "keep"}) as caller:
        answer = caller.chat.completions.with_raw_response.create(model="m", messages=chat(8, 600), max_tokens=8_000)
        again = caller.chat.completions.with_raw_response.create(model="m", messages=chat(8, 600), max_tokens=8_000)
    assert answer.headers["x-compaction"] == "compacted"
    assert again.headers["x-compaction-retries"] == "0"
    assert upstream.conversations[0].status == 400
    assert upstream.conversations[0].tokens < 15_000, "the prompt alone would have fitted"
    assert upstream.conversations[-1].tokens + 8_000 <= 16_000
    assert upstream.conversations[-1].body["max_tokens"] == 8_000, "what was asked for is asked for"


@pytest.mark.parametrize("wording", ["openai", "openrouter", "vllm"])
def test_the_output_is_lowered_into_the_window_that_a_refusal_names(wording: str, tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, max_output=16_000)
    with overbelieved(upstream, tmp_path, wording=wording) as caller:
        answers = [
            caller.chat.completions.with_raw_response.create(model="m", messages=chat(8, 600), max_tokens=8_000)
            for _ in range(2)
        ]
    assert [answer.headers["x-compaction-retries"] for answer in answers] == ["1", "0"]
    assert [answer.headers["x-compaction-output"] for answer in answers] == ["clamped"] * 2
    assert [answer.headers["x-compaction"] for answer in answers] == ["none"] * 2
    assert [received.status for received in upstream.requests] == [400, 200, 200]
    assert 4_000 < upstream.conversations[-1].body["max_tokens"] < 8_000


@pytest.mark.parametrize("output", [9_000, 7_500])
def test_too_much_output_for_any_prompt_is_refused_in_the_upstreams_words(output: int, tmp_path: Path) -> None:
    upstream = StandIn(window=8_000, max_output=32_000)
    keep = {"output": "keep"}
    with overbelieved(upstream, tmp_path, policy=keep) as caller, pytest.raises(openai.BadRequestError) as refused:
        caller.chat.completions.create(model="m", messages=chat(2, 200), max_tokens=output)
    assert len(upstream.conversations) == 1
    assert upstream.summaries == []
    assert f"{output} in the completion" in refused.value.message
    assert "Shorten the output asked for (max_tokens)" in refused.value.message
    assert refused.value.code == "context_length_exceeded"


def test_in_shadow_a_refusal_is_the_upstreams_own(tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    shadow = {"mode": "shadow"}
    with overbelieved(upstream, tmp_path, policy=shadow) as caller, pytest.raises(openai.BadRequestError) as refused:
        caller.chat.completions.create(model="m", messages=chat(8, 700))
    assert len(upstream.requests) == 1
    assert "compaction proxy" not in refused.value.message
    assert refused.value.response.headers["x-compaction"] == "shadow"
