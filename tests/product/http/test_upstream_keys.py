"""Callers' keys reach an upstream in the form that it takes, and only the key that identifies the caller does."""

import json
from typing import Any

import pytest

from proxy.http.headers import Credential
from proxy.upstream.relay import Address, RelayTransport, azure_address
from tests.kit.client import CHAT, JSON, StartProxy, ask, chat
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Stage, answer, chunk, stream_head

BEARER, X_API_KEY, API_KEY = ("authorization", "Bearer sk-1"), ("x-api-key", "sk-1"), ("api-key", "sk-1")
ENTRA = ("authorization", "Bearer eyJhbGciOi.eyJhdWQ.c2ln-_")
VERSION = ("anthropic-version", "2023-06-01")
KEYS = ("authorization", "x-api-key", "api-key")


def keys(arrived: Arrived) -> list[tuple[str, str]]:
    return [pair for pair in arrived.headers if pair[0] in KEYS]


@pytest.mark.parametrize(
    ("provider", "path", "sent", "arrived"),
    [
        # A server of unknown make: Anthropic's form on Anthropic's paths, otherwise OpenAI's.
        ("openai", "/v1/messages", X_API_KEY, X_API_KEY),
        ("openai", "/v1/messages", BEARER, BEARER),
        ("openai", "/v1/messages", API_KEY, BEARER),
        ("openai", "/v1/embeddings", X_API_KEY, BEARER),
        ("openai", "/v1/embeddings", API_KEY, BEARER),
        ("openai", CHAT, X_API_KEY, BEARER),
        ("openai", CHAT, API_KEY, BEARER),
        ("anthropic", "/v1/messages", X_API_KEY, X_API_KEY),
        ("anthropic", "/v1/messages", API_KEY, X_API_KEY),
        ("anthropic", "/v1/messages", BEARER, BEARER),
        ("anthropic", "/v1/files", BEARER, X_API_KEY),
        ("azure", "/v1/embeddings", X_API_KEY, API_KEY),
        ("azure", "/v1/embeddings", BEARER, API_KEY),
        ("azure", "/v1/embeddings", ENTRA, ENTRA),
        ("azure", CHAT, BEARER, API_KEY),
        ("azure", CHAT, ENTRA, ENTRA),
    ],
)
def test_a_callers_key(
    start_proxy: StartProxy,
    upstream: RawUpstream,
    provider: str,
    path: str,
    sent: tuple[str, str],
    arrived: tuple[str, str],
) -> None:
    url = start_proxy(upstream.url, {"upstreams": {"main": {"provider": provider}}})
    assert ask(url, path, chat(), [JSON, sent]).status == 200
    assert keys(upstream.last) == [arrived]


@pytest.mark.parametrize(
    ("provider", "own"),
    [
        ("openai", ("authorization", "Bearer sk-own")),
        ("anthropic", ("x-api-key", "sk-own")),
        ("azure", ("api-key", "sk-own")),
    ],
)
def test_an_upstreams_own_key(
    start_proxy: StartProxy, upstream: RawUpstream, provider: str, own: tuple[str, str]
) -> None:
    url = start_proxy(upstream.url, {"upstreams": {"main": {"provider": provider, "api_key": "sk-own"}}})
    for path in ("/v1/messages", "/v1/models"):
        for sent in (BEARER, X_API_KEY, API_KEY):
            ask(url, path, None, [sent])
            assert keys(upstream.last) == [own]


def test_a_provider_that_is_known_takes_bearer_tokens_only() -> None:
    transport = RelayTransport(
        Address("https://api.openai.com/v1", official=True), upstream="main", api_key=None, headers={}
    )
    sent = transport.headers([], Credential("sk-1", "x-api-key"), anthropic=True)
    assert sent == [("authorization", "Bearer sk-1")]


def test_of_several_keys_the_one_that_identifies_the_caller_is_sent(
    start_proxy: StartProxy, upstream: RawUpstream
) -> None:
    url = start_proxy(upstream.url)
    several = [("api-key", "sk-3"), ("x-api-key", "sk-2"), BEARER, ("authorization", "Bearer sk-4")]
    ask(url, "/v1/messages", b"{}", [JSON, *several])
    assert keys(upstream.last) == [BEARER]
    ask(url, "/v1/messages", b"{}", [JSON, *several[:2]])
    assert keys(upstream.last) == [("x-api-key", "sk-2")]


def test_a_configured_header_replaces_the_key(start_proxy: StartProxy, upstream: RawUpstream) -> None:
    url = start_proxy(upstream.url, {"upstreams": {"main": {"provider": "anthropic", "headers": {"X-Api-Key": "own"}}}})
    ask(url, "/v1/messages", b"{}", [JSON, X_API_KEY])
    assert keys(upstream.last) == [("x-api-key", "own")]


@pytest.mark.parametrize("end", ["", "/v1"])
def test_an_upstream_of_anthropics_serves_its_api(start_proxy: StartProxy, upstream: RawUpstream, end: str) -> None:
    config = {"upstreams": {"claude": {"provider": "anthropic", "base_url": f"{upstream.url}{end}"}}}
    with RawUpstream() as other:
        url = start_proxy(other.url, config)
        beta = [VERSION, ("anthropic-beta", "oauth-2025-04-20,x")]
        for method, path in (
            ("POST", "/v1/messages?beta=true"),
            ("POST", "/v1/messages/count_tokens"),
            ("GET", "/v1/models?limit=1000"),
            ("GET", "/v1/models/claude-x"),
        ):
            body = b'{"model":"claude-x","a" :1.10}' if method == "POST" else None
            assert ask(url, path, body, [JSON, X_API_KEY, *beta]).status == 200
            arrived = upstream.last
            assert (arrived.method, arrived.target, arrived.body) == (method, path, body or b"")
            assert [pair for pair in arrived.headers if pair[0].startswith("anthropic")] == beta
        assert other.arrived == []
        ask(url, "/v1/messages", b"{}", [JSON])
        assert upstream.last.header("anthropic-version") == "2023-06-01"
        ask(url, "/v1/embeddings", b"{}", [JSON])
        assert (other.last.target, other.last.header("anthropic-version")) == ("/v1/embeddings", None)


def test_routed_models_are_listed_in_anthropics_format(start_proxy: StartProxy, stage: Stage) -> None:
    listed = b'{"data":[{"type":"model","id":"claude-x","display_name":"X"}],"has_more":false}'
    models = [{"match": "claude-*", "upstream": "main"}, {"match": "bot", "upstream": "main"}]
    with stage(lambda _: [answer(listed)]) as upstream:
        url = start_proxy(upstream.url, {"upstreams": {"main": {"provider": "anthropic"}}, "models": models})
        page = json.loads(ask(url, "/v1/models", None, [VERSION, X_API_KEY]).body)
        assert {"object", "data"} == set(json.loads(ask(url, "/v1/models", None, [BEARER]).body))
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("claude-x", "bot", False)
    assert page["data"][0] == {"type": "model", "id": "claude-x", "display_name": "X"}
    assert page["data"][1]["display_name"] == "bot"


def anthropic_error(body: bytes) -> tuple[str, str]:
    value: dict[str, Any] = json.loads(body)
    assert set(value) == {"type", "error"}
    assert value["type"] == "error"
    assert set(value["error"]) == {"type", "message"}
    return value["error"]["type"], value["error"]["message"]


def test_own_errors_have_anthropics_shape_for_its_clients(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(lambda _: [End.CLOSE]) as upstream:
        url = start_proxy(
            upstream.url,
            {
                "auth": {"mode": "keys"},
                "upstreams": {"main": {"api_key": "sk-own"}},
                "teams": {"a": {"keys": [f"sha256:{'0' * 64}"]}},
            },
        )
        for path, body, headers in (("/v1/messages", b"{}", [JSON]), ("/v1/models", None, [VERSION])):
            got = ask(url, path, body, headers)
            assert (got.status, anthropic_error(got.body)[0]) == (401, "authentication_error")
        got = ask(start_proxy(upstream.url), "/v1/messages", b"{}", [JSON])
        assert (got.status, anthropic_error(got.body)[0]) == (502, "api_error")
        got = ask(start_proxy(upstream.url), "/v1/messages/../x", b"{}", [JSON])
        assert (got.status, anthropic_error(got.body)[0]) == (404, "not_found_error")


def test_a_broken_stream_ends_in_anthropics_error_event(start_proxy: StartProxy, stage: Stage) -> None:
    event = b'event: content_block_start\ndata: {"type":"content_block_start","index":0}\n\n'
    with stage(lambda _: [stream_head(), chunk(event + b"event: con"), 0.01, End.CLOSE]) as upstream:
        got = ask(start_proxy(upstream.url), "/v1/messages", b'{"stream":true}')
    assert got.whole
    assert got.body.startswith(event + b"event: error\ndata: ")
    assert anthropic_error(got.body.rsplit(b"data: ", 1)[1])[0] == "api_error"


def test_older_azure_addresses_name_the_deployment_and_one_version(
    start_proxy: StartProxy, upstream: RawUpstream
) -> None:
    url = start_proxy(
        upstream.url,
        {"upstreams": {"main": {"provider": "azure", "base_url": upstream.url, "api_version": "2024-10-21"}}},
    )
    body = b'{"model":"emb","input":"x"}'
    for path in ("/v1/embeddings", "/openai/deployments/emb/embeddings?api-version=2023-05-15&x=1"):
        assert ask(url, path, body, [JSON, API_KEY]).status == 200
        query = "api-version=2024-10-21" + ("&x=1" if "x=1" in path else "")
        assert upstream.last.target == f"/openai/deployments/emb/embeddings?{query}"
        assert upstream.last.body == body
    assert ask(url, f"{CHAT}?api-version=2023-05-15&x=1", chat(model="emb"), [JSON, API_KEY]).status == 200
    assert upstream.last.target == "/openai/deployments/emb/chat/completions?api-version=2024-10-21&x=1"
    assert ask(url, "/openai/models?api-version=1", None, [API_KEY]).status == 200
    assert upstream.last.target == "/openai/models?api-version=2024-10-21"
    before = len(upstream.arrived)
    for path, body, status in (
        ("/v1/embeddings", b'{"input":"x"}', 404),
        ("/v1/embeddings", b'{"model":".."}', 404),
        (CHAT, b'{"model":"..","messages":[]}', 404),
    ):
        assert ask(url, path, body, [JSON, API_KEY]).status == status
    assert len(upstream.arrived) == before
    transport = RelayTransport(azure_address("https://a.test", None), upstream="main", api_key=None, headers={})
    assert transport.url("/models", "api-version=1") == "https://a.test/openai/models?api-version=1"
