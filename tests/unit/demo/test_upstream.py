"""Test the stand-in upstream with the official client and plain HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from proxy.demo.upstream import Reply, StandIn, ToolCall
from proxy.server.loopback import serve

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALLS = (ToolCall("call_1", "weather", '{"city": "Oslo", "days": 3}'), ToolCall("call_2", "clock", "{}"))
Start = Callable[[StandIn], httpx.Client]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def started(upstream: StandIn) -> httpx.Client:
            url = stack.enter_context(serve(upstream.app))
            return stack.enter_context(httpx.Client(base_url=url, trust_env=False))

        yield started


def chat(http: httpx.Client, messages: Any = QUESTION, **more: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "m", "messages": messages} | more)


# Answers


@pytest.mark.parametrize("stream", [False, True])
def test_the_official_client_reads_tool_calls(start: Start, stream: bool) -> None:
    http = start(StandIn(responder=lambda body: Reply(tool_calls=CALLS)))
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="k", max_retries=0, http_client=http)
    if not stream:
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [
            (c.id, c.function.name, c.function.arguments) for c in message.tool_calls or () if c.type == "function"
        ] == [(c.id, c.name, c.arguments) for c in CALLS]
        return
    arguments = {0: "", 1: ""}
    pieces = 0
    for chunk in client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            arguments[delta.index] += delta.function.arguments or ""
            pieces += 1
    assert arguments == {0: CALLS[0].arguments, 1: CALLS[1].arguments}
    assert pieces > len(CALLS) + 1


# Refusals


@pytest.mark.parametrize("stream", [False, True])
def test_beyond_the_window_it_refuses_as_openai_does(start: Start, stream: bool) -> None:
    upstream = StandIn(window=16_000)
    response = chat(start(upstream), [{"role": "user", "content": "word " * 17_222}], stream=stream)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "This model's maximum context length is 16000 tokens. However, your messages resulted in 17230 "
        "tokens. Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert (upstream.requests[0].status, upstream.requests[0].tokens, upstream.faults) == (400, 17_230, [])


# Scripts


# The other paths


# Summaries


# Counting and serving
