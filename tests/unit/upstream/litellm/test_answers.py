"""Check the responses if a provider returns an error, breaks off, or is unreachable, and the end of a request."""

import asyncio
from typing import Any

import pytest

from proxy.errors import UpstreamInterrupted, UpstreamUnreachable
from proxy.overflow import recognise
from proxy.upstream.litellm.transport import LiteLLMTransport
from tests.kit.anthropic_server import AnthropicServer, LocalServer
from tests.kit.translation import PROVIDERS, drain, exchange, outgoing, send

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
