"""Translation by LiteLLM: blocked arguments, formats of providers, and failing responses."""

import asyncio
import io
import json
import logging
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from starlette.responses import Response

from proxy.errors import RequestError, UpstreamInterrupted, UpstreamUnreachable
from proxy.http.headers import Credential
from proxy.overflow import recognise
from proxy.upstream.litellm.request import PARAMETERS, api_base, arguments
from proxy.upstream.litellm.transport import LiteLLMTransport
from tests.kit.anthropic_server import AnthropicServer, LocalServer, Received
from tests.kit.translation import PROVIDERS, Standin, drain, exchange, outgoing, send


def test_which_key(anthropic: AnthropicServer) -> None:
    def status(configured: str | None, callers: str | None) -> tuple[int, int]:
        transport = LiteLLMTransport("anthropic", anthropic.url, configured, {})
        before = len(anthropic.requests)
        result = asyncio.run(exchange(transport, outgoing({}, credential=callers and Credential(callers, "x-api-key"))))
        return result.status, len(anthropic.requests) - before

    assert status(anthropic.key, None) == (200, 1)
    assert status(anthropic.key, "the callers own") == (200, 1)
    assert status(None, anthropic.key) == (200, 1)
    assert status(None, None) == (401, 0)


def test_headers(anthropic: AnthropicServer) -> None:
    transport = LiteLLMTransport("anthropic", anthropic.url, anthropic.key, {"x-team": "search"})
    request = outgoing({}, headers=[("x-client", "secret"), ("openai-organization", "org")])
    asyncio.run(exchange(transport, request))
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


class Moved(LocalServer):
    """Redirects every request to another host."""

    elsewhere = ""

    async def answer(self, received: Received) -> Response:
        return Response("moved", self.status, {"location": f"{self.elsewhere}{received.path}"})

    status = 307


@pytest.mark.parametrize("provider", ["openai", "azure", "mistral", "ollama_chat", "azure_ai", "groq"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_provider_is_followed_to_another_host(provider: str, stream: bool) -> None:
    """Follow no redirects, with LiteLLM's clients or OpenAI's. They would take the prompt and the key along."""
    with LocalServer() as decoy, Moved() as server:
        server.elsewhere = decoy.url
        transport = LiteLLMTransport(provider, f"{server.url}/v1", "made-up-key", {})
        result = asyncio.run(exchange(transport, outgoing({"stream": stream})))
        assert (len(server.requests), decoy.requests) == (1, [])
    assert (result.status, result.json["error"]["type"]) == (502, "server_error")


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


def test_secrets_stay_here(anthropic: AnthropicServer) -> None:
    key = anthropic.key
    anthropic.script.error = (400, "invalid_request_error", f"bad key {key} at {anthropic.url}/v1 for sk-{'a' * 30}")
    result = send("anthropic", anthropic, {})
    assert result.status == 400
    for secret in (key, anthropic.url, "127.0.0.1", "a" * 30):
        assert secret not in result.content.decode()


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


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QUJD"}}
CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "p", "input": "x"}}


@pytest.mark.parametrize(
    ("provider", "message", "where"),
    [
        ("anthropic", {"role": "user", "content": [AUDIO]}, "content[0]"),
        ("gemini", {"role": "user", "content": [IMAGE, AUDIO]}, ""),
        ("gemini", {"role": "tool", "tool_call_id": "c", "content": [IMAGE, AUDIO]}, "content[1]"),
        ("gemini", {"role": "user", "content": [VIDEO]}, "content[0]"),
        ("gemini", {"role": "assistant", "content": None, "tool_calls": [CUSTOM]}, "tool_calls[0]"),
        ("gemini", {"role": "assistant", "content": "A", "images": [IMAGE]}, ""),
        ("anthropic", {"role": "assistant", "content": "A", "images": [IMAGE]}, "images[0]"),
    ],
)
def test_parts_that_litellm_drops_are_refused_by_their_path(provider: str, message: dict[str, Any], where: str) -> None:
    request = outgoing({"messages": [message]})
    if not where:
        assert arguments(provider, request)[0]["messages"] == [message]
        return
    with pytest.raises(RequestError, match="loses it") as raised:
        arguments(provider, request)
    assert raised.value.param == f"messages[0].{where}"


def test_refusals_become_text() -> None:
    part = {"type": "refusal", "refusal": "No."}
    turns = [{"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": [part]}]
    sent = arguments("gemini", outgoing({"messages": turns}))[0]["messages"]
    assert [turn["content"] for turn in sent] == ["No.", [{"type": "text", "text": "No."}]]


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


# One row: the provider's response, and the status, type, and code that the client gets.
ERRORS: list[tuple[str, tuple[int, str, str], tuple[int, str, str | None]]] = [
    ("anthropic", (400, "invalid_request_error", "messages: wrong"), (400, "invalid_request_error", None)),
    ("anthropic", (401, "authentication_error", "invalid x-api-key"), (401, "authentication_error", None)),
    ("anthropic", (404, "not_found_error", "model: m-1"), (404, "invalid_request_error", None)),
    ("anthropic", (429, "rate_limit_error", "slow down"), (429, "rate_limit_error", None)),
    ("anthropic", (529, "overloaded_error", "Overloaded"), (529, "server_error", None)),
    ("gemini", (400, "INVALID_ARGUMENT", "contents: wrong"), (400, "invalid_request_error", None)),
    ("gemini", (500, "INTERNAL", "An internal error"), (500, "server_error", None)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("provider", "said", "seen"), ERRORS)
def test_errors(provider: str, said: tuple[int, str, str], seen: tuple[int, str, str | None], stream: bool) -> None:
    with PROVIDERS[provider]() as server:
        server.script.error = said
        server.script.headers = {"retry-after": "7", "request-id": "req_9", "x-secret": "no"}
        result = send(provider, server, {"stream": stream})
        assert len(server.requests) == 1  # LiteLLM doesn't retry
    error = result.json["error"]
    assert (result.status, error["type"]) == seen[:2]
    assert error["message"] == said[2]
    assert error["param"] is None
    assert result.headers == {"content-type": "application/json", "retry-after": "7", "x-request-id": "req_9"}
    assert recognise(result.status, result.content) is None


@pytest.mark.parametrize("cut", ["event", "connection", "end"])
def test_a_stream_that_breaks(anthropic: AnthropicServer, cut: str) -> None:
    anthropic.script.cut = cut
    parts: list[bytes] = []

    async def scenario() -> None:
        transport = LiteLLMTransport("anthropic", anthropic.url, anthropic.key, {})
        answer = await transport.send(outgoing({"stream": True}))
        assert answer.status == 200
        try:
            async for part in answer.body:
                parts.append(part)  # noqa: PERF401 - kept when the stream breaks
        finally:
            await transport.aclose()

    with pytest.raises(UpstreamInterrupted) as raised:
        asyncio.run(scenario())
    assert b"Hello" in b"".join(parts)
    assert b"[DONE]" not in b"".join(parts)
    assert "127.0.0.1" not in raised.value.message


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
    transport = LiteLLMTransport(provider, url, "made-up-key", {})
    with pytest.raises(UpstreamUnreachable) as raised:
        asyncio.run(exchange(transport, outgoing({"stream": stream})))
    assert "127.0.0.1" not in raised.value.message


def test_close_ends_the_upstreams_request(anthropic: AnthropicServer) -> None:
    anthropic.script.cut = "hang"

    async def scenario() -> None:
        transport = LiteLLMTransport("anthropic", anthropic.url, anthropic.key, {})
        answer = await transport.send(outgoing({"stream": True}))
        body = aiter(answer.body)
        assert b"Hello" in await anext(body)
        assert not anthropic.disconnected.is_set()
        await answer.close()
        await answer.close()
        assert await asyncio.to_thread(anthropic.disconnected.wait, 5)
        await transport.aclose()

    asyncio.run(scenario())


def test_closing_the_lane_ends_its_streams(anthropic: AnthropicServer) -> None:
    anthropic.script.cut = "hang"

    async def scenario() -> None:
        transport = LiteLLMTransport("anthropic", anthropic.url, anthropic.key, {})
        answer = await transport.send(outgoing({"stream": True}))
        reader = asyncio.create_task(drain(answer.body))
        await asyncio.sleep(0.1)
        await transport.aclose()
        assert await asyncio.to_thread(anthropic.disconnected.wait, 5)
        with pytest.raises(UpstreamInterrupted):
            await reader

    asyncio.run(scenario())


# One row: the body or the fields of the request, and the code and parameter of the error.
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
