"""The translate lane against local servers that speak Anthropic's and Gemini's formats."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic_server import AnthropicServer, LocalServer, Script
from gemini_server import GeminiServer
from starlette.responses import JSONResponse

from proxy.errors import ProxyError, UpstreamInterrupted, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.lane import Outgoing
from proxy.upstream.overflow import recognise
from proxy.upstream.translate import TranslateLane
from proxy.upstream.translate_request import PARAMETERS, api_base

Standin = AnthropicServer | GeminiServer
PROVIDERS = {"anthropic": AnthropicServer, "gemini": GeminiServer}


@pytest.fixture
def anthropic() -> Iterator[AnthropicServer]:
    with AnthropicServer() as server:
        yield server


@pytest.fixture
def gemini() -> Iterator[GeminiServer]:
    with GeminiServer() as server:
        yield server


@pytest.fixture(params=PROVIDERS)
def either(request: pytest.FixtureRequest) -> Iterator[tuple[str, Standin]]:
    server: Standin
    with PROVIDERS[request.param]() as server:
        yield request.param, server


@dataclass(frozen=True)
class Result:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def chunks(self) -> list[Any]:
        events = self.content.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


HELLO = [{"role": "user", "content": "Hello"}]


def outgoing(body: dict[str, Any] | bytes, **fields: Any) -> Outgoing:
    raw = body if isinstance(body, bytes) else json.dumps({"model": "m-1", "messages": HELLO} | body).encode()
    stream = isinstance(body, dict) and body.get("stream", False)
    defaults: dict[str, Any] = {"model": "m-1", "headers": [], "credential": None, "timeout": 20.0}
    return Outgoing(body=raw, stream=stream, **(defaults | fields))


async def exchange(lane: TranslateLane, request: Outgoing) -> Result:
    try:
        answer = await lane.send(request)
        content = b"".join([part async for part in answer.body])
        await answer.close()
        await answer.close()
        return Result(answer.status, dict(answer.headers), content)
    finally:
        await lane.aclose()


def send(provider: str, server: Standin, body: dict[str, Any] | bytes, **fields: Any) -> Result:
    lane = TranslateLane(provider, server.url, server.key, {})
    return asyncio.run(exchange(lane, outgoing(body, **fields)))


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

    # The same conversation, one turn on: the stand-in checks that results belong to calls.
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
    # A summary is asked for without the tools: the history with calls must pass all the same.
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


# One row: what the provider answers, and the status, type and code that the client sees.
ERRORS: list[tuple[str, tuple[int, str, str], tuple[int, str, str | None]]] = [
    ("anthropic", (400, "invalid_request_error", "messages: wrong"), (400, "invalid_request_error", None)),
    ("anthropic", (401, "authentication_error", "invalid x-api-key"), (401, "authentication_error", None)),
    ("anthropic", (403, "permission_error", "not for you"), (403, "permission_error", None)),
    ("anthropic", (404, "not_found_error", "model: m-1"), (404, "invalid_request_error", None)),
    ("anthropic", (429, "rate_limit_error", "slow down"), (429, "rate_limit_error", None)),
    ("anthropic", (500, "api_error", "Internal server error"), (500, "server_error", None)),
    ("anthropic", (529, "overloaded_error", "Overloaded"), (529, "server_error", None)),
    ("gemini", (400, "INVALID_ARGUMENT", "contents: wrong"), (400, "invalid_request_error", None)),
    ("gemini", (429, "RESOURCE_EXHAUSTED", "slow down"), (429, "rate_limit_error", None)),
    ("gemini", (500, "INTERNAL", "An internal error"), (500, "server_error", None)),
    ("gemini", (503, "UNAVAILABLE", "The model is overloaded."), (503, "server_error", None)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("provider", "said", "seen"), ERRORS)
def test_errors(provider: str, said: tuple[int, str, str], seen: tuple[int, str, str | None], stream: bool) -> None:
    with PROVIDERS[provider]() as server:
        server.script.error = said
        server.script.headers = {"retry-after": "7", "request-id": "req_9", "x-secret": "no"}
        result = send(provider, server, {"stream": stream})
        assert len(server.requests) == 1  # no attempt of LiteLLM's own
    error = result.json["error"]
    assert (result.status, error["type"]) == seen[:2]
    assert error["message"] == said[2]
    assert error["param"] is None
    assert result.headers == {"content-type": "application/json", "retry-after": "7", "x-request-id": "req_9"}
    assert recognise(result.status, result.content) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("provider", "kind", "message", "limit", "counted"),
    [
        ("anthropic", "invalid_request_error", "prompt is too long: 209353 tokens > 199999 maximum", 199999, 209353),
        (
            "gemini",
            "INVALID_ARGUMENT",
            "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
            1048576,
            1200000,
        ),
    ],
)
def test_overflow_is_recognised(provider: str, kind: str, message: str, limit: int, counted: int, stream: bool) -> None:
    with PROVIDERS[provider]() as server:
        server.script.error = (400, kind, message)
        result = send(provider, server, {"stream": stream})
    assert result.status == 400
    assert result.json["error"]["code"] == "context_length_exceeded"
    assert result.json["error"]["message"] == message
    read = recognise(result.status, result.content)
    assert read is not None
    assert (read.limit, read.counted) == (limit, counted)


def test_overflow_as_the_first_event_of_a_stream(anthropic: AnthropicServer) -> None:
    message = "prompt is too long: 209353 tokens > 199999 maximum"
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    anthropic.script.raw = b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
    anthropic.script.headers = {"content-type": "text/event-stream"}
    result = send("anthropic", anthropic, {"stream": True})
    assert result.status == 400
    read = recognise(result.status, result.content)
    assert read is not None
    assert (read.limit, read.counted) == (199999, 209353)


@pytest.mark.parametrize("cut", ["event", "connection", "end"])
def test_a_stream_that_breaks(anthropic: AnthropicServer, cut: str) -> None:
    anthropic.script.cut = cut
    parts: list[bytes] = []

    async def scenario() -> None:
        lane = TranslateLane("anthropic", anthropic.url, anthropic.key, {})
        answer = await lane.send(outgoing({"stream": True}))
        assert answer.status == 200
        try:
            async for part in answer.body:
                parts.append(part)  # noqa: PERF401 - kept when the stream breaks
        finally:
            await lane.aclose()

    with pytest.raises(UpstreamInterrupted) as raised:
        asyncio.run(scenario())
    assert b"Hello" in b"".join(parts)
    assert b"[DONE]" not in b"".join(parts)
    assert "127.0.0.1" not in raised.value.message


def test_a_stream_of_gemini_that_ends_without_an_end(gemini: GeminiServer) -> None:
    gemini.script.cut = "end"
    with pytest.raises(UpstreamInterrupted):
        send("gemini", gemini, {"stream": True})


def test_an_answer_that_is_not_the_providers(anthropic: AnthropicServer) -> None:
    anthropic.script.raw = b"<html>a gateway's page at 127.0.0.1</html>"
    result = send("anthropic", anthropic, {})
    assert (result.status, result.json["error"]["code"]) == (502, "upstream_error")
    assert b"127.0.0.1" not in result.content
    with pytest.raises(UpstreamInterrupted):
        send("anthropic", anthropic, {"stream": True})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_nobody_listens(provider: str, stream: bool) -> None:
    with LocalServer() as server:
        url = server.url
    lane = TranslateLane(provider, url, "made-up-key", {})
    with pytest.raises(UpstreamUnreachable) as raised:
        asyncio.run(exchange(lane, outgoing({"stream": stream})))
    assert "127.0.0.1" not in raised.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_too_slow(stream: bool) -> None:
    with AnthropicServer() as warm:  # LiteLLM is imported outside of the measured time
        send("anthropic", warm, {})
    with WatchedServer() as server:
        with pytest.raises(UpstreamTimeout):
            send("anthropic", server, {"stream": stream}, timeout=0.5)
        assert server.disconnected.wait(5)


def test_close_ends_the_upstreams_request(anthropic: AnthropicServer) -> None:
    anthropic.script.cut = "hang"

    async def scenario() -> None:
        lane = TranslateLane("anthropic", anthropic.url, anthropic.key, {})
        answer = await lane.send(outgoing({"stream": True}))
        body = aiter(answer.body)
        assert b"Hello" in await anext(body)
        assert not anthropic.disconnected.is_set()
        await answer.close()
        await answer.close()
        assert await asyncio.to_thread(anthropic.disconnected.wait, 5)
        await lane.aclose()

    asyncio.run(scenario())


def test_closing_the_lane_ends_its_streams(anthropic: AnthropicServer) -> None:
    anthropic.script.cut = "hang"

    async def scenario() -> None:
        lane = TranslateLane("anthropic", anthropic.url, anthropic.key, {})
        answer = await lane.send(outgoing({"stream": True}))
        reader = asyncio.create_task(drain(answer.body))
        await asyncio.sleep(0.1)
        await lane.aclose()
        assert await asyncio.to_thread(anthropic.disconnected.wait, 5)
        with pytest.raises(UpstreamInterrupted):
            await reader

    asyncio.run(scenario())


async def drain(body: Any) -> None:
    async for _ in body:
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_ends_the_upstreams_request(stream: bool) -> None:
    async def scenario(server: WatchedServer) -> None:
        lane = TranslateLane("anthropic", server.url, server.key, {})
        task = asyncio.create_task(lane.send(outgoing({"stream": stream})))
        assert await asyncio.to_thread(server.arrived.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await lane.aclose()

    with WatchedServer() as server:
        asyncio.run(scenario(server))
        assert server.disconnected.wait(5)


class WatchedServer(AnthropicServer):
    """Never answers, and sees when the connection is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()

    async def _handle(self, request: Any) -> Any:
        await request.body()
        self.arrived.set()
        assert (await request.receive())["type"] == "http.disconnect"
        self.disconnected.set()
        return JSONResponse({})


def test_which_key(anthropic: AnthropicServer) -> None:
    def status(configured: str | None, callers: str | None) -> tuple[int, int]:
        lane = TranslateLane("anthropic", anthropic.url, configured, {})
        before = len(anthropic.requests)
        result = asyncio.run(exchange(lane, outgoing({}, credential=callers)))
        return result.status, len(anthropic.requests) - before

    assert status(anthropic.key, None) == (200, 1)
    assert status(anthropic.key, "the callers own") == (200, 1)
    assert status(None, anthropic.key) == (200, 1)
    assert status(None, None) == (401, 0)


def test_no_key_says_what_to_do(anthropic: AnthropicServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", anthropic.key)  # the operator's, and not for everybody
    lane = TranslateLane("anthropic", anthropic.url, None, {})
    result = asyncio.run(exchange(lane, outgoing({})))
    assert result.json["error"]["code"] == "invalid_api_key"
    assert "api_key" in result.json["error"]["message"]
    assert anthropic.requests == []


def test_headers(anthropic: AnthropicServer) -> None:
    lane = TranslateLane("anthropic", anthropic.url, anthropic.key, {"x-team": "search"})
    request = outgoing({}, headers=[("x-client", "secret"), ("openai-organization", "org")])
    asyncio.run(exchange(lane, request))
    sent = anthropic.requests[0].headers
    assert sent["x-team"] == "search"
    assert "x-client" not in sent
    assert "openai-organization" not in sent


def hostile(decoy: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "api_base": decoy,
        "base_url": decoy,
        "api_key": "stolen",
        "api_version": "hostile",
        "custom_llm_provider": "openai",
        "mock_response": "mocked",
        "mock_tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        "fallbacks": [{"model": "openai/gpt-4o", "api_base": decoy}],
        "context_window_fallback_dict": {"m-1": "openai/gpt-4o"},
        "model_list": [{"model_name": "m-1", "litellm_params": {"model": "openai/x", "api_base": decoy}}],
        "extra_headers": {"x-hostile": "1"},
        "headers": {"x-hostile": "1"},
        "callbacks": ["hostile"],
        "success_callback": ["hostile"],
        "num_retries": 5,
        "input_cost_per_token": 1,
        "vertex_project": "hostile",
        "use_litellm_proxy": True,
        "litellm_system_prompt": "hostile",
        "prompt_id": "hostile",
        "aws_bedrock_runtime_endpoint": decoy,
        "hostile_unknown": decoy,
    }
    return fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["top", "extra_body", "litellm_params", "metadata", "litellm_metadata", "message"])
def test_a_body_never_decides_where_it_goes(either: tuple[str, Standin], where: str, stream: bool) -> None:
    provider, server = either
    with LocalServer() as decoy:
        fields = hostile(decoy.url)
        if where == "top":
            body = fields
        elif where == "message":
            body = {"messages": [{"role": "user", "content": "Hello", **fields}]}
        else:
            body = {where: fields}
        result = send(provider, server, {**body, "stream": stream})
        assert decoy.requests == []
    assert result.status == 200
    assert b"mocked" not in result.content
    assert len(server.requests) == 1
    sent = json.dumps(server.requests[0].body) + json.dumps(server.requests[0].headers)
    assert "hostile" not in sent
    assert "stolen" not in sent
    assert decoy.url not in sent


def test_the_allowed_parameters_hold_no_way_out() -> None:
    names = hostile("").keys() | {
        "metadata",
        "extra_body",
        "timeout",
        "client",
        "cache",
        "caching",
        "model",
        "messages",
    }
    assert PARAMETERS.isdisjoint(names)


def test_a_redirect_is_not_followed(anthropic: AnthropicServer) -> None:
    class Redirecting(AnthropicServer):
        async def answer(self, received: Any) -> Any:
            self.script.headers = {"location": f"{anthropic.url}/v1/messages"}
            return self._error(307, "api_error", "moved")

    with Redirecting() as server:
        result = send("anthropic", server, {})
    assert result.status == 502
    assert anthropic.requests == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "{decoy}/a.png"}},
        {"type": "image_url", "image_url": "{decoy}/a.png"},
        {"type": "file", "file": {"file_id": "{decoy}/a.pdf", "format": "application/pdf"}},
        {"type": "file", "file": {"file_data": "{decoy}/a.pdf"}},
        {"type": "image", "source": {"type": "url", "url": "{decoy}/a.png"}},
        {"type": "image_url", "image_url": {"url": " ftp://x/a.png"}},
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_no_url_is_fetched_for_a_client(either: tuple[str, Standin], part: dict[str, Any], role: str) -> None:
    provider, server = either
    with LocalServer() as decoy:
        content = [json.loads(json.dumps(part).replace("{decoy}", decoy.url))]
        result = send(provider, server, {"messages": [{"role": role, "tool_call_id": "c", "content": content}]})
        assert decoy.requests == []
    assert (result.status, result.json["error"]["param"]) == (400, "messages[0].content")
    assert "data:" in result.json["error"]["message"]
    assert server.requests == []


def test_images_that_are_sent_along(either: tuple[str, Standin]) -> None:
    provider, server = either
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    content = [
        {"type": "text", "text": "https://example.org/ is an address in a text"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}},
    ]
    assert send(provider, server, {"messages": [{"role": "user", "content": content}]}).status == 200
    assert pixel in json.dumps(server.requests[0].body)


def test_an_https_image_is_anthropics_to_fetch(anthropic: AnthropicServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://nowhere.invalid/a.png"}}]
    assert send("anthropic", anthropic, {"messages": [{"role": "user", "content": content}]}).status == 200
    assert "https://nowhere.invalid/a.png" in json.dumps(anthropic.requests[0].body)


# One row: the body or the fields of the request, and the code and parameter of the refusal.
REFUSED: list[tuple[dict[str, Any] | bytes, str, str, str | None]] = [
    (b"not json", "m-1", "invalid_body", None),
    (b"[1]", "m-1", "invalid_body", None),
    (b"[" * 100_000, "m-1", "invalid_body", None),
    (b'{"messages": "hi"}', "m-1", "invalid_body", "messages"),
    (b'{"messages": ["hi"]}', "m-1", "invalid_body", "messages"),
    ({"tools": [{"type": "mcp", "server_url": "http://127.0.0.1:1"}]}, "m-1", "invalid_request_error", "tools"),
    ({}, "../../v1/files?x=", "model_not_found", "model"),
    ({}, "a//b", "model_not_found", "model"),
]


@pytest.mark.parametrize(("body", "model", "code", "param"), REFUSED)
def test_what_cannot_be_translated(
    anthropic: AnthropicServer, body: dict[str, Any] | bytes, model: str, code: str, param: str | None
) -> None:
    result = send("anthropic", anthropic, body, model=model)
    assert result.status in (400, 404)
    assert (result.json["error"]["code"], result.json["error"]["param"]) == (code, param)
    assert anthropic.requests == []


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": [{"type": "image_url"}]}],
        [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{bad"}}]}],
    ],
)
def test_what_litellm_cannot_translate(anthropic: AnthropicServer, messages: list[dict[str, Any]]) -> None:
    result = send("anthropic", anthropic, {"messages": messages})
    assert result.status == 400
    assert result.json["error"]["code"] == "untranslatable_request"
    assert b"Traceback" not in result.content
    assert b"litellm" not in result.content.lower()


def test_a_body_that_strict_parsers_refuse(anthropic: AnthropicServer) -> None:
    body = b'{"model": "m-1", "temperature": 0.5, "messages": [{"role": "user", "content": "x\\ud800y"}], "x": NaN}'
    assert send("anthropic", anthropic, body).status == 200
    assert anthropic.requests[0].body["messages"][0]["content"] in ("x?y", [{"type": "text", "text": "x?y"}])


def test_secrets_stay_here(anthropic: AnthropicServer) -> None:
    key = anthropic.key
    anthropic.script.error = (400, "invalid_request_error", f"bad key {key} at {anthropic.url}/v1 for sk-{'a' * 30}")
    result = send("anthropic", anthropic, {})
    assert result.status == 400
    for secret in (key, anthropic.url, "127.0.0.1", "a" * 30):
        assert secret not in result.content.decode()


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
        lane = TranslateLane(provider, server.url + end, server.key, {})
        assert asyncio.run(exchange(lane, outgoing({}))).status == 200


def test_nothing_is_printed_or_logged(anthropic: AnthropicServer, caplog: pytest.LogCaptureFixture) -> None:
    prompt = "a prompt nobody may log"
    caplog.set_level(logging.DEBUG)
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        for error in (None, (400, "invalid_request_error", "no"), (500, "api_error", "no")):
            for stream in (False, True):
                anthropic.script.error = error
                send("anthropic", anthropic, {"stream": stream, "messages": [{"role": "user", "content": prompt}]})
    assert printed.getvalue() == ""
    assert prompt not in caplog.text
    assert anthropic.key not in caplog.text
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


def test_requests_at_the_same_time(either: tuple[str, Standin]) -> None:
    provider, server = either

    async def scenario() -> list[int]:
        lane = TranslateLane(provider, server.url, server.key, {})

        async def one(stream: bool) -> int:
            answer = await lane.send(outgoing({"stream": stream}))
            await drain(answer.body)
            return answer.status

        try:
            return await asyncio.gather(*(one(n % 2 == 0) for n in range(12)))
        finally:
            await lane.aclose()

    assert asyncio.run(scenario()) == [200] * 12


def test_upstream_errors_are_of_the_projects_tree() -> None:
    for kind in (UpstreamUnreachable, UpstreamTimeout, UpstreamInterrupted):
        assert issubclass(kind, ProxyError)
