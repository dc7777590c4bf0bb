"""Check the toy API in a running proxy: a short and a long conversation, a stream, and the reported usage."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from proxy.dialects.apis import DIALECTS, archived_text
from tests.kit.messages import words
from tests.kit.records import records_in
from tests.kit.scripted import behind
from tests.kit.upstream import StandIn

ANSWER = b'{"reply": {"says": "Fine."}, "why": "done", "used": {"in": 4321, "out": 2}}'
EVENTS = b'data: {"says": "Fi"}\n\ndata: {"says": "ne."}\n\ndata: {"why": "done", "used": {"in": 4321, "out": 2}}\n\n'


def check() -> None:
    """Raise ``AssertionError`` unless a proxy serves the toy API."""
    received: list[bytes] = []

    async def toy(request: Request) -> Response:
        received.append(await request.body())
        if json.loads(received[-1]).get("stream"):
            return Response(EVENTS, media_type="text/event-stream")
        return Response(ANSWER, media_type="application/json")

    routes = [Route("/v1/toy", toy, methods=["POST"]), Mount("/", StandIn().app)]
    folder = Path(tempfile.mkdtemp())
    # The API has no form for notes of the conversation's own model, so the summary is made over chat completions.
    policy = {"summary": {"method": "continue"}}
    with behind(Starlette(routes=routes), folder, policy=policy) as url, httpx.Client(trust_env=False) as client:

        def sent(body: bytes) -> httpx.Response:
            return client.post(f"{url}/v1/toy", content=body, headers={"authorization": "Bearer sk-client"})

        short = b'{"model":"m",  "turns": [{"says": "Hi", "who": "me"}]}'
        answer = sent(short)
        assert (received, answer.content) == ([short], ANSWER)
        assert answer.headers.get("x-compaction") == "none", answer.headers

        turns = conversation()
        answer = sent(json.dumps({"model": "m", "turns": turns}).encode())
        assert (answer.content, answer.headers["x-compaction"]) == (ANSWER, "compacted"), answer.headers
        assert answer.headers["x-compaction-summary"] == "made", answer.headers
        compacted = json.loads(received[-1])["turns"]
        assert len(compacted) < len(turns)
        assert (compacted[0], compacted[-1]) == (turns[0], turns[-1])
        assert all(isinstance(turn["says"], str) and turn["who"] in ("rules", "me", "it", "tool") for turn in compacted)
        asked = [ask["id"] for turn in compacted for ask in turn.get("asks", ())]
        assert asked
        assert asked == [turn["asked"] for turn in compacted if turn["who"] == "tool"]

        for count, part in ((1, turns[:1]), (len(compacted), turns)):
            answer = sent(json.dumps({"model": "m", "stream": True, "turns": part}).encode())
            assert answer.content == EVENTS
            assert len(json.loads(received[-1])["turns"]) == count

    records = [record for record in records_in(folder / "store.db") if record.api == "toy" and record.kind != "summary"]
    assert [(record.usage.input, record.usage.output) for record in records if record.usage] == [(4321, 2)] * 4
    tail = DIALECTS["toy"].answers.tail()
    tail.add(ANSWER)
    assert tail.written() == "Fine."
    assert archived_text(b'{"says": "Hi", "who": "me"}') == ("me", "Hi\nme")


def conversation() -> list[dict[str, Any]]:
    """Return turns of about 17,000 tokens, some with calls and their results."""
    turns: list[dict[str, Any]] = [{"who": "rules", "says": "Be brief."}]
    for number in range(7):
        turns += [
            {"who": "me", "says": f"Question {number}: " + words(1_000, f"q{number}x")},
            {"who": "it", "says": "", "asks": [{"id": f"c{number}", "tool": "look", "with": f'{{"at": {number}}}'}]},
            {"who": "tool", "asked": f"c{number}", "says": f"Found {number}: " + words(500, f"r{number}x")},
            {"who": "it", "says": f"Answer {number}: " + words(1_000, f"a{number}x")},
        ]
    return [*turns, {"who": "me", "says": "What now?"}]
