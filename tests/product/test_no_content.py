"""Content of all three APIs, and keys, reach no log line, record, metric, or page, with everything logged at debug."""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from tests.kit.client import CHAT, JSON, ask
from tests.kit.messages import words
from tests.kit.program import call, program, write_config
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, stream_head, streamed
from tests.kit.scripted import PROFILE, key_hash
from tests.kit.waiting import until

CANARY = "canary-7f3a91"
KEY, ADMIN = f"sk-{CANARY}-caller", f"sk-{CANARY}-admin"
PATHS = {"chat": CHAT, "responses": "/v1/responses", "messages": "/v1/messages"}
FAILURES = ("400", "401", "overflow", "500", "odd", "cut")
MODELS = ("well", *FAILURES, KEY, f"tell me {CANARY}", f"{CANARY} " * 700, f"openai/{KEY}", f"<{CANARY}>")
"""The upstream fails as the model's name says. The last ones are texts that a client sends as a model by mistake."""


def said(place: str) -> str:
    return f"{place}: {CANARY}"


ARGUMENTS = json.dumps({"path": said("argument")})
SECRETS = {"user": said("user"), "metadata": {"note": said("metadata")}, f"field-{CANARY}": said("unknown field")}

CHAT_ANSWER: dict[str, Any] = {
    "content": said("answer"),
    "reasoning_content": said("reasoning"),
    "tool_calls": [{"index": 0, "id": "c9", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}],
}
ITEMS: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": said("encrypted")},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": ARGUMENTS},
]
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": said("thinking"), "signature": said("signature")},
    {"type": "redacted_thinking", "data": said("redacted")},
    {"type": "tool_use", "id": "c1", "name": "f", "input": {"path": said("argument")}},
]


def conversation(api: str, turns: int) -> dict[str, Any]:
    """Return a body with content in every place. ``turns`` are 1,000 tokens each."""
    texts = [{"role": "user", "content": f"{said('user')} {words(1_000, f'{api}{n}')}"} for n in range(turns)]
    last = {"role": "user", "content": said("question")}
    described = {"name": "f", "description": said("description")}
    if api == "chat":
        called = {**CHAT_ANSWER, "role": "assistant", "content": None}
        result = {"role": "tool", "tool_call_id": "c9", "content": said("result")}
        system = {"role": "system", "content": said("system")}
        tools = [{"type": "function", "function": described}]
        return {**SECRETS, "messages": [system, *texts, called, result, last], "tools": tools}
    if api == "responses":
        output = {"type": "function_call_output", "call_id": "c1", "output": said("result")}
        tools = [{"type": "function", **described, "parameters": {}}]
        input_ = [*texts, *ITEMS, output, {"type": "odd", "odd": said("unknown item")}, last]
        return {**SECRETS, "instructions": said("system"), "input": input_, "tools": tools}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": said("result")}
    turn = [{"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [result]}, last]
    tools = [{**described, "input_schema": {}}]
    return {**SECRETS, "system": said("system"), "max_tokens": 500, "messages": [*texts, *turn], "tools": tools}


def answered(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer with content in every place, and the events of the same answer as a stream."""
    if path == "/v1/responses":
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said("answer")}]}
        whole: dict[str, Any] = {"id": "resp_1", "status": "completed", "output": [*ITEMS, message]}
        added = [{"type": "response.output_item.done", "output_index": 0, "item": item} for item in whole["output"]]
        return whole, [*added, {"type": "response.completed", "response": whole}]
    if path == "/v1/messages":
        whole = {"type": "message", "content": [*BLOCKS, {"type": "text", "text": said("answer")}]}
        started = [{"type": "content_block_start", "index": 0, "content_block": one} for one in whole["content"]]
        return whole, [{"type": "message_start", "message": {}}, *started, {"type": "message_stop"}]
    choice = {"index": 0, "finish_reason": "stop"}
    whole = {"choices": [{**choice, "message": CHAT_ANSWER}], "usage": {"prompt_tokens": 9, "note": said("usage")}}
    return whole, [{"choices": [{**choice, "delta": CHAT_ANSWER}]}]


def script(arrived: Arrived) -> Sequence[Step]:
    body = json.loads(arrived.body)
    model = body["model"]
    echo = {"message": f"no: {arrived.body.decode()} {arrived.head.decode('latin-1')}", "type": "x", "code": "odd"}
    if b"<transcript>" in arrived.body and model != "well":
        return [answer(json.dumps({"error": echo}).encode(), "500 Oh No")]
    whole, events = answered(arrived.target.split("?")[0])
    if model == "overflow" and len(arrived.body) > 30_000:
        over = {**echo, "message": f"prompt is too long: 90000 tokens > 6000 maximum ({said('error')})"}
        return [answer(json.dumps({"type": "error", "error": over}).encode(), "400 Bad Request")]
    if model in ("400", "401", "500"):
        return [answer(json.dumps({"error": echo}).encode(), f"{model} {CANARY}", [(f"x-{CANARY}", said("header"))])]
    if model == "odd":
        return [answer(arrived.body, "200 OK", [("content-type", said("type"))])]
    parts = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    if model == "cut":
        return [stream_head(), chunk(parts[0]), chunk(parts[0][:30]), 0.01, End.RESET]
    return streamed(parts) if body.get("stream") else [answer(json.dumps(whole).encode())]


def settings(upstream: str) -> dict[str, Any]:
    main = {"base_url": f"{upstream}/v1", "api_key": f"sk-{CANARY}-main", "speaks": list(PATHS)}
    return {
        "log": {"level": "debug", "requests": "all"},
        "auth": {"mode": "keys"},
        "admin": {"keys": [key_hash(ADMIN)]},
        "upstreams": {"main": {**main, "headers": {"x-note": said("configured header")}}},
        "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
        # The page of a request shows archived messages to those who may read them, so nothing is archived here.
        "policies": {"default": {"archive": None}},
        "teams": {"blue": {"keys": [key_hash(KEY)]}},
    }


def test_no_content_is_logged_recorded_or_counted(tmp_path: Path) -> None:
    ids: dict[tuple[str, str, str], str] = {}
    with RawUpstream(script) as upstream, program(write_config(settings(upstream.url), tmp_path)) as server:

        def send(api: str, model: str, turns: int = 0, *, stream: bool = False, key: str = KEY) -> None:
            body = {"model": model, **conversation(api, turns), **({"stream": True} if stream else {})}
            headers = [JSON, ("authorization", f"Bearer {key}"), ("anthropic-beta", CANARY), ("x-note", CANARY)]
            got = ask(server.url, f"{PATHS[api]}?note={CANARY}", json.dumps(body).encode(), headers)
            ids[api, model[:30], f"{turns} {stream} {key}"] = got.header("x-compaction-id") or ""

        for api in PATHS:
            for model in MODELS:
                send(api, model)
                send(api, model, stream=True)
            for model in ("well", "400", "overflow", KEY):
                send(api, model, 16)
            send(api, "well", key=f"{KEY}-unknown")
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            shown = pages(http, ids, tmp_path)
    log = server.log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    finished = {line["request"]: line for line in lines if line["event"] == "request.finished"}
    assert [name for name, id in ids.items() if id not in finished] == []
    assert {line["level"] for line in lines} >= {"debug", "info", "warning"}
    verdicts = {(finished[id]["api"], finished[id]["verdict"]) for id in ids.values()}
    assert verdicts >= {(api, "compacted") for api in PATHS}
    assert finished[ids["chat", "well", f"0 False {KEY}"]]["model"] == "well"
    for api in PATHS:
        assert finished[ids[api, KEY, f"0 True {KEY}"]]["model"] == "(hidden)"
    for name, text in {**shown, "the log": log}.items():
        assert CANARY not in text, (name, text[max(0, text.index(CANARY) - 300) :][:600])


def pages(http: httpx.Client, ids: Mapping[Any, str], folder: Path) -> dict[str, str]:
    """Return everything that the proxy shows of requests, by its path."""
    session = http.post("/compaction/sign-in", data={"key": ADMIN}).headers["set-cookie"].split(";")[0]
    http.cookies.clear()
    both = {"authorization": f"Bearer {ADMIN}", "cookie": session}
    last = f"/compaction/requests/{list(ids.values())[-1]}"
    assert until(lambda: http.get(last, headers=both).status_code == 200)
    paths = [
        *(f"/compaction/{page}/{id}" for id in islice(ids.values(), None, None, 3) for page in ("requests", "view")),
        "/compaction/requests?limit=1000",
        "/compaction/requests?model=(hidden)",
        "/compaction/report?by=team,model,upstream,api",
        "/compaction/status",
        "/compaction/",
        "/metrics",
    ]
    shown = {}
    for path in paths:
        got = http.get(path, headers=both)
        assert got.status_code == 200, (path, got.text)
        shown[path] = got.text
    assert len(json.loads(shown["/compaction/requests?model=(hidden)"])["data"]) >= 3 * 10
    shown["show"] = call(folder, "show", next(iter(ids.values())), "--config", "config.yaml").stdout
    return shown
