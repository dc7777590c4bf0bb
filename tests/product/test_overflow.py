"""What happens when an upstream refuses a prompt as too long, seen from the official client."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.demo.agent import Agent, gather
from proxy.demo.replies import Responder
from proxy.demo.script import decide
from proxy.demo.serving import serve
from proxy.demo.summariser import summarise
from proxy.demo.upstream import Received, Reply, StandIn
from tests.kit.overflow_wordings import CARRIED, WORDINGS, Worded
from tests.kit.scripted import chat, client, proxied, words

BELIEVED = {"context_window": 64_000, "tokenizer": "o200k_base"}
TURNS = 60
MOST_REFUSED = 2

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


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
    with serve(Worded(upstream.app, {**WORDINGS, **CARRIED}[wording])) as url:
        route = {"match": "*", "upstream": "main", **({"profile": dict(profile)} if profile else {})}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [route],
            "policies": {"default": dict(policy or {})},
        }
        with proxied(settings, folder) as entrance, client(entrance) as caller:
            yield caller


def each_retry_is_smaller(requests: list[Received]) -> bool:
    """Whether what follows on a refusal is smaller than what was refused."""
    pairs = itertools.pairwise(requests)
    return all(after.tokens < before.tokens for before, after in pairs if before.status != 200)


def tool_chat(result: str) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Look, please."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]


SESSIONS = [
    *((wording, 8_000) for wording in ("azure", "anthropic", "vllm", "llama.cpp without figures", "openrouter events")),
    *((wording, 16_000) for wording in ("openai", "gemini", "llama.cpp without figures")),
]


@pytest.mark.parametrize(("wording", "window"), SESSIONS)
def test_a_session_goes_on_and_the_limit_is_learned(wording: str, window: int, tmp_path: Path) -> None:
    upstream = StandIn(window=window, max_output=window // 8, responder=decide)
    profile = BELIEVED if window == 8_000 else None
    with overbelieved(upstream, tmp_path, wording=wording, profile=profile) as caller:
        session = Agent(caller, "some-model").run(TURNS, lambda: None)
    assert session.error is None
    assert session.turns == TURNS
    refused = [request for request in upstream.requests if request.status != 200]
    assert 1 <= len(refused) <= MOST_REFUSED
    assert {headers["x-compaction-retries"] for headers in session.headers} <= {"0", "1", "2"}
    assert sum(int(headers["x-compaction-retries"]) for headers in session.headers) == len(refused)
    assert each_retry_is_smaller(upstream.conversations)
    assert upstream.faults == []
    # Whoever has a third of a window more to say has one more summary to pay for, not one a turn.
    assert len(upstream.summaries) <= TURNS * 2 // 3


@pytest.mark.parametrize("wording", [*WORDINGS, *CARRIED])
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wording", ["openai", "gemini", "anthropic", "llama.cpp events", "openrouter 200"])
@pytest.mark.parametrize(("part", "named"), [("system", "system messages"), ("tools", "tools and framing")])
def test_what_cannot_fit_is_named(part: str, named: str, wording: str, stream: bool, tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    huge = words(24_000)
    messages: list[Any] = [{"role": "system", "content": huge if part == "system" else "Be brief."}]
    messages += chat(3, 200)[1:]
    tools = [{**TOOL, "function": {**TOOL["function"], "description": huge}}] if part == "tools" else [TOOL]
    with overbelieved(upstream, tmp_path, wording=wording) as caller:
        url = f"{caller.base_url}chat/completions"
        body = {"model": "m", "messages": messages, "tools": tools, "stream": stream}
        with httpx.Client(trust_env=False, timeout=30) as http:
            answer = http.post(url, json=body, headers={"authorization": "Bearer k"})
    assert len(upstream.conversations) <= 3
    assert upstream.summaries == [], "no summary could have helped"
    said = WORDINGS[wording]
    as_events = said.only_streams and stream
    assert answer.status_code == (400 if said.only_streams and not stream else said.status)
    text = answer.text.removeprefix("data: ") if as_events else answer.text
    value = json.loads(text)
    error = (value[0] if isinstance(value, list) else value)["error"]
    assert error["message"].count("The compaction proxy") == 1
    assert f"Shorten the {named}" in error["message"]
    assert "8000" in error["message"]
    assert error.get("type", "invalid_request_error") in ("invalid_request_error", "exceed_context_size_error")
    assert error.get("code", 400) in (400, "context_length_exceeded")


def test_a_tool_result_of_three_windows_fits(tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    with overbelieved(upstream, tmp_path) as caller:
        messages: Any = tool_chat("\n".join(f"line {n} " + words(20, f"r{n}") for n in range(1_000)))
        answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages, tools=[TOOL])
    assert upstream.conversations[-1].status == 200
    assert len(upstream.conversations) <= 3
    assert each_retry_is_smaller(upstream.conversations)
    assert "from tool" in (answer.parse().choices[0].message.content or "")
    assert upstream.faults == []


def test_a_last_user_message_of_three_windows_fits_where_the_policy_allows(tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    with overbelieved(upstream, tmp_path, policy={"shorten_last_user_message": True}) as caller:
        answer = caller.chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "START " + words(24_000) + " END"}]
        )
    assert answer.headers["x-compaction-steps"] == "fit"
    sent = upstream.conversations[-1].body["messages"][-1]["content"]
    assert sent.startswith("START")
    assert sent.endswith("END")
    assert [request.status for request in upstream.conversations] == [400, 200]


def test_a_last_user_message_of_three_windows_is_refused_in_the_upstreams_words(tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    with overbelieved(upstream, tmp_path) as caller, pytest.raises(openai.BadRequestError) as refused:
        caller.chat.completions.create(model="m", messages=[{"role": "user", "content": words(24_000)}])
    assert len(upstream.conversations) <= 3
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"
    assert "maximum context length is 8000 tokens" in refused.value.message
    assert "Shorten the last user message" in refused.value.message


ELSE = {
    "rate": (
        429,
        {
            "message": "Rate limit reached for tokens per min (TPM): Limit 30000, Used 29000, Requested 4000.",
            "type": "tokens",
            "param": None,
            "code": "rate_limit_exceeded",
        },
    ),
    "quota": (
        429,
        {
            "message": "You exceeded your current quota, please check your plan and billing details.",
            "type": "insufficient_quota",
            "param": None,
            "code": "insufficient_quota",
        },
    ),
    "output cap": (
        400,
        {
            "message": "max_tokens is too large: 9000. This model supports at most 4096 completion tokens, "
            "whereas you provided 9000.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": None,
        },
    ),
    "server": (
        500,
        {
            "message": "The server had an error while processing your request.",
            "type": "server_error",
            "param": None,
            "code": None,
        },
    ),
    "overloaded": (
        503,
        {
            "message": "The engine is currently overloaded, please try again later",
            "type": "server_error",
            "param": None,
            "code": None,
        },
    ),
    "user text quoted": (
        400,
        {
            "message": "Invalid 'messages[1].content': \"maximum context length is 8000 tokens\" is not allowed here.",
            "type": "invalid_request_error",
            "param": "messages[1].content",
            "code": "invalid_value",
        },
    ),
}


TOO_LARGE_A_MINUTE: tuple[int, dict[str, Any]] = (
    429,
    {
        "message": "Request too large for m on tokens per min (TPM): Limit 1000, Requested 9000. "
        "The input or output tokens must be reduced in order to run successfully.",
        "type": "tokens",
        "param": None,
        "code": "rate_limit_exceeded",
    },
)
"""Waiting never helps here, because one request exceeds the limit."""

UNTOUCHED = [
    *(pytest.param(error, {}, id=name) for name, error in ELSE.items()),
    pytest.param(TOO_LARGE_A_MINUTE, {"rate_limit_as_limit": False}, id="too many tokens a minute"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refused", "policy"), UNTOUCHED)
def test_other_errors_pass_untouched(
    refused: tuple[int, dict[str, Any]], policy: Mapping[str, Any], stream: bool, tmp_path: Path
) -> None:
    status, error = refused
    text = json.dumps({"error": error}, indent=2)
    refusal = Reply(status=status, error=text, headers={"retry-after": "7"})
    upstream = StandIn(window=64_000, responder=always(refusal))
    with overbelieved(upstream, tmp_path, policy=policy) as caller:
        url = f"{caller.base_url}chat/completions"
        body = {"model": "m", "messages": chat(3, 200), "stream": stream}
        with httpx.Client(trust_env=False, timeout=30) as http:
            answer = http.post(url, json=body, headers={"authorization": "Bearer k"})
    assert answer.status_code == status
    assert answer.text == text
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["x-compaction"] == "none"
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_exceeds_its_tokens_a_minute_is_sent_smaller(stream: bool, tmp_path: Path) -> None:
    status, error = TOO_LARGE_A_MINUTE
    replies = [Reply(status=status, error={"error": error})]
    upstream = StandIn(window=64_000, responder=lambda body: replies.pop() if replies else Reply(content="Well again."))
    with overbelieved(upstream, tmp_path) as caller:
        answer: Any = caller.chat.completions.with_raw_response.create(model="m", messages=chat(3, 300), stream=stream)
        said = gather(answer.parse())["content"] if stream else answer.parse().choices[0].message.content
    assert (said, answer.headers["x-compaction-retries"]) == ("Well again.", "1")
    refused, taken = upstream.conversations
    assert refused.tokens > 1_000 >= taken.tokens


def always(reply: Reply) -> Responder:
    return lambda body: reply


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
