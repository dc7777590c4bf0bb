"""Faults of translations between APIs that users of other proxies and servers reported in public, tried over HTTP.

Each case names its reports as ``repository#number``. The comments say what the reporters saw, in our words.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.server.loopback import serve
from tests.kit.odd_answers import FRAME, USAGE, Object, Said, Sent, chunk, stream
from tests.kit.scripted import PROFILE, proxied
from tests.kit.three_apis import PATHS, Answer, event
from tests.product.properties.test_odd_answers import Clients
from tests.product.test_answer_forms import check
from tests.product.test_bridged_answers import clients
from tests.product.test_over_responses import ARGUMENTS, CALL, MADE_CALL, delta, item, merged, said, text
from tests.product.test_over_responses import USAGE as TOKENS

Items = list[Any]


# Answers of chat completions, read by clients of the other two APIs.


def call(index: int | None = 0, name: str | None = None, arguments: str = "", **fields: Any) -> Object:
    """Return a delta with a part of a call."""
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{**({} if index is None else {"index": index}), "function": function, **fields}]}


HI = {"role": "assistant", "content": "hi"}
CALLED = [("get", {"a": 1})]
WHOLE_CALL = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
OTHER_CALL = {"id": "d", "type": "function", "function": {"name": "put", "arguments": '{"b": 2}'}}


def choice(index: int, reason: str | None = None, **fields: Any) -> Object:
    return {"index": index, "finish_reason": reason, **fields}


SPLIT = [
    choice(0, "tool_calls", message=HI),
    choice(0, "tool_calls", message={"role": "assistant", "tool_calls": [WHOLE_CALL]}),
    choice(0, "tool_calls", message={"role": "assistant", "tool_calls": [OTHER_CALL]}),
]
STATED = {"object": "chat.completion", "usage": USAGE, **{name: FRAME[name] for name in ("id", "created", "model")}}
ANSWERS: list[tuple[str, Sent | Object, Said]] = [
    # Copilot puts the text and each call of a Claude model into choices of their own, and only the text arrived.
    (
        "copilot-api#81, zeroclaw#2136, nanobot#1555, gptel#1284, langchain4j#4947",
        {**STATED, "choices": [{**one, "index": number} for number, one in enumerate(SPLIT)]},
        Said(text="hi", calls=[*CALLED, ("put", {"b": 2})], end="tool_calls"),
    ),
    ("copilot-api#81", {**STATED, "choices": SPLIT[:2]}, Said(text="hi", calls=CALLED, end="tool_calls")),
    ("copilot-api#81", {**STATED, "choices": SPLIT[1::-1]}, Said(text="hi", calls=CALLED, end="tool_calls")),
    # OpenRouter streams the calls of a Claude model under another choice than the text.
    (
        "claude-code-router#129",
        stream(
            chunk(HI),
            {**FRAME, "choices": [choice(1, delta=call(name="get", id="c"))]},
            {**FRAME, "choices": [choice(1, delta={"content": None, **call(arguments='{"a": 1}')})]},
            {**FRAME, "choices": [choice(1, "tool_calls", delta={"content": ""})]},
        ),
        Said(text="hi", calls=CALLED, end="tool_calls"),
    ),
    # Usage with each chunk ended the call's block, and its arguments were lost.
    (
        "CLIProxyAPI#5419",
        stream(
            chunk(call(name="get", id="c"), usage=USAGE),
            chunk(call(arguments='{"a"'), usage=USAGE),
            chunk(call(arguments=": 1}"), "tool_calls", usage=USAGE),
        ),
        Said(calls=CALLED, end="tool_calls"),
    ),
    # Each chunk of reasoning had a finish reason, so clients stopped before the answer.
    (
        "open-webui#16377",
        stream(chunk({"reasoning_content": "hm"}, "stop"), chunk(HI, "stop"), chunk({}, "stop")),
        Said("hm", "hi"),
    ),
    (
        "local-operator#223",
        stream(chunk(call(name="get", arguments='{"a'), "error", error={"code": 502, "message": "No."})),
        Said(end="error"),
    ),
    # Only OpenRouter's own reason says that the provider failed, so the user saw an empty answer.
    (
        "pi#8511",
        stream({**FRAME, "choices": [choice(0, "stop", delta={"content": ""}, native_finish_reason="network_error")]}),
        Said(end="error"),
    ),
    (
        "pi#8511",
        {**STATED, "choices": [choice(0, "stop", message={"content": ""}, native_finish_reason="network_error")]},
        Said(end="error"),
    ),
    # The arguments go on after reasoning or a text has begun, and the stream broke.
    (
        "vllm#52418, vllm#55284",
        stream(
            chunk(call(name="get", arguments='{"a"', id="c")),
            chunk({"reasoning": "hm"}),
            chunk(call(arguments=": 1}")),
            chunk({}, "tool_calls"),
        ),
        Said("hm", calls=CALLED, end="tool_calls"),
    ),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("report", "answer", "expected"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_chat_answers_arrive(
    report: str, answer: Sent | Object, expected: Said, streamed: bool, front: Clients
) -> None:
    check(front, answer, expected, streamed=streamed)


# Answers of ``/v1/responses``, read by clients of the other two APIs.

THOUGHT = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
SECOND = {**CALL, "id": "fd", "call_id": "c2"}
SECOND_CALL = {**MADE_CALL, "id": "c2"}


def turned(*events: Object) -> Items:
    """Return events with other ids each."""
    return json.loads(json.dumps(events).replace('"r"', '"x"').replace('"fc"', '"y"').replace('"msg_1"', '"z"'))  # type: ignore[no-any-return]


RESPONSES: list[tuple[str, Items, Items, Object, str]] = [
    # All calls had the index 0.
    (
        "litellm#21331",
        [CALL, SECOND],
        [
            item(0, {**CALL, "arguments": ""}, "added"),
            item(1, {**SECOND, "arguments": ""}, "added"),
            delta(ARGUMENTS, 1, '{"a": '),
            delta(ARGUMENTS, 0, '{"a": 1}'),
            delta(ARGUMENTS, 1, "1}"),
        ],
        {"tool_calls": [MADE_CALL, SECOND_CALL]},
        "tool_calls",
    ),
    # Copilot gives an item another id in each event.
    (
        "vercel/ai#18548, litellm#30071, copilot-api#72",
        [THOUGHT, said(text("Hello")), CALL],
        [
            item(0, {**THOUGHT, "summary": []}, "added"),
            *turned(delta("reasoning_summary_text", 0, "hm", item_id="r", summary_index=0), item(0, THOUGHT)),
            item(1, said(), "added"),
            *turned(delta("output_text", 1, "Hello", item_id="msg_1"), item(1, said(text("Hello")))),
            item(2, {**CALL, "arguments": ""}, "added"),
            *turned(delta(ARGUMENTS, 2, CALL["arguments"], item_id="fc"), item(2, CALL)),
        ],
        {"reasoning_content": "hm", "content": "Hello", "tool_calls": [MADE_CALL]},
        "tool_calls",
    ),
    # An item is null or missing, and the client failed.
    (
        "openai-python#3126",
        [said(text("Hello"))],
        [
            {"type": "response.output_item.added", "output_index": 0, "item": None},
            {"type": "response.output_item.added", "output_index": 0},
            item(1, said(), "added"),
            delta("output_text", 1, "Hello"),
        ],
        {"content": "Hello"},
        "stop",
    ),
    # Several items had the same place, and blocks collided.
    (
        "CLIProxyAPI#539",
        [CALL, THOUGHT],
        [
            item(0, {**CALL, "arguments": ""}, "added"),
            delta(ARGUMENTS, 0, CALL["arguments"]),
            item(0, CALL),
            delta("reasoning_summary_text", 0, "hm", summary_index=0),
            delta("output_text", 0, "Hello"),
        ],
        {"reasoning_content": "hm", "content": "Hello", "tool_calls": [MADE_CALL]},
        "tool_calls",
    ),
]


class Door:
    """A proxy in front of two upstreams, ``chat`` and ``responses``, which have one API each. ``made`` is an answer."""

    def __init__(self) -> None:
        self.sent: list[Object] = []
        self.made: tuple[bytes, bytes] | None = None
        self.app = Starlette(
            routes=[Route(PATHS[api], self._answer, methods=["POST"]) for api in ("chat", "responses")]
        )
        self.http = httpx.Client(trust_env=False, timeout=60)

    async def _answer(self, request: Request) -> Response:
        raw = await request.body()
        api, body = "chat" if "chat" in request.url.path else "responses", json.loads(raw)
        events, whole = Answer("Goal: the answers. Next step: go on.").parts(api, stream=body.get("stream", False))
        streamed = b"".join(events)
        self.sent.append(body)
        streamed, whole = self.made or (streamed, whole)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        return Response(streamed if body.get("stream") else whole, media_type=kind)

    def ask(self, api: str, behind: str, units: Items, **fields: Any) -> httpx.Response:
        """Send a request to an upstream that has the API ``behind``."""
        name = "input" if api == "responses" else "messages"
        limit = {"max_tokens": 500} if api == "messages" else {}
        return self.http.post(PATHS[api], json={"model": behind, name: units, **limit, **fields})

    def send(self, api: str, behind: str, units: Items, **fields: Any) -> Object:
        """Return the request that the upstream gets."""
        answered = self.ask(api, behind, units, **fields)
        assert answered.status_code == 200, answered.text
        return self.sent[-1]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    door = Door()
    with serve(door.app) as url, door.http:
        settings = {
            "upstreams": {
                api: {"base_url": f"{url}/v1", "speaks": [api], "api_key": "k", "ask_limits": False}
                for api in ("chat", "responses")
            },
            "models": [{"match": f"{api}*", "upstream": api, "profile": PROFILE} for api in ("chat", "responses")],
            "policies": {"default": {"prepare": None}},
        }
        with proxied(settings, tmp_path_factory.mktemp("reports")) as entrance:
            door.http.base_url = entrance
            door.http.headers["authorization"] = "Bearer k"
            yield door


@pytest.mark.parametrize(
    ("report", "output", "events", "expected", "reason"), RESPONSES, ids=[row[0] for row in RESPONSES]
)
def test_responses_arrive(report: str, output: Items, events: Items, expected: Object, reason: str, door: Door) -> None:
    kind = "incomplete" if reason == "length" else "completed"
    made = {"id": "resp_1", "object": "response", "created_at": 7, "model": "m", "status": kind, "output": output}
    made |= {"usage": TOKENS, "incomplete_details": {"reason": "max_output_tokens"} if reason == "length" else None}
    last = {"type": f"response.{kind}", "response": made}
    door.made = b"".join(map(event, [*events, last])), json.dumps(made).encode()
    question: Items = [{"role": "user", "content": "Hello"}]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        lines = door.ask("chat", "responses", question, **more).text.split("\n\n")
        with clients(str(door.http.base_url)) as (claude, _):
            asked: Any = {"model": "responses", "max_tokens": 5, "messages": question}
            with claude.messages.stream(**asked) as stream:
                message = stream.get_final_message()
    finally:
        door.made = None
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert (merged(chunks), chunks[-2]["choices"][0]["finish_reason"]) == (expected, reason)
    assert chunks[-1]["usage"]["prompt_tokens"] == 90
    told: Object = {"reasoning_content": "", "content": "", "tool_calls": []}
    for block in message.content:
        told["reasoning_content"] += block.thinking if block.type == "thinking" else ""
        told["content"] += block.text if block.type == "text" else ""
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            told["tool_calls"].append({"id": block.id, "type": "function", "function": function})
    assert {name: value for name, value in told.items() if value} == expected
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (26, 64)
    assert message.stop_reason == {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")


# Requests, as they came and compacted.


# Requests of another form.

MISSHAPEN = [
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0]'"),
    ("messages", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "'messages[0].content[0]'"),
    ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "needs 'id'"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs 'tool_use_id'"),
    ("messages", {"system": 5}, "'system'"),
    ("messages", {"system": [{"type": "text"}]}, "'system[0]' needs 'text'"),
    ("messages", {"tools": [{}]}, "'tools[0]' needs 'name'"),
    ("messages", {"tools": [{"name": "x", "input_schema": "x"}]}, "'tools[0].input_schema'"),
    ("messages", {"thinking": True}, "'thinking'"),
    ("messages", {"metadata": "x"}, "'metadata'"),
    ("messages", {"output_config": {"format": "json"}}, "'output_config.format'"),
    ("responses", {"input": [{"type": "reasoning", "summary": ["x"]}]}, "'input[0].summary[0]'"),
    ("responses", {"tools": [{"type": "function", "name": "x", "parameters": "x"}]}, "'tools[0].parameters'"),
    ("responses", {"tools": [{"type": "namespace", "name": "x", "tools": [None]}]}, "'tools[0].tools[0]'"),
    ("responses", {"tool_choice": {"type": "allowed_tools", "allowed_tools": "x"}}, "'tool_choice.allowed_tools'"),
    ("responses", {"text": {"format": "json"}}, "'text.format'"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "needs 'image_url'"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "file", "file": "x"}]}]},
        "'messages[0].content[0].file'",
    ),
    ("chat", {"messages": [{"content": "x"}]}, "'messages[0]' needs 'role'"),
    ("chat", {"stream_options": "x"}, "'stream_options'"),
]


@pytest.mark.parametrize(("api", "fields", "named"), MISSHAPEN, ids=[str(row[1])[:60] for row in MISSHAPEN])
def test_a_misshapen_part_is_named(api: str, fields: Object, named: str, door: Door) -> None:
    name, count = "input" if api == "responses" else "messages", len(door.sent)
    asked = {name: [{"role": "user", "content": "Hello"}], **fields}
    answered = door.ask(api, "responses" if api == "chat" else "chat", asked.pop(name), **asked)
    assert (answered.status_code, len(door.sent)) == (400, count)
    assert named in answered.json()["error"]["message"]


LENIENT: list[tuple[str, Object, Object]] = [
    ("messages", {"tool_choice": "auto", "tools": [{"name": "x"}]}, {"tool_choice": "auto"}),
    ("messages", {"stop_sequences": "x"}, {"stop": "x"}),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": -1}}, {}),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": "x"}}, {}),
    ("responses", {"tool_choice": "x", "tools": [{"type": "function", "name": "x"}]}, {"tool_choice": "x"}),
    ("chat", {"stop": 5, "user": 5}, {"user": 5}),
]
"""Requests that go on, so that the upstream decides."""


@pytest.mark.parametrize(("api", "fields", "passed"), LENIENT, ids=[str(row[1])[:60] for row in LENIENT])
def test_other_values_go_on(api: str, fields: Object, passed: Object, door: Door) -> None:
    sent = door.send(api, "responses" if api == "chat" else "chat", [{"role": "user", "content": "Hello"}], **fields)
    assert {name: sent[name] for name in passed} == passed
