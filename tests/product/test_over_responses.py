"""Chat completions in front of an upstream that has only ``/v1/responses``, with all that these requests can have."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.kit.combinations import combined
from tests.kit.three_apis import event
from tests.product.test_bridged_answers import HELLO, client, clients, entrance, message

USAGE = {
    "input_tokens": 90,
    "input_tokens_details": {"cached_tokens": 64},
    "output_tokens": 10,
    "output_tokens_details": {"reasoning_tokens": 4},
    "total_tokens": 100,
}
DATA = "QUJD"
FRAME = {"id": "resp_1", "object": "response", "created_at": 7, "model": "m"}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [*parts]}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "output_text", "text": value, "annotations": [], **fields}


class Upstream:
    """An upstream that gives the same answer to each request, and remembers their bodies."""

    def __init__(self, *output: dict[str, Any], events: list[dict[str, Any]] | None = None, **fields: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.made = {**FRAME, "status": "completed", "output": [*output], "usage": USAGE, **fields}
        begun = {"type": "response.created", "response": {**FRAME, "status": "in_progress", "output": []}}
        ended = {"type": f"response.{self.made['status']}", "response": self.made}
        self.events = [begun, *(events or []), ended]
        self.app = Starlette(routes=[Route("/v1/responses", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(body := await request.json())
        if body["stream"]:
            return Response(b"".join(map(event, self.events)), media_type="text/event-stream")
        return Response(json.dumps(self.made), media_type="application/json")


def send(folder: Path, upstream: Upstream, **fields: Any) -> httpx.Response:
    with (
        entrance(upstream.app, folder, speaks=["responses"]) as url,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        return http.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": HELLO, **fields})


FUNCTION_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CUSTOM_CALL = {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}", "detail": "low"}}
SENT_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "low"}
AUDIO = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
UNKNOWN = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QUJD"}}


def user(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content], **fields}


MESSAGES: dict[str, tuple[list[Any], list[Any]]] = {
    "roles": (
        [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, *HELLO],
        [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, *HELLO],
    ),
    "audio": ([user(AUDIO)], [user(AUDIO)]),
    "a part without an equivalent": ([user(UNKNOWN)], [user(UNKNOWN)]),
    "a file": (
        [user({"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"}})],
        [user({"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{DATA}"})],
    ),
    "a name": ([{"role": "user", "content": "Hi.", "name": "ann"}], [{"role": "user", "content": "ann: Hi."}]),
    "a refusal among parts": (
        [{"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "refusal", "refusal": "No."}]}],
        [
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "A"}, {"type": "refusal", "refusal": "No."}],
            }
        ],
    ),
    "reasoning": (
        [{"role": "assistant", "content": "A", "reasoning_content": "Hm."}, *HELLO],
        [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"role": "assistant", "content": "A"},
            *HELLO,
        ],
    ),
    "calls and results": (
        [
            {"role": "assistant", "content": "A", "tool_calls": [FUNCTION_CALL, CUSTOM_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "B"}, IMAGE], "name": "look"},
            {"role": "tool", "tool_call_id": "c2", "content": "C"},
        ],
        [
            {"role": "assistant", "content": "A"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "B"}, SENT_IMAGE],
            },
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "C"},
        ],
    ),
    "functions of old clients": (
        [
            {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
            {"role": "function", "name": "look", "content": "B"},
        ],
        [
            {"type": "function_call", "call_id": "call_0", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_0", "output": "B"},
        ],
    ),
    "images that were made": (
        [{"role": "assistant", "content": "A", "images": [IMAGE]}, *HELLO],
        [{"role": "assistant", "content": "A"}, user(SENT_IMAGE), *HELLO],
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_become_items(name: str, tmp_path: Path) -> None:
    messages, items = MESSAGES[name]
    upstream = Upstream(said(text("Done.")))
    assert send(tmp_path, upstream, messages=messages).status_code == 200
    assert upstream.bodies[0]["input"] == items


SCHEMA = {"type": "object", "properties": {"type": {"type": "string"}}}
FORMAT = {"name": "out", "schema": SCHEMA, "strict": True}
GRAMMAR = {"syntax": "lark", "definition": "start: WORD"}
LOOK = {"type": "function", "name": "look"}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": ({"max_tokens": 90}, {"max_output_tokens": 90}),
    "effort": ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}),
    "format and verbosity": (
        {"response_format": {"type": "json_schema", "json_schema": FORMAT}, "verbosity": "low"},
        {"text": {"verbosity": "low", "format": {"type": "json_schema", **FORMAT}}},
    ),
    "tools": (
        {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}]},
        {"tools": [{**LOOK, "parameters": SCHEMA, "strict": True}]},
    ),
    "custom": (
        {"tools": [{"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": GRAMMAR}}}]},
        {"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar", **GRAMMAR}}]},
    ),
    "functions": (
        {"functions": [{"name": "look"}], "function_call": {"name": "look"}},
        {"tools": [{**LOOK, "strict": False}], "tool_choice": LOOK, "parallel_tool_calls": False},
    ),
    "choice": ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, {"tool_choice": LOOK}),
    "required": (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    "allowed": (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]},
            }
        },
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [LOOK]}},
    ),
    "search": (
        {"web_search_options": {"user_location": {"type": "approximate", "approximate": {"city": "Oslo"}}}},
        {"tools": [{"type": "web_search", "user_location": {"type": "approximate", "city": "Oslo"}}]},
    ),
    "dropped": ({"seed": 1, "stop": "x", "presence_penalty": 1, "logprobs": True, "top_k": 3, "n": 1}, {}),
    "kept": (
        {"temperature": 0.5, "user": "u", "metadata": {"a": "b"}, "service_tier": "flex"},
        {"temperature": 0.5, "user": "u", "metadata": {"a": "b"}, "service_tier": "flex"},
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_a_request(name: str, tmp_path: Path) -> None:
    fields, expected = FIELDS[name]
    upstream = Upstream(said(text("Done.")))
    assert send(tmp_path, upstream, **fields).status_code == 200
    fixed = {"model": "m", "input": HELLO, "stream": False, "store": False}
    assert upstream.bodies[0] == {**fixed, **expected}


def test_a_reference_to_audio_is_refused(tmp_path: Path) -> None:
    upstream = Upstream()
    spoken = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    answered = send(tmp_path, upstream, messages=[*HELLO, spoken, *HELLO])
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, "messages[1].audio")


@pytest.mark.parametrize("fields", [{"n": 2}, {"modalities": ["text", "audio"]}])
def test_fields_that_would_lose_a_part_of_the_answer_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    upstream = Upstream()
    answered = send(tmp_path, upstream, **fields)
    assert (answered.status_code, answered.json()["error"]["param"], upstream.bodies) == (400, next(iter(fields)), [])


def delta(kind: str, place: int, value: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}.delta", "output_index": place, "delta": value, **fields}


def item(place: int, value: dict[str, Any], step: str = "done") -> dict[str, Any]:
    return {"type": f"response.output_item.{step}", "output_index": place, "item": value}


CITED = {"type": "url_citation", "url": "https://a.b", "title": "T", "start_index": 0, "end_index": 5}
CITATION = {"type": "url_citation", "url_citation": {name: CITED[name] for name in CITED if name != "type"}}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": one} for one in ("A", "B")]}
CALL = {"type": "function_call", "id": "fc", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
CUSTOM = {"type": "custom_tool_call", "id": "ct", "call_id": "c2", "name": "patch", "input": "*** Begin"}
HOSTED = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}
INPUT = "custom_tool_call_input"
ARGUMENTS = "function_call_arguments"
MADE_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}

ANSWERS: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "done without deltas": (
        [said(text("Hello"))],
        [{"type": "response.output_text.done", "output_index": 0, "text": "Hello"}, item(0, said(text("Hello")))],
        {"content": "Hello"},
    ),
    "only the last event": ([THOUGHT, said(text("Hello")), CALL], [], {"content": "Hello", "tool_calls": [MADE_CALL]}),
    "unknown events and items": (
        [HOSTED, said(text("Hello"))],
        [item(0, HOSTED), {"type": "response.new.thing"}, {"no": "type"}, delta("output_text", 1, "Hello")],
        {"content": "Hello"},
    ),
    "several messages": (
        [said(text("One")), said(text("Two"))],
        [delta("output_text", 0, "One"), delta("output_text", 1, "T"), delta("output_text", 1, "wo")],
        {"content": "One\n\nTwo"},
    ),
    "summaries": (
        [THOUGHT, said(text("Hello"))],
        [delta("reasoning_summary_text", 0, "A", summary_index=0), item(0, THOUGHT), item(1, said(text("Hello")))],
        {"content": "Hello", "reasoning_content": "A\n\nB"},
    ),
    "a refusal": (
        [said({"type": "refusal", "refusal": "No."})],
        [delta("refusal", 0, "No"), {"type": "response.refusal.done", "output_index": 0, "refusal": "No."}],
        {"refusal": "No."},
    ),
    "annotations": (
        [said(text("Hello", annotations=[CITED]))],
        [
            delta("output_text", 0, "Hello"),
            {"type": "response.output_text.annotation.added", "output_index": 0, "annotation": CITED},
            item(0, said(text("Hello", annotations=[CITED]))),
        ],
        {"content": "Hello", "annotations": [CITATION]},
    ),
    "calls": (
        [CALL, CUSTOM],
        [
            item(0, {**CALL, "arguments": ""}, "added"),
            delta(ARGUMENTS, 0, '{"a"'),
            item(1, {**CUSTOM, "input": ""}, "added"),
            delta(INPUT, 1, "*** "),
            delta(ARGUMENTS, 0, ": 1}"),
            {"type": f"response.{INPUT}.done", "output_index": 1, "input": "*** Begin"},
            item(0, CALL),
            item(1, CUSTOM),
        ],
        {
            "tool_calls": [
                MADE_CALL,
                {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}},
            ]
        },
    ),
}


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream."""
    made: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for call in value:
                        held = calls.setdefault(call.pop("index"), {})
                        for field, inner in call.items():
                            before = held.get(field, {})
                            fields = inner.items() if isinstance(inner, dict) else ()
                            held[field] = (
                                before | {key: before.get(key, "") + v for key, v in fields} if fields else inner
                            )
                elif name != "role":
                    made[name] = made[name] + value if name in made else value
    return {name: value for name, value in made.items() if value} | ({"tool_calls": [*calls.values()]} if calls else {})


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str, tmp_path: Path) -> None:
    output, events, expected = ANSWERS[name]
    upstream = Upstream(*output, events=events)
    with entrance(upstream.app, tmp_path, speaks=["responses"]) as url, httpx.Client(trust_env=False) as http:
        asked = {"model": "m", "messages": HELLO}
        whole = http.post(f"{url}/v1/chat/completions", json=asked).json()
        more = {"stream": True, "stream_options": {"include_usage": True}}
        lines = http.post(f"{url}/v1/chat/completions", json=asked | more).text.split("\n\n")
    message = {name: value for name, value in whole["choices"][0]["message"].items() if value and name != "role"}
    *chunks, done, _ = [line.removeprefix("data: ") for line in lines]
    assert done == "[DONE]"
    decoded = [json.loads(chunk) for chunk in chunks]
    reason = "tool_calls" if "tool_calls" in expected else "stop"
    if name == "only the last event":
        expected = {**expected, "reasoning_content": "A\n\nB"}
    assert (message, whole["choices"][0]["finish_reason"]) == (expected, reason)
    assert (merged(decoded), decoded[-2]["choices"][0]["finish_reason"]) == (expected, reason)
    assert whole["usage"] == decoded[-1]["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert (whole["created"], whole["id"], decoded[0]["id"]) == (7, "resp_1", "resp_1")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_with_functions_get_a_function_call(stream: bool, tmp_path: Path) -> None:
    upstream = Upstream(CALL, events=[item(0, {**CALL, "arguments": ""}, "added"), delta(ARGUMENTS, 0, '{"a": 1}')])
    with entrance(upstream.app, tmp_path, speaks=["responses"]) as url, client(url) as gpt:
        asked: Any = {"model": "m", "messages": HELLO, "functions": [{"name": "look"}]}
        if stream:
            choices = [chunk.choices[0] for chunk in gpt.chat.completions.create(**asked, stream=True)]
            calls = [one.delta.function_call for one in choices if one.delta.function_call]
            name, arguments = calls[0].name, "".join(call.arguments for call in calls)
            reason = choices[-1].finish_reason
        else:
            choice = gpt.chat.completions.create(**asked).choices[0]
            name, arguments = choice.message.function_call.name, choice.message.function_call.arguments
            reason = choice.finish_reason
    assert (name, arguments, reason) == ("look", '{"a": 1}', "function_call")


SPOKEN = "One </ block> two </block> three STOP four"


def ended(folder: Path, pieces: list[str], *, api: str, stream: bool, stop: Any) -> tuple[str, str | None]:
    """Return the text that a client gets of an answer in pieces, and the name of its end."""
    upstream = Upstream(said(text(SPOKEN)), events=[delta("output_text", 0, piece) for piece in pieces])
    with entrance(upstream.app, folder, speaks=["responses"]) as url, clients(url) as (claude, gpt):
        if api == "messages":
            made = message(claude, stream=stream, stop_sequences=[stop] if isinstance(stop, str) else stop)
            return "".join(block.text for block in made.content), made.stop_sequence or made.stop_reason
        answer = gpt.chat.completions.create(model="m", messages=HELLO, stop=stop, stream=stream)  # type: ignore[call-overload]
        if not stream:
            return answer.choices[0].message.content or "", answer.choices[0].finish_reason
        *texts, last = [chunk.choices[0] for chunk in answer]
        return "".join(one.delta.content or "" for one in (*texts, last)), last.finish_reason


STOPS = [("</block>", 18), (["STOP", "", "</block>"], 18), (["One"], 0), ("</blocks>", None)]


@pytest.mark.parametrize(("stops", "api", "stream"), combined(2, STOPS, ["chat", "messages"], [False, True]))
def test_an_answer_ends_at_a_stop_that_the_upstream_has_no_field_for(
    tmp_path: Path, api: str, stream: bool, stops: tuple[Any, int | None]
) -> None:
    stop, end = stops
    # LiteLLM#33075: Claude Code's classifier sends a stop sequence, and reads on if a model of OpenAI's does.
    matched = "One" if end == 0 else "</block>"
    expected = {"chat": "stop", "messages": "end_turn" if end is None else matched}[api]
    for size in (1, 5, len(SPOKEN)) if stream else (1,):
        pieces = [SPOKEN[place : place + size] for place in range(0, len(SPOKEN), size)]
        (folder := tmp_path / str(size)).mkdir()
        assert ended(folder, pieces, api=api, stream=stream, stop=stop) == (SPOKEN[:end], expected)
