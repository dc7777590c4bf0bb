"""The official Azure client works with the proxy as its endpoint, or with the endpoint below /v1."""

import json
from collections.abc import Iterator

import pytest
from openai import AzureOpenAI

from tests.kit.client import StartProxy
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, streamed


def script(arrived: Arrived) -> list[Step]:
    if arrived.method == "GET":
        return [answer(b'{"object":"list","data":[{"id":"gpt-4o","object":"model","created":1,"owned_by":"x"}]}')]
    if arrived.target == "/v1/embeddings":
        return [answer(b'{"object":"list","model":"emb","data":[{"object":"embedding","index":0,"embedding":[0.5]}]}')]
    message = {"role": "assistant", "content": "Hello"}
    if json.loads(arrived.body).get("stream"):
        event = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": message}]}
        return streamed([f"data: {json.dumps(event)}\n\n".encode(), b"data: [DONE]\n\n"])
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return [answer(json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}).encode())]


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(script) as running:
        yield running


@pytest.mark.parametrize("below", ["", "/v1"])
@pytest.mark.parametrize("deployment", [None, "deployed"])
def test_chats_streams_lists_and_embeddings(
    start_proxy: StartProxy, upstream: RawUpstream, below: str, deployment: str | None
) -> None:
    url = start_proxy(upstream.url)
    with AzureOpenAI(
        azure_endpoint=f"{url}{below}",
        azure_deployment=deployment,
        api_key="k",
        api_version="2024-10-21",
        max_retries=0,
    ) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="gpt-4o", messages=[{"role": "user", "content": "Hi"}]
        )
        assert raw.headers["x-compaction"] == "none"
        assert upstream.last.target == "/v1/chat/completions"
        assert raw.parse().choices[0].message.content == "Hello"
        assert json.loads(upstream.last.body)["model"] == (deployment or "gpt-4o")
        events = client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert "".join(event.choices[0].delta.content or "" for event in events) == "Hello"
        assert client.embeddings.create(model="emb", input="x", encoding_format="float").data[0].embedding == [0.5]
        assert json.loads(upstream.last.body)["model"] == (deployment or "emb")
        assert upstream.last.target == "/v1/embeddings"
        assert [model.id for model in client.models.list()] == ["gpt-4o"]
        assert upstream.last.header("authorization") == "Bearer k"
