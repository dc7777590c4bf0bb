"""``GET /v1/models``: the upstream's list as it is, or what the caller may name."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kit.client import StartProxy, ask
from tests.kit.raw_upstream import End, RawUpstream, Stage, Step, answer, head

BYTES = b'{"object":"list", "data":[{"id":"gpt-4o","x":1.10},{"id":"o3"},{"id":"gpt-3.5-turbo"}],"extra":"\\u00e9"}'
ROUTES = [
    {"match": "gpt-4*", "upstream": "main"},
    {"match": "bot", "upstream": "main", "model": "gpt-4o-mini"},
    {"match": "o3", "upstream": "second"},
]


def ids(body: bytes) -> list[str]:
    listed = json.loads(body)
    assert listed["object"] == "list"
    return [entry["id"] for entry in listed["data"]]


def test_without_routes_the_list_is_the_upstreams_to_the_byte(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(lambda _: [answer(BYTES, headers=[("X-Request-Id", "r")])]) as upstream:
        got = ask(start_proxy(upstream.url), "/v1/models?x=%20", None)
        assert upstream.last.target == "/v1/models?x=%20"
    assert (got.status, got.body, got.header("x-request-id")) == (200, BYTES, "r")


def test_without_routes_an_error_is_the_upstreams(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(lambda _: [answer(b'{"error":{"message":"no"}}', "401 Unauthorized")]) as upstream:
        got = ask(start_proxy(upstream.url), "/v1/models", None)
    assert (got.status, got.body) == (401, b'{"error":{"message":"no"}}')


def test_with_routes_it_lists_what_is_routed(start_proxy: StartProxy) -> None:
    with RawUpstream(lambda _: [answer(BYTES)]) as one, RawUpstream(lambda _: [answer(BYTES)]) as two:
        config: dict[str, Any] = {
            "upstreams": {"second": {"provider": "openai", "base_url": f"{two.url}/v1"}},
            "models": ROUTES,
            "teams": {
                "a": {"keys": ["sha256:" + hashlib.sha256(b"sk-a").hexdigest()], "models": ["bot", "o*"]},
                "b": {"keys": ["sha256:" + hashlib.sha256(b"sk-b").hexdigest()], "models": []},
            },
        }
        url = start_proxy(one.url, config)
        got = ask(url, "/v1/models", None)
        assert sorted(ids(got.body)) == ["bot", "gpt-4o", "o3"]
        [entry] = [one for one in json.loads(got.body)["data"] if one["id"] == "gpt-4o"]
        assert {"id": "gpt-4o", "x": 1.1, "context_window": 128_000}.items() <= entry.items()
        assert sorted(ids(ask(url, "/v1/models", None, [("api-key", "sk-a")]).body)) == ["bot", "o3"]
        assert ids(ask(url, "/v1/models", None, [("api-key", "sk-b")]).body) == []


def test_a_team_sees_its_models_without_routes_too(start_proxy: StartProxy, stage: Stage) -> None:
    config = {"teams": {"a": {"keys": ["sha256:" + hashlib.sha256(b"sk-a").hexdigest()], "models": ["gpt-*"]}}}
    with stage(lambda _: [answer(BYTES)]) as upstream:
        got = ask(start_proxy(upstream.url, config), "/v1/models", None, [("api-key", "sk-a")])
    assert sorted(ids(got.body)) == ["gpt-3.5-turbo", "gpt-4o"]


@pytest.mark.parametrize(
    "steps",
    [
        [answer(b"[]")],
        [answer(b"no JSON")],
        [answer(b"\xff\xfe")],
        [answer(b'{"data":5}')],
        [answer(b'{"data":[5,null,{},{"id":5},{"id":["x"]},{"name":"x"}]}')],
        [answer(b'{"error":{"message":"no"}}', "500 Oh")],
        [answer(b"x", headers=[("Content-Encoding", "gzip")])],
        [answer(BYTES)[:-20], End.CLOSE],
        [End.CLOSE],
        [head("200 OK", [("Content-Length", "10")]), End.SILENCE],
        [End.SILENCE],
    ],
)
def test_with_routes_an_upstream_without_a_list_does_no_harm(
    start_proxy: StartProxy, stage: Stage, steps: Sequence[Step]
) -> None:
    with stage(lambda _: steps) as upstream:
        got = ask(start_proxy(upstream.url, {"models": ROUTES[:2], "server": {"deadline": 0.5}}), "/v1/models", None)
    assert got.status == 200
    assert ids(got.body) == ["bot"]
