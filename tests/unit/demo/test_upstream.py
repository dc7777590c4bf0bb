"""Test the stand-in upstream with the official client and plain HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from proxy.demo.replies import WORDS_PER_CHUNK
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


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# Answers


def test_a_stream_spells_the_answer_in_chunks(start: Start) -> None:
    text = "  It rains in Oslo, and it will rain\n\n tomorrow as well. "
    upstream = StandIn(responder=lambda body: Reply(content=text))
    response = chat(start(upstream), stream=True)
    *chunks, done = events(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert done == "[DONE]"
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert len(deltas) > len(text.split()) / WORDS_PER_CHUNK
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks)


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


@pytest.mark.parametrize("reply", [Reply(content="x", delay=30), Reply(content="x y z", pause=30)])
def test_it_notices_that_its_client_left(start: Start, reply: Reply) -> None:
    upstream = StandIn(responder=lambda body: reply)
    http = start(upstream)
    with pytest.raises(httpx.ReadTimeout):
        http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": QUESTION, "stream": True},
            timeout=httpx.Timeout(30, read=0.5),
        )
    end = time.perf_counter() + 15
    while not (upstream.requests and upstream.requests[0].abandoned):
        assert time.perf_counter() < end
        time.sleep(0.01)


# The other paths


# Summaries


# Counting and serving
