"""An agent's session through the engine, in front of a server that enforces the structure of items."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from proxy.compaction.format import Format
from proxy.compaction.render import OutgoingMessage
from proxy.compaction.turn import Facts, Turn
from proxy.dialects.responses.counting import ResponsesCounter
from proxy.dialects.responses.request import ResponsesRequest, parse
from proxy.limits.profiles.lookup import Profile
from tests.kit.agent_sessions import Style, responses_session
from tests.kit.compacting import Sent, rules, send
from tests.kit.strict_responses import StrictResponses

TURNS = 40


class Through(httpx.BaseTransport):
    """Sends each request through the engine, and then to the server."""

    def __init__(self, server: StrictResponses, budget: int) -> None:
        self.sent: list[Sent] = []
        self.items: list[list[Any]] = []
        self._server = TestClient(server.app)
        self._format: Format = ResponsesCounter(Profile("gpt-5")).format
        self._facts: dict[bytes, Facts] = {}
        self._budget = budget

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = parse(request.read())
        self._facts |= {bytes(raw): self._format.read(raw) for raw in body.units if bytes(raw) not in self._facts}
        turns = [Turn(raw, self._facts[bytes(raw)]) for raw in body.units]
        assert not self._format.needs_repair([turn.facts for turn in turns])
        sent = send(turns, rules(), self._budget, format=self._format)
        content = rewritten(body, sent.pieces)
        self.sent.append(sent)
        self.items.append(json.loads(content)["input"])
        answer = self._server.post("/v1/responses", content=content)
        return httpx.Response(
            answer.status_code, headers={"content-type": answer.headers["content-type"]}, content=answer.content
        )


def rewritten(body: ResponsesRequest, pieces: Sequence[OutgoingMessage]) -> bytes:
    content = body.rewritten(units=[piece.raw for piece in pieces])
    if all(piece.turn is not None and not piece.changed for piece in pieces):
        assert json.loads(content) == json.loads(body.raw)
    return content


@functools.cache
def session(style: Style) -> tuple[StrictResponses, Through]:
    """Return the server after a whole session, and everything that was sent to it."""
    server = StrictResponses(window=1_000_000 if style == "references" else 16_000)
    through = Through(server, 7_000 if style == "references" else 13_000)
    client = openai.OpenAI(
        base_url="http://test/v1", api_key="k", max_retries=0, http_client=httpx.Client(transport=through)
    )
    for _ in responses_session(client, TURNS, style, "gpt-5"):
        pass
    return server, through


@pytest.mark.parametrize("style", ["items", "stateless", "without_ids", "references"])
def test_a_growing_conversation_stays_valid(style: Style) -> None:
    server, through = session(style)
    assert server.faults == []
    assert server.refused == []
    plans = [sent.plan.checkpoints for sent in through.sent if sent.plan]
    assert len({*plans}) > 2, "several checkpoints"
    for earlier, later, before, after in zip(
        through.sent, through.sent[1:], through.items, through.items[1:], strict=False
    ):
        if earlier.epoch == later.epoch:
            assert after[: len(before)] == before, "the prefix stays between two checkpoints"


def test_reasoning_is_kept_between_checkpoints() -> None:
    server, through = session("items")
    assert any(received.reasoning for received in server.requests[-5:])
    moves = sum(one.epoch != other.epoch for one, other in zip(through.sent, through.sent[1:], strict=False))
    fresh = [received.dropped for received in server.requests if received.dropped]
    assert len({id_ for dropped in fresh for id_ in dropped}) <= moves, "the server drops the open round's at most"
