"""Conversations whose answers the client repeats only as references, as the Vercel AI SDK does by default."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from proxy.server.loopback import serve
from proxy.store.items import KIND
from proxy.store.sqlite import SqliteStore
from tests.kit.agent_script import SYSTEM, explanation
from tests.kit.response_items import size_of
from tests.kit.scripted import behind, client, proxied
from tests.kit.strict_responses import StrictResponses

WINDOW = 8_000
TURNS = 24
MODEL = "gpt-4.1"
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 1_000, "tokenizer": "o200k_base"}
UNSEEN = "an answer that the proxy has not seen"


@dataclass
class Session:
    """A conversation that grows by one question and the references of its answer in each turn."""

    history: list[Any] = field(default_factory=list)
    part: int = 0

    def ask(self, caller: openai.OpenAI, *, stream: bool = False, **fields: Any) -> int:
        """Ask for the next explanation. Return the size of the prompt that the proxy counted, 0 if it didn't."""
        self.part += 1
        self.history.append({"role": "user", "content": f"Explain part {self.part}"})
        request: Any = {"model": MODEL, "instructions": SYSTEM, "input": self.history, **fields}
        raw = caller.responses.with_raw_response.create(stream=stream, **request)
        counted = int(raw.headers.get("x-compaction-tokens-before", 0))
        parsed = raw.parse()
        if stream:
            *_, last = parsed
            parsed = last.response
        assert parsed.output_text == explanation(self.part)
        self.history += [{"type": "item_reference", "id": item.id} for item in parsed.output]
        return counted


def actual(upstream: StrictResponses, session: Session) -> int:
    """Return the stand-in's size of the newest prompt before compaction."""
    sent = session.history[:-2]  # the references of its answer come after it
    items = [upstream.stored(item["id"]) if item.get("type") == "item_reference" else item for item in sent]
    return size_of({"instructions": SYSTEM}, items)


def within(counted: int, expected: int) -> bool:
    return abs(counted - expected) <= 0.1 * expected


def asked_for_summaries(upstream: StrictResponses) -> str:
    return json.dumps([received.body for received in upstream.chat.summaries])


def seen_by(upstream: StrictResponses) -> Iterator[str]:
    for received in upstream.requests:
        yield json.dumps(received.body)


@pytest.mark.parametrize("compressed", [False, True])
def test_referenced_answers_are_counted_and_summarized(tmp_path: Path, compressed: bool) -> None:
    upstream = StrictResponses(WINDOW)
    app: ASGIApp = GZipMiddleware(upstream.app, minimum_size=10) if compressed else upstream.app
    session = Session()
    counts = []
    with behind(app, tmp_path, profile=PROFILE) as url, client(url) as caller:
        for turn in range(TURNS):
            counted = session.ask(caller, stream=turn % 2 == 1)
            counts.append((counted, actual(upstream, session)))
    assert upstream.faults == []
    assert upstream.refused == []
    counted = [pair for pair in counts if pair[0]]
    assert len(counted) > TURNS / 2
    assert [pair for pair in counted if not within(*pair)] == []
    asked = asked_for_summaries(upstream)
    assert len(upstream.chat.summaries) >= 2
    for part in range(1, 6):
        assert explanation(part)[:80] in asked
    assert UNSEEN not in asked
    last = upstream.conversations[-1].body["input"]
    assert all(UNSEEN not in text for text in seen_by(upstream))
    # The kept answers are still the client's references, or the items without their reasoning.
    references = [item for item in last if item.get("type") == "item_reference"]
    assert references
    assert all(reference in session.history for reference in references)


def test_another_tenant_gets_nothing_of_them(tmp_path: Path) -> None:
    upstream = StrictResponses(50_000)
    session = Session()
    with behind(upstream.app, tmp_path, profile=PROFILE, auth={"mode": "open"}) as url:
        with client(url) as caller:
            for _ in range(6):
                session.ask(caller)
            own = session.ask(caller)
        with client(url, "sk-other") as other:
            assert session.ask(other) < own / 4


def test_without_an_archive_no_item_is_stored_and_the_reported_usage_counts(tmp_path: Path) -> None:
    upstream = StrictResponses(WINDOW)
    session = Session()
    counts = []
    store = {"url": f"sqlite:///{tmp_path}/items.db"}
    policy = {"archive": None}
    with behind(upstream.app, tmp_path, profile=PROFILE, policy=policy, store=store) as url, client(url) as caller:
        for _ in range(TURNS):
            counted = session.ask(caller)
            counts.append((counted, actual(upstream, session)))
    assert upstream.faults == []
    assert len(upstream.refused) <= 1
    # The newest answer has no size until the response to the request that refers to it.
    newest = size_of({}, [upstream.stored(session.history[-1]["id"])])
    assert all(actual * 0.9 - newest <= counted <= actual * 1.1 for counted, actual in counts[8:])
    assert UNSEEN in asked_for_summaries(upstream)
    assert stored_items(tmp_path / "items.db") == 0
    assert b"is explained here" not in (tmp_path / "items.db").read_bytes()


def repeating(of: str) -> tuple[ASGIApp, list[dict[str, Any]]]:
    """An upstream that uses the same ids in all conversations, and the bodies that it gets. ``of`` is its API.

    It calls the tool, if it gets any, and else repeats the first user's message.
    """
    seen: list[dict[str, Any]] = []

    def first_of(messages: list[Any]) -> str:
        return next(message["content"] for message in messages if message.get("role") == "user")

    async def chat(request: Request) -> JSONResponse:
        body = await request.json()
        seen.append(body)
        message: Any = {"role": "assistant", "content": f"You said: {first_of(body['messages'])}"}
        if body.get("tools"):
            call = {"name": "get", "arguments": json.dumps({"of": first_of(body["messages"])})}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "", "type": "function", "function": call}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse({"id": "chatcmpl-7", "object": "chat.completion", "created": 1, "choices": [choice]})

    async def responses(request: Request) -> JSONResponse:
        body = await request.json()
        seen.append(body)
        part = {"type": "output_text", "text": f"You said: {first_of(body['input'])}", "annotations": []}
        message = {"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [part]}
        return JSONResponse({"id": "resp_0", "object": "response", "created_at": 1, "output": [message]})

    routes = [Route("/v1/chat/completions", chat, methods=["POST"])]
    routes += [Route("/v1/responses", responses, methods=["POST"])] if of == "responses" else []
    return Starlette(routes=routes), seen


def asked(url: str, *items: Any, **fields: Any) -> dict[str, Any]:
    """Return the first item of an answer. Each caller here has the same key, or none."""
    answer = httpx.post(f"{url}/v1/responses", json={"model": MODEL, "input": list(items), **fields}, timeout=30)
    assert answer.status_code == 200, answer.text
    item: dict[str, Any] = answer.json()["output"][0]
    return item


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_bridges_ids_are_unique_although_the_upstreams_are_not(tmp_path: Path) -> None:
    app, seen = repeating("chat")
    get = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {}}}
    with serve(app) as upstream:
        settings = {"upstreams": {"main": {"base_url": f"{upstream}/v1", "speaks": ["chat"]}}}
        with proxied(settings, tmp_path) as url:
            ids = [asked(url, said(name))["id"] for name in ("alice", "bob")]
            asked(url, said("bob"), {"type": "item_reference", "id": ids[1]}, said("What did you say?"))
            _, message, _ = seen[-1]["messages"]
            assert message["content"] == "You said: bob"
            calls = [asked(url, said(name), tools=[get]) for name in ("alice", "bob")]
            assert calls[0]["call_id"] != calls[1]["call_id"]
            result = {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": "sunny"}
            asked(url, said("bob"), {"type": "item_reference", "id": calls[1]["id"]}, result, tools=[get])
            _, message, answered = seen[-1]["messages"]
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"of": "bob"}
            assert message["tool_calls"][0]["id"] == answered["tool_call_id"] == calls[1]["call_id"]


@pytest.mark.parametrize("restarted", [False, True])
def test_an_upstreams_id_stands_for_the_item_of_its_own_conversation(restarted: bool, tmp_path: Path) -> None:
    """The upstream uses one id for all answers. Its text is summarized only in the conversation that got it."""
    app, seen = repeating("responses")
    long = " ".join(f"w{number}" for number in range(800))
    sections = {"store": {"url": f"sqlite:///{tmp_path}/items.db"}}
    profile = {**PROFILE, "context_window": 4_000, "max_input_tokens": 4_000}
    reference = {"type": "item_reference", "id": "msg_0"}
    with behind(app, tmp_path, profile=profile, **sections) as url:
        for name in ("alice", "bob"):
            asked(url, said(f"I am {name}. {long}"))
        if not restarted:
            expected = follow_up(url, seen, reference, long)
    if restarted:
        with behind(app, tmp_path, profile=profile, **sections) as url:
            expected = follow_up(url, seen, reference, long)
    answers = {name: f"You said: I am {name}" for name in expected}
    for name, text in expected.items():
        assert [other for other, answer in answers.items() if answer in text] == ([name] if name != "carol" else [])


def follow_up(url: str, seen: list[dict[str, Any]], reference: dict[str, Any], long: str) -> dict[str, str]:
    """Return what the upstream is asked to summarize in each conversation that refers to an answer."""
    found = {}
    for name in ("alice", "bob", "carol"):
        seen.clear()
        asked(url, said(f"I am {name}. {long}"), reference, said(f"Go on. {long} {name}"), said("What did you say?"))
        found[name] = json.dumps([body for body in seen if "messages" in body])
        assert found[name] != "[]"
    return found


def stored_items(path: Path) -> int:
    async def count() -> int:
        store = SqliteStore(path)
        try:
            return len(await store.entries(KIND))
        finally:
            await store.aclose()

    return asyncio.run(count())
