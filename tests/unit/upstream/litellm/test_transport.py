"""Translate requests for local servers with Anthropic's and Gemini's formats."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.upstream.litellm.library import api_base
from proxy.upstream.litellm.transport import LiteLLMTransport
from tests.kit.anthropic_server import Script
from tests.kit.translation import PROVIDERS, Result, Standin, drain, exchange, outgoing, send

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITIES = ("Oslo", "Rome")
CALLS: dict[str, list[dict[str, Any]]] = {
    "anthropic": [
        {"type": "tool_use", "id": f"toolu_{city}", "name": "weather", "input": {"city": city}} for city in CITIES
    ],
    "gemini": [{"functionCall": {"name": "weather", "args": {"city": city}}} for city in CITIES],
}


def test_text(either: tuple[str, Standin]) -> None:
    provider, server = either
    result = send(provider, server, {"temperature": 0.5, "max_tokens": 100, "seed": 7, "user": "u"})
    assert result.status == 200
    assert result.headers["content-type"] == "application/json"
    answer = result.json
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello there"}}
    ]
    assert answer["usage"]["prompt_tokens"] == (21 if provider == "anthropic" else 31)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_and_their_results(either: tuple[str, Standin], stream: bool) -> None:
    provider, server = either
    server.script = Script(blocks=CALLS[provider])
    result = send(provider, server, {"tools": [WEATHER], "stream": stream})
    assert result.status == 200
    calls, finish = streamed_calls(result) if stream else whole_calls(result)
    assert finish == "tool_calls"
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": city} for city in CITIES]
    assert len({call["id"] for call in calls}) == 2

    # The same conversation one turn later. The local server checks that results belong to calls.
    server.script = Script() if provider == "anthropic" else Script(blocks=[{"text": "Hello there"}])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": f"{n} degrees"} for n, call in enumerate(calls)),
        {"role": "user", "content": "And?"},
    ]
    result = send(provider, server, {"messages": messages, "tools": [WEATHER]})
    assert (result.status, result.json["choices"][0]["message"]["content"]) == (200, "Hello there")
    assert "1 degrees" in json.dumps(server.requests[-1].body)
    # A summary request has no tools, but the provider must still accept a history with calls.
    assert send(provider, server, {"messages": messages}).status == 200


def whole_calls(result: Result) -> tuple[list[dict[str, Any]], str]:
    choice = result.json["choices"][0]
    assert choice["message"]["content"] is None
    for call in choice["message"]["tool_calls"]:
        assert set(call) == {"id", "type", "function"}
    return choice["message"]["tool_calls"], choice["finish_reason"]


def streamed_calls(result: Result) -> tuple[list[dict[str, Any]], str]:
    calls: dict[int, dict[str, Any]] = {}
    finish = ""
    for chunk in result.chunks:
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
            for delta in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(delta["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = delta.get("id") or call["id"]
                call["function"]["name"] += delta["function"].get("name") or ""
                call["function"]["arguments"] += delta["function"].get("arguments") or ""
    return [calls[index] for index in sorted(calls)], finish


def test_streamed_text(either: tuple[str, Standin]) -> None:
    provider, server = either
    result = send(provider, server, {"stream": True, "stream_options": {"include_usage": True}})
    assert result.status == 200
    assert result.headers["content-type"].startswith("text/event-stream")
    chunks = result.chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hello there"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == (21 if provider == "anthropic" else 31)
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_streamed_text_without_usage(either: tuple[str, Standin]) -> None:
    provider, server = either
    chunks = send(provider, server, {"stream": True}).chunks
    assert chunks
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("provider", "base_url", "expected"),
    [
        ("anthropic", None, None),
        ("anthropic", "https://host", "https://host"),
        ("anthropic", "https://host/", "https://host"),
        ("anthropic", "https://host/v1", "https://host"),
        ("anthropic", "https://host/v1/messages", "https://host"),
        ("anthropic", "https://host/path/v1/", "https://host/path"),
        ("gemini", "https://host", "https://host/v1beta"),
        ("gemini", "https://host/v1beta", "https://host/v1beta"),
        ("gemini", "https://host/v1/", "https://host/v1"),
        ("gemini", "https://host/google", "https://host/google/v1beta"),
        ("cohere", "https://host/v2/chat", "https://host/v2/chat"),
    ],
)
def test_base_urls(provider: str, base_url: str | None, expected: str | None) -> None:
    assert api_base(provider, base_url) == expected


@pytest.mark.parametrize(("provider", "end"), [("anthropic", "/v1"), ("anthropic", "/"), ("gemini", "/v1beta")])
def test_a_base_url_with_a_version(provider: str, end: str) -> None:
    with PROVIDERS[provider]() as server:
        transport = LiteLLMTransport(provider, server.url + end, server.key, {})
        assert asyncio.run(exchange(transport, outgoing({}))).status == 200


def test_requests_at_the_same_time(either: tuple[str, Standin]) -> None:
    provider, server = either

    async def scenario() -> list[int]:
        transport = LiteLLMTransport(provider, server.url, server.key, {})

        async def one(stream: bool) -> int:
            answer = await transport.send(outgoing({"stream": stream}))
            await drain(answer.body)
            return answer.status

        try:
            return await asyncio.gather(*(one(n % 2 == 0) for n in range(12)))
        finally:
            await transport.aclose()

    assert asyncio.run(scenario()) == [200] * 12
