"""Test the stand-in upstream with the official client and plain HTTP."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from proxy.demo import counting
from proxy.demo.counting import RequestCounter, first_tokens, text_tokens
from proxy.demo.replies import MAX_TOKENS, WORDS_PER_CHUNK, summarise
from proxy.demo.upstream import Reply, StandIn, ToolCall, is_summary_request
from proxy.server.loopback import serve

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALLS = (ToolCall("call_1", "weather", '{"city": "Oslo", "days": 3}'), ToolCall("call_2", "clock", "{}"))
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]

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


def test_an_answer_and_its_usage(start: Start) -> None:
    upstream = StandIn(responder=lambda body: Reply(content="It rains."))
    response = chat(start(upstream))
    answer = response.json()
    assert response.status_code == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    # Seven tokens of text, one of the role, three of the frame, three of the priming; "It rains." is three.
    assert answer["usage"] == {"prompt_tokens": 14, "completion_tokens": 3, "total_tokens": 17}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    assert int(response.headers["openai-processing-ms"]) >= 0


def test_what_was_received_is_kept(start: Start) -> None:
    upstream = StandIn()
    raw = b'{"model": "m",  "messages": [{"role": "user", "content": "caf\\u00e9"}]}'
    start(upstream).post("/v1/chat/completions", content=raw, headers={"Authorization": "Bearer k"})
    (received,) = upstream.requests
    assert received.raw == raw
    assert received.body["messages"][0]["content"] == "café"
    assert received.headers["authorization"] == "Bearer k"
    assert (received.status, received.faults, received.summary) == (200, [], False)
    assert received.tokens == RequestCounter().request(received.body).total


def test_without_a_script_it_says_what_came(start: Start) -> None:
    assert chat(start(StandIn())).json()["choices"][0]["message"]["content"] == "Message 1, from user, was received."


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


def test_a_stream_gives_usage_only_when_asked(start: Start) -> None:
    upstream = StandIn(responder=lambda body: Reply(content="It rains."))
    *chunks, last, _ = events(chat(start(upstream), stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == upstream.requests[0].tokens
    assert all(chunk["usage"] is None for chunk in chunks)


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


@pytest.mark.parametrize(("more", "tokens"), [({"max_tokens": 4}, 4), ({"max_completion_tokens": 9}, 9), ({}, 50)])
def test_an_answer_ends_at_its_limit(start: Start, more: dict[str, int], tokens: int) -> None:
    upstream = StandIn(max_output=50, responder=lambda body: Reply(content="word " * 100))
    answer = chat(start(upstream), **more).json()
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_fills_the_window_leaves_no_answer(start: Start) -> None:
    upstream = StandIn(window=16, responder=lambda body: Reply(content="It rains all day long."))
    answer = chat(start(upstream)).json()
    assert answer["usage"]["total_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


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


def test_the_window_is_met_exactly(start: Start) -> None:
    upstream = StandIn(window=14)
    http = start(upstream)
    assert chat(http).status_code == 200
    assert chat(http, [{"role": "user", "content": "What is the weather in Oslo, now?"}]).status_code == 400


def test_input_and_output_together_must_fit(start: Start) -> None:
    http = start(StandIn(window=100, max_output=90))
    assert chat(http, max_tokens=86).status_code == 200
    error = chat(http, max_tokens=87).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "you requested 101 tokens (14 in the messages, 87 in the completion)" in error["message"]


def test_tools_count_and_are_named(start: Start) -> None:
    error = chat(start(StandIn(window=20)), tools=TOOLS).json()["error"]
    tools = text_tokens(json.dumps(TOOLS, separators=(",", ":")))
    assert f"resulted in {14 + tools} tokens (14 in the messages, {tools} in the functions)" in error["message"]


def test_more_output_than_the_model_has_is_no_overflow(start: Start) -> None:
    error = chat(start(StandIn(max_output=50)), max_tokens=51).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", None)
    assert error["message"].startswith("max_tokens is too large: 51.")


def test_a_malformed_conversation_is_refused_and_recorded(start: Start) -> None:
    upstream = StandIn()
    response = chat(start(upstream), [*QUESTION, {"role": "tool", "tool_call_id": "a", "content": "x"}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.[1].role"
    assert [fault.param for fault in upstream.faults] == ["messages.[1].role"]
    assert upstream.requests[0].tokens == 0


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b""])
def test_a_body_that_is_no_json_object_is_refused(start: Start, raw: bytes) -> None:
    upstream = StandIn()
    response = start(upstream).post("/v1/chat/completions", content=raw)
    assert (response.status_code, len(upstream.faults)) == (400, 1)


# Scripts


def test_any_error_can_be_scripted(start: Start) -> None:
    error = {"error": {"message": "Slow down.", "type": "requests", "param": None, "code": "rate_limit_exceeded"}}
    upstream = StandIn(responder=lambda body: Reply(status=429, error=error, headers={"retry-after": "7"}))
    response = chat(start(upstream), stream=True)
    assert (response.status_code, response.json(), response.headers["retry-after"]) == (429, error, "7")
    assert upstream.requests[0].status == 429


def test_an_error_text_is_sent_as_it_is(start: Start) -> None:
    response = chat(start(StandIn(responder=lambda body: Reply(status=502, error="<h1>Bad gateway</h1>"))))
    assert (response.status_code, response.text) == (502, "<h1>Bad gateway</h1>")
    assert response.headers["content-type"].startswith("text/plain")


def test_an_error_status_needs_an_error() -> None:
    with pytest.raises(ValueError, match="needs an error"):
        Reply(status=500)


@pytest.mark.parametrize(("after", "chunks"), [(None, 0), (1, 1), (2, 2)])
def test_an_error_can_come_inside_a_stream(start: Start, after: int | None, chunks: int) -> None:
    reply = Reply(content="It rains in Oslo today.", error={"error": {"message": "Broke."}}, break_after=after)
    response = chat(start(StandIn(responder=lambda body: reply)), stream=True)
    seen = events(response)
    assert response.status_code == 200
    assert seen[chunks:] == [{"error": {"message": "Broke."}}, "[DONE]"]
    assert all("choices" in chunk for chunk in seen[:chunks])


def test_a_stream_can_break_off(start: Start) -> None:
    http = start(StandIn(responder=lambda body: Reply(content="word " * 50, break_after=2)))
    body = {"model": "m", "messages": QUESTION, "stream": True}
    seen = []
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        parts = response.iter_lines()
        seen += [next(parts) for _ in range(4)]  # two events, each with its empty line
        with pytest.raises(httpx.RemoteProtocolError):
            seen += list(parts)
    assert ["choices" in line for line in seen] == [True, False, True, False]


def test_a_plain_answer_can_break_off(start: Start) -> None:
    http = start(StandIn(responder=lambda body: Reply(content="word " * 50, break_after=0)))
    with pytest.raises(httpx.RemoteProtocolError):
        chat(http)


def test_an_answer_can_be_late(start: Start) -> None:
    http = start(StandIn(responder=lambda body: Reply(content="x", delay=0.2)))
    started = time.perf_counter()
    assert chat(http).status_code == 200
    assert time.perf_counter() - started >= 0.2


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


def test_models_are_listed(start: Start) -> None:
    response = start(StandIn(model="house-model")).get("/v1/models")
    assert [model["id"] for model in response.json()["data"]] == ["house-model"]


def test_other_paths_say_what_arrived(start: Start) -> None:
    upstream = StandIn()
    body = bytes(range(256))
    response = start(upstream).put("/v1/files/f%201?purpose=a&purpose=b", content=body, headers={"content-type": "x/y"})
    said = response.json()
    assert base64.b64decode(said.pop("body")) == body
    assert said == {"method": "PUT", "path": "/v1/files/f 1", "query": "purpose=a&purpose=b", "content_type": "x/y"}
    assert [received.raw for received in upstream.others] == [body]
    assert upstream.requests == []


# Summaries


def summary_body(transcript: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Summarise."},
            {"role": "user", "content": f"Keep the facts.\n<transcript>\n{transcript}\n</transcript>"},
        ],
    } | more


NOT_SUMMARIES: dict[str, dict[str, Any]] = {
    "tools": summary_body("x", tools=TOOLS),
    "a stream": summary_body("x", stream=True),
    "no marker": {"model": "m", "messages": QUESTION},
    "the marker inside a line": {"messages": [{"role": "user", "content": "What is <transcript> for?"}]},
    "the marker in the model's words": {"messages": [{"role": "assistant", "content": "<transcript>"}]},
    "the marker further up": {"messages": [{"role": "user", "content": "<transcript>"}, *QUESTION]},
    "no messages": {},
}


def test_a_summary_request_is_recognised() -> None:
    assert is_summary_request(summary_body("x"))
    assert is_summary_request(summary_body("x", stream=False, tools=[]))
    parts = [{"type": "text", "text": "Sum up.\n<transcript>\nx"}]
    assert is_summary_request({"messages": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize("body", NOT_SUMMARIES.values(), ids=NOT_SUMMARIES)
def test_other_requests_are_no_summary_requests(body: dict[str, Any]) -> None:
    assert not is_summary_request(body)


def test_summaries_are_told_apart(start: Start) -> None:
    upstream = StandIn(responder=lambda body: Reply(content="talk"))
    http = start(upstream)
    assert chat(http).json()["choices"][0]["message"]["content"] == "talk"
    answer = http.post("/v1/chat/completions", json=summary_body("The ticket is OPS-1.\nIt was raining."))
    assert answer.json()["choices"][0]["message"]["content"] == "The ticket is OPS-1."
    assert [received.summary for received in upstream.requests] == [False, True]
    assert (len(upstream.conversations), len(upstream.summaries)) == (1, 1)


def test_a_summary_keeps_what_names_something() -> None:
    noise = [f"The weather on day {day} was fine, and nobody said a word." for day in range(900)]
    facts = ["Ticket OPS-4821 is open.", "See https://example.org/runbook.", "The port = 5543", "Edit src/app/main.py"]
    kept = summarise(summary_body("\n".join([*noise[:450], *facts, *noise[450:]]))).content
    assert kept == "\n".join(facts)


def test_a_summary_reads_escaped_line_ends_and_long_lines() -> None:
    kept = summarise(summary_body('"' + "x " * 900 + "OPS-1 " + "y " * 900 + "\\nplain\\nINC-2" + '"')).content
    assert kept is not None
    assert "OPS-1" in kept
    assert "INC-2" in kept
    assert len(kept) < 300


def test_a_summary_is_short_and_keeps_the_dearest() -> None:
    lines = [f"Look at services/shop/part_{i}.py, line {i}, for the cause." for i in range(300)]
    kept = summarise(summary_body("\n".join([*lines, "It is OPS-77."]))).content
    assert kept is not None
    assert "OPS-77" in kept
    assert text_tokens(kept) <= MAX_TOKENS


def test_a_summary_without_facts_is_the_start() -> None:
    kept = summarise(summary_body("Hello there.\nHow are you?")).content
    assert kept is not None
    assert kept.startswith("Hello there.\nHow are you?")


# Counting and serving


def test_messages_are_counted_by_their_parts() -> None:
    counter = RequestCounter()
    base = counter.message({"role": "user", "content": "Hello"})
    assert base == 3 + 1 + 1
    assert counter.message({"role": "user", "content": [{"type": "text", "text": "Hello"}]}) == base
    assert counter.message({"role": "user", "name": "ada", "content": "Hello"}) == base + 1 + text_tokens("ada")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert counter.message({"role": "assistant", "tool_calls": [call]}) == 3 + 1 + 3 + text_tokens("weather{}")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    low = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}
    assert counter.message({"role": "user", "content": [image, low]}) == 3 + 1 + 765 + 85


def test_a_schema_counts() -> None:
    body: dict[str, Any] = {"messages": QUESTION}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert RequestCounter().request(body).functions == 0
    assert RequestCounter().request(body | {"response_format": {"type": "text"}}).functions == 0
    assert RequestCounter().request(body | {"response_format": schema}).functions > 5


def test_special_tokens_are_text() -> None:
    assert text_tokens("<|endoftext|>") > 1


def test_a_text_is_cut_between_characters() -> None:
    text = "雨が降る👩‍👩‍👧‍👦" * 5
    for limit in range(1, text_tokens(text)):
        cut = first_tokens(text, limit)
        assert text.startswith(cut)
        assert text_tokens(cut) <= limit + 1


def test_each_message_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = RequestCounter()
    messages = [{"role": "user", "content": f"The talk, part {i}"} for i in range(400)]
    first = counter.request({"messages": messages})
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return 1

    monkeypatch.setattr(counting, "text_tokens", count)
    again = counter.request({"messages": [*messages, {"role": "user", "content": "And now this."}]})
    assert again.messages > first.messages
    assert [text for text in counted if text not in ("", "user")] == ["And now this."]


def test_an_application_that_cannot_start_is_said() -> None:
    def broken(app: Starlette) -> Any:
        raise OSError("no disk")

    with pytest.raises(RuntimeError, match="did not start"), serve(Starlette(lifespan=broken)):
        pytest.fail("it did not start")


def test_a_server_ends_with_its_block() -> None:
    with serve(StandIn().app) as url:
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/models", trust_env=False)
