"""Conversations that grow turn by turn through the engine stay valid for Anthropic's API."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.compaction.turn import Turn
from proxy.dialects.messages.counting import MessagesCounter
from proxy.dialects.messages.request import parse
from proxy.dialects.messages.units import THINKING, canonical
from proxy.limits.profiles.lookup import Profile
from tests.kit.compacting import POLICIES, send
from tests.kit.message_checks import blocks_of, check_breakpoints, check_results, check_shape, merged

MARK = {"cache_control": {"type": "ephemeral"}}
SYSTEM = [{"type": "text", "text": "You are a careful engineer."}, {"type": "text", "text": "Use tools.", **MARK}]
TOOLS = [{"name": "read_file", "description": "Read a file.", "input_schema": {"type": "object"}, **MARK}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 40}}
WORDS = ("the", "build", "failed", "again", "because", "of", "a", "missing", "comma", "in", "src/module.py")

CHECKING, FREE = "claude-opus-5-5", "claude-opus-4-5"


def counter(model: str) -> MessagesCounter:
    return MessagesCounter(Profile(model, tokenizer="o200k_base", token_ratio=1.25, images="claude", tools="claude"))


class Session:
    """A client like Claude Code, and a server that signs thinking with the prompt before it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "Please begin: repair the build."}]
        self.number = 0

    def words(self, most: int) -> str:
        return " ".join(self.dice.choice(WORDS) for _ in range(self.dice.randint(3, most)))

    def answer(self, sent: list[dict[str, Any]]) -> None:
        """Add the assistant's message, and what the user or the tools say next."""
        thinking = {"type": "thinking", "thinking": self.words(60), "signature": signature(sent)}
        calls = [
            {
                "type": "tool_use",
                "id": f"toolu_{self.number}_{n}",
                "name": "read_file",
                "input": {"path": self.words(9)},
            }
            for n in range(self.dice.choice((0, 1, 1, 2, 3)))
        ]
        self.number += 1
        text = {"type": "text", "text": self.words(40)}
        self.history.append({"role": "assistant", "content": [thinking, text, *calls]})
        results = [self.result(call["id"]) for call in calls]
        others = [] if calls else [{"type": "text", "text": self.words(80)}]
        if self.dice.random() < 0.4:
            others.append({"type": "text", "text": f"<system-reminder>{self.words(20)}</system-reminder>"})
        if self.dice.random() < 0.1:
            others.append(IMAGE)
        self.history.append({"role": "user", "content": [*results, *others]})
        if self.dice.random() < 0.15:
            self.history.append({"role": "system", "content": self.words(15)})

    def result(self, call: str) -> dict[str, Any]:
        text = self.words(400)
        content: Any = self.dice.choice(
            (text, [{"type": "text", "text": text}], [{"type": "text", "text": text}, IMAGE])
        )
        return {"type": "tool_result", "tool_use_id": call, "content": content}

    def body(self, model: str) -> bytes:
        """Return the request. Its last two messages of the user end with a breakpoint."""
        messages = [dict(message) for message in self.history]
        marked = [message for message in messages if message["role"] == "user"][-2:]
        for message in marked:
            *before, last = blocks_of(message)
            message["content"] = [*before, {**last, **MARK}]
        fields = {"model": model, "max_tokens": 1000, "system": SYSTEM, "tools": TOOLS, "messages": messages}
        return json.dumps(fields).encode()


def signature(messages: list[dict[str, Any]]) -> str:
    """Return a digest of a prompt. Thinking and breakpoints aren't part of it."""
    plain = [{**one, "content": [b for b in blocks_of(one) if b["type"] not in THINKING]} for one in merged(messages)]
    return hashlib.sha256(json.dumps(canonical(plain), sort_keys=True).encode()).hexdigest()


def thoughts(messages: list[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    for index, message in enumerate(messages):
        for block in blocks_of(message):
            if block["type"] in THINKING:
                yield index, block["signature"]


@pytest.mark.parametrize("model", [CHECKING, FREE])
@pytest.mark.parametrize("seed", range(9))
def test_growing_conversations_stay_valid(seed: int, model: str) -> None:
    count = counter(model)
    session, policy = Session(seed), POLICIES[seed % len(POLICIES)]
    changed, kept_longest = 0, 0
    facts_of = functools.cache(count.format.read)
    previous: list[bytes] | None = None
    stale = 0
    for _ in range(36):
        raw = session.body(model)
        request = parse(raw)
        turns = [Turn(unit, facts_of(bytes(unit))) for unit in request.units]
        outgoing = send(turns, policy, 6_000, format=count.format, stale_reasoning=stale)
        prompt = [facts_of(bytes(raw)).digest for raw in outgoing.raws]
        if outgoing.plan is not None and previous is not None and prompt[: len(previous)] != previous:
            stale = len(turns)
            outgoing = send(turns, policy, 6_000, format=count.format, stale_reasoning=stale)
        previous = prompt
        sent = request.rewritten(units=outgoing.raws)
        if outgoing.plan is None:
            assert sent is raw
        body = json.loads(sent)
        changed += outgoing.plan is not None
        assert json.dumps(SYSTEM).encode() in sent
        assert json.dumps(TOOLS).encode() in sent
        check_shape(body, alternate=False)
        check_results(body["messages"])
        check_breakpoints(body)
        kept = list(thoughts(body["messages"]))
        kept_longest = max(kept_longest, len(kept) if outgoing.plan is not None else 0)
        every = [name for _, name in thoughts(session.history)]
        if model == CHECKING:
            assert [name for _, name in kept] == every[len(every) - len(kept) :], "an unbroken run of the newest"
            for index, name in kept:
                assert signature(body["messages"][:index]) == name, "bound to a different conversation"
        session.answer(body["messages"])
    assert changed > 5
    assert kept_longest > 0
