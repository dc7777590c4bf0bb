"""Agents whose turns reach two workers in any order, over APIs whose upstreams reject malformed input.

Workers restart, summaries fail, limits are learned, clients compact their own conversations and change their tools.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.agent_script import SCHEMA, SYSTEM, TOOLS, Received, question, result
from tests.kit.message_checks import THINKING, blocks_of
from tests.kit.program import write_config
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Reply, summarise

pytestmark = pytest.mark.long

TURNS = 45
WINDOW = 9_000
HEADERS = {"authorization": "Bearer sk-client", "anthropic-version": "2023-06-01"}


class Fleet:
    """Two workers with one store. Each turn goes to either of them, and either may restart."""

    def __init__(self, upstream: Any, believed: int, dice: random.Random, folder: Path) -> None:
        self._dice = dice
        self._running = contextlib.ExitStack()
        url = self._running.enter_context(serve(upstream.app))
        known = {"context_window": believed, "max_input_tokens": believed, "max_output_tokens": 500}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": {**known, "tokenizer": "o200k_base"}}],
            "policies": {"default": {"summary": {"timeout": 5}}},
        }
        self._config = write_config(settings, folder)
        self._http = self._running.enter_context(httpx.Client(trust_env=False, timeout=60, headers=HEADERS))
        self._workers = [self._worker(), self._worker()]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker, _url in self._workers:
            worker.close()
        self._running.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to one of the workers. Return the response, which must be a success."""
        if self._dice.random() < 0.05:
            number = self._dice.randrange(2)
            self._workers[number][0].close()
            self._workers[number] = self._worker()
        answer = self._http.post(f"{self._dice.choice(self._workers)[1]}{path}", json=body)
        assert answer.status_code == 200, answer.text[:500]
        value: dict[str, Any] = answer.json()
        return value

    def _worker(self) -> tuple[contextlib.ExitStack, str]:
        worker = contextlib.ExitStack()
        return worker, worker.enter_context(serve(Proxy(load(self._config, {}))))


class Agent:
    """A client that repeats its whole history. It sometimes summarizes it, and sometimes gets another tool."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self.fleet = fleet
        self.dice = dice
        self.history: list[dict[str, Any]] = []
        self.tools = list(TOOLS)
        self.part = 0

    def play(self, turns: int) -> None:
        for _ in range(turns):
            if not self.waits_for_results():
                if self.history and self.dice.random() < 0.06:
                    self.compact()
                if self.dice.random() < 0.06:
                    self.tools.append(f"tool_{len(self.tools)}")
                    self.forget_thinking()
                self.part += 1
                self.ask(question(self.part))
            self.turn()

    def waits_for_results(self) -> bool:
        raise NotImplementedError

    def ask(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def compact(self) -> None:
        """Replace the history by the client's own summary."""
        self.history = [{"role": "user", "content": f"We did {self.part} parts before."}]
        self.history.append({"role": "assistant", "content": "I see."})

    def forget_thinking(self) -> None:
        """Drop thinking that would be bound to other tools, as a careful client does."""

    def turn(self) -> None:
        raise NotImplementedError


class MessagesAgent(Agent):
    def waits_for_results(self) -> bool:
        return bool(self.history) and blocks_of(self.history[-1])[0]["type"] == "tool_result"

    def forget_thinking(self) -> None:
        for message in self.history:
            message["content"] = [block for block in blocks_of(message) if block["type"] not in THINKING]

    def turn(self) -> None:
        tools = [{"name": name, "description": "A tool.", "input_schema": SCHEMA} for name in self.tools]
        fixed = {"model": "claude-sonnet-5-5", "max_tokens": 500, "system": SYSTEM, "thinking": {"type": "adaptive"}}
        answer = self.fleet.post("/v1/messages", {**fixed, "tools": tools, "messages": self.history})
        self.history.append({"role": "assistant", "content": answer["content"]})
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        if calls:
            named = [(call["id"], result(call["id"], call["name"])[:4_000]) for call in calls]
            blocks = [{"type": "tool_result", "tool_use_id": id_, "content": text} for id_, text in named]
            self.history.append({"role": "user", "content": blocks})


class ResponsesAgent(Agent):
    def waits_for_results(self) -> bool:
        return bool(self.history) and self.history[-1].get("type") == "function_call_output"

    def compact(self) -> None:
        if self.dice.random() < 0.5:
            super().compact()
            return
        self.history = self.fleet.post("/v1/responses/compact", {"model": "gpt-5", "input": self.history})["output"]

    def turn(self) -> None:
        tools = [
            {"type": "function", "name": name, "description": "A tool.", "parameters": SCHEMA} for name in self.tools
        ]
        fixed: Any = {
            "model": "gpt-5",
            "instructions": SYSTEM,
            "store": False,
            "include": ["reasoning.encrypted_content"],
        }
        answer = self.fleet.post("/v1/responses", {**fixed, "tools": tools, "input": self.history})
        self.history += answer["output"]
        for item in answer["output"]:
            if item["type"] == "function_call":
                text = result(item["call_id"], item["name"])[:4_000]
                self.history.append({"type": "function_call_output", "call_id": item["call_id"], "output": text})


def fails_at_times(upstream: Any, dice: random.Random) -> None:
    """Let a third of the summary calls fail."""

    def summary(body: Any) -> Reply:
        return Reply(status=500, error="down") if dice.random() < 0.33 else summarise(body)

    upstream.chat.summariser = summary


@pytest.mark.parametrize("kind", [MessagesAgent, ResponsesAgent])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 25))])
def test_an_agent_at_two_workers_never_fails(kind: type[Agent], seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    upstream = StrictMessages(WINDOW, ratio=1.2) if kind is MessagesAgent else StrictResponses(WINDOW)
    fails_at_times(upstream, dice)
    believed = dice.choice((WINDOW, WINDOW, 2 * WINDOW))
    with Fleet(upstream, believed, dice, tmp_path) as fleet:
        kind(fleet, dice).play(TURNS)
    # A prompt is stored a moment after it was sent. This client doesn't pause, so the other worker may have to learn
    # from a refusal which thinking is bound elsewhere. With 0.3 s between two turns, no request was refused.
    assert all("bound to a different conversation" in fault for fault in upstream.faults), upstream.faults
    assert len(upstream.faults) <= TURNS // 4
    assert len(upstream.refused) <= 2, "one for each worker at most, if the window isn't known"
    assert_thinking_is_kept(upstream.conversations)


def assert_thinking_is_kept(requests: list[Received]) -> None:
    """Check that prompts that begin with the one before have all of its thinking, and that of the answer to it.

    While the ratio of the upstream's tokens to the proxy's is learned, the budget moves. Then thinking may be removed
    for a checkpoint that had already been made.
    """
    before: Received | None = None
    grown = lost = 0
    for received in [one for one in requests if not one.path.endswith("/compact")]:
        if received.status != 200:
            before = None
            continue
        if before is not None and before.body["tools"] == received.body["tools"]:
            old, new = split(before), split(received)
            if new[0][: len(old[0])] == old[0] and len(new[0]) > len(old[0]):
                grown += 1
                same = [thought for place, thought in new[1] if place < len(old[0])] == [t for _, t in old[1]]
                lost += not same or not any(place == len(old[0]) for place, _ in new[1])
        before = received
    assert grown > TURNS // 4
    assert lost <= 2


def split(received: Received) -> tuple[list[Any], list[tuple[int, str]]]:
    """Return a prompt without thinking, marks, and ids, and its thinking, each with the place before it."""
    parts: list[Any] = []
    thoughts: list[tuple[int, str]] = []
    for item in received.body.get("input") or received.body["messages"]:
        if item.get("type") == "reasoning":
            thoughts.append((len(parts), item["encrypted_content"]))
        elif received.path.endswith("/responses"):
            parts.append({key: value for key, value in item.items() if key not in ("id", "status")})
        else:
            blocks = blocks_of(item)
            thoughts += [(len(parts), block["signature"]) for block in blocks if block["type"] in THINKING]
            parts.append((item["role"], [block for block in blocks if block["type"] not in THINKING]))
    return parts, thoughts
