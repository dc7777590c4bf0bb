"""A summary model that fails in every way there is: the client's request goes through whole."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.dialects import counting as messages
from proxy.errors import ConfigurationError
from proxy.server.loopback import serve
from proxy.telemetry.metrics import REGISTRY
from proxy.tokens import text as encodings
from tests.kit.combinations import combined
from tests.kit.scripted import PROFILE, behind, chat, client, key_hash, proxied, words
from tests.kit.upstream import Reply, StandIn, ToolCall, faults

WINDOW = 16_000

LAST = "And what of ticket OPS-4711 now?"


def talk(seed: str) -> list[Any]:
    """A conversation over the trigger, with tool calls, its own words throughout."""
    messages = chat(7, 900)[:-1]
    messages[1]["content"] = f"{seed}: {messages[1]['content']}"
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a/b.py"}'}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "Found it. " + words(1_500, "found")})
    return [*messages, {"role": "assistant", "content": "It is in a/b.py."}, {"role": "user", "content": LAST}]


def summarising(upstream: StandIn, folder: Path, summary: Mapping[str, Any]) -> AbstractContextManager[str]:
    return behind(upstream, folder, policy={"summary": dict(summary)})


def ask(caller: openai.OpenAI, messages: list[Any]) -> Mapping[str, str]:
    answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages)
    content = answer.parse().choices[0].message.content
    assert content is not None
    assert "was received" in content
    return answer.headers


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("compaction_summaries_total", {"outcome": outcome}) or 0


def completion(message: Mapping[str, Any], **choice: Any) -> Reply:
    return Reply(error={"choices": [{"index": 0, "message": dict(message), "finish_reason": "stop", **choice}]})


BAD = "MODEL-WORDS-THAT-MUST-NOT-SHOW"
PAGE = f"<!doctype html><html><body>{BAD}</body></html>"
FAILURES = {
    "hangs": Reply(content=f"Goal: {BAD}.", delay=20),
    "500": Reply(status=500, error={"error": {"message": BAD, "type": "server_error"}}),
    "503 as text": Reply(status=503, error=BAD),
    "429": Reply(status=429, error={"error": {"message": BAD, "code": "rate_limit_exceeded"}}),
    "401": Reply(status=401, error={"error": {"message": BAD, "code": "invalid_api_key"}}),
    "connection cut": Reply(content=f"Goal: {BAD}.", break_after=0),
    "empty": Reply(content=""),
    "whitespace": Reply(content=" \n\t "),
    "reasoning in its field": completion({"content": None, "reasoning_content": BAD}),
    "reasoning in tags": Reply(content=f"<think>{BAD}</think>\n"),
    "reasoning in other tags": Reply(content=f"<seed:think>{BAD} in a/b.py"),
    "reasoning that never ends": Reply(content=f"<think>{BAD} and so on"),
    "reasoning as parts": completion({"content": [{"type": "thinking", "thinking": BAD}]}),
    "refusal in its field": completion({"content": None, "refusal": BAD}),
    "refusal": Reply(content=f"I can't help with {BAD}."),
    "a long refusal": Reply(
        content=f"I won't write notes on {BAD}." + " A plan or a list is something I could write." * 20
    ),
    "a refusal in Spanish": Reply(content=f"Prefiero no resumir este contenido, {BAD}."),
    "a refusal in Japanese": Reply(content=f"その内容を要約することはできません。{BAD}"),
    "a policy": Reply(content=f"Request blocked: {BAD}."),
    "no notes": Reply(content="No response requested."),
    "more of the conversation": Reply(content=f"Certainly:\n[assistant calls look] {{}}\n\n[tool result] {BAD}"),
    "blocked": Reply(content=f"Goal: {BAD}.", finish_reason="content_filter"),
    "tool call": Reply(tool_calls=(ToolCall("call_1", "look", json.dumps({"what": BAD})),)),
    "tool call with words": Reply(content=BAD, tool_calls=(ToolCall("call_1", "look", "{}"),)),
    "tool call as text": Reply(content=f'<tool_call>\n{{"name": "{BAD}", "arguments": {{}}}}\n</tool_call>'),
    "truncated JSON": Reply(error=f'{{"choices": [{{"message": {{"content": "{BAD}'),
    "HTML with 200": Reply(error=PAGE, headers={"content-type": "text/html"}),
    "HTML as the answer": Reply(content=PAGE),
    "an error in a 200": Reply(error={"error": {"message": BAD, "code": 500}}),
    "an error in a choice": completion({"content": BAD}, error={"code": 502, "message": BAD}),
    "an error as the answer": Reply(content=f"Error code: 429 - {{'error': {{'message': '{BAD}'}}}}"),
    "an error as JSON in the answer": Reply(content=json.dumps({"error": {"message": BAD}})),
    "longer than its source": Reply(content=f"Goal: {BAD}.\n" + words(14_000, "long")),
    "cut off": Reply(content=f"Goal: {BAD}.", finish_reason="length"),
    "no choices": Reply(error={"choices": []}),
}


@pytest.mark.parametrize("name", combined(2, FAILURES))
def test_the_request_goes_through(name: str, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, max_output=15_000, summariser=lambda body: FAILURES[name])
    failed, digests = counted("failed"), counted("digest")
    messages = talk("Whatever fails")
    summary = {"timeout": 1, "fallback_model": "second-best"}
    with summarising(upstream, tmp_path, summary) as url, client(url) as caller:
        headers = ask(caller, messages)
    assert (headers["x-compaction"], headers["x-compaction-summary"]) == ("compacted", "digest")
    continued = [request for request in upstream.summaries if b"<write_notes>" in request.raw]
    assert len(continued) == (name == "401"), "a refusal may be about the form of the call"
    calls = [request for request in upstream.summaries if request not in continued]
    assert [request.body["model"] for request in calls] == ["m", "second-best"], "each is tried once"
    # The last call goes on after the request has its digest.
    expected = 1 if name == "hangs" else 2 + len(continued)
    assert (counted("failed") - failed, counted("digest") - digests) == (expected, 1)
    (sent,) = upstream.conversations
    assert faults(sent.body) == []
    assert sent.tokens <= WINDOW - 512
    assert sent.body["messages"][0] == messages[0]
    assert sent.body["messages"][-1] == messages[-1]
    text = sent.raw.decode()
    assert BAD not in text
    assert "Whatever fails: Question 0" in text, "the user's own words stay"
    assert "from the messages without a model" in text
    answers = [message["content"] for message in messages if message["role"] == "assistant" and message["content"]]
    gone = [answer for answer in answers if answer not in str(sent.body["messages"])]
    assert gone[-1][:60] in " ".join(text.split()), "a digest says what happened"
    for request in calls:
        assert set(request.body) == {"model", "messages", "stream", "max_tokens"}
        assert request.body["stream"] is False


def test_a_summary_model_that_cannot_be_used_costs_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the model's tokenizer: no client gets status 500."""
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content="Goal: SUMMARY-1."))
    real = messages.check

    def unusable(*given: Any, **named: Any) -> Any:
        if "cl100k_base" in given:
            raise ConfigurationError("a part of the installation is gone")
        return real(*given, **named)

    monkeypatch.setattr(messages, "check", unusable)
    monkeypatch.setattr(encodings, "_loaded", {})
    with serve(upstream.app) as url:
        main = {"base_url": f"{url}/v1"}
        settings = {
            "upstreams": {"main": main, "odd": main},
            "models": [
                {"match": "small", "upstream": "odd", "profile": {**PROFILE, "tokenizer": "cl100k_base"}},
                {"match": "*", "upstream": "main", "profile": PROFILE},
            ],
            "policies": {
                "default": {"summary": {"model": "small"}},
                "second": {"summary": {"model": "small", "fallback_model": "m"}},
            },
            "teams": {"a": {"keys": [{"hash": key_hash("sk-second")}], "policy": "second"}},
        }
        with proxied(settings, tmp_path) as entrance, client(entrance) as caller, client(entrance, "sk-second") as team:
            headers = ask(caller, talk("Nobody can be asked"))
            assert (headers["x-compaction"], headers["x-compaction-summary"]) == ("compacted", "digest")
            assert ask(team, talk("The other one can"))["x-compaction-summary"] == "made"


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "look", "parameters": {}}}]])
def test_a_damaged_tokenizer_leaves_a_request_unchanged(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the proxy counts before it plans, because it may add its own tool."""
    (tmp_path / encodings.FILES["o200k_base"].name).write_bytes(b"damaged")
    monkeypatch.setattr(encodings, "tokenizers", lambda: tmp_path)
    monkeypatch.setattr(encodings, "_loaded", {})
    upstream = StandIn(window=200_000)
    raw = json.dumps(
        {"model": "m", "messages": talk("Nothing is counted"), **({"tools": tools} if tools else {})}
    ).encode()
    with behind(upstream, tmp_path, policy={"recall": {"tool": "auto"}}) as url:
        answer = httpx.post(
            f"{url}/v1/chat/completions", content=raw, headers={"authorization": "Bearer k"}, trust_env=False
        )
    assert (answer.status_code, answer.headers["x-compaction"]) == (200, "failed")
    assert [request.raw for request in upstream.requests] == [raw]


def failing_first(body: dict[str, Any]) -> Reply:
    return Reply(content="Goal: SUMMARY-2.") if body["model"] == "second-best" else FAILURES["500"]


def test_a_model_that_fails_three_times_is_not_asked_a_fourth(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=failing_first)
    skipped = counted("skipped")
    with (
        summarising(upstream, tmp_path, {"fallback_model": "second-best"}) as url,
        client(url, "sk-first") as caller,
        client(url, "sk-other") as other,
    ):
        for number in range(5):
            assert ask(caller, talk(f"Conversation {number}"))["x-compaction-summary"] == "made"
        assert [request.body["model"] for request in upstream.summaries] == ["m", "second-best"] * 3 + [
            "second-best"
        ] * 2
        assert ask(other, talk("Of somebody else"))["x-compaction-summary"] == "made"
        assert [request.body["model"] for request in upstream.summaries][-2:] == ["m", "second-best"]
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert counted("skipped") - skipped == 2
    assert 'compaction_summaries_breaker_total{change="opened"}' in metrics
