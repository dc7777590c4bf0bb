"""Each spelling of a path that clients use reaches the endpoint it means."""

import json

import pytest

from tests.kit.client import CHAT, StartProxy, ask, chat
from tests.kit.raw_upstream import RawUpstream


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "/chat/completions",
        "/v1/v1/chat/completions",
        "/v1/chat/completions/chat/completions",
        "/openai/v1/chat/completions?api-version=preview",
    ],
)
def test_a_chat_completion_is_compacted_under_every_spelling(
    start_proxy: StartProxy, upstream: RawUpstream, path: str
) -> None:
    got = ask(start_proxy(upstream.url), path, chat())
    assert (got.status, got.header("x-compaction")) == (200, "none")
    assert (upstream.last.target, upstream.last.body) == (CHAT, chat())


@pytest.mark.parametrize("body", [chat(model="other"), b'{"messages":[]}'])
def test_the_deployment_in_the_path_is_the_model(start_proxy: StartProxy, upstream: RawUpstream, body: bytes) -> None:
    """Azure routes by the path and ignores the model in the body."""
    url = start_proxy(upstream.url)
    for path, endpoint in (("chat/completions", CHAT), ("embeddings", "/v1/embeddings")):
        got = ask(url, f"/openai/deployments/gpt-4o/{path}?api-version=2024-10-21", body)
        assert got.status == 200
        assert upstream.last.target == endpoint
        assert json.loads(upstream.last.body) == {**json.loads(body), "model": "gpt-4o"}
