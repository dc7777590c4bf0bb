"""Test that the cache of message facts is bounded in number and size."""

from __future__ import annotations

import json

import pytest

from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile
from proxy.pipeline import facts_cache as remembered
from proxy.pipeline.facts_cache import CounterFacts


def results(count: int, id_length: int) -> list[bytes]:
    """Tool results whose ids have a length."""
    ids = (f"{n:04}".ljust(id_length, "x") for n in range(count))
    return [json.dumps({"role": "tool", "tool_call_id": id_, "content": "ok"}).encode() for id_ in ids]


def known(memory: CounterFacts, message: bytes) -> bool:
    return memory.look_up([message])[0][0] is not None


def taught(messages: list[bytes]) -> CounterFacts:
    """A memory that has seen messages, one after the other."""
    memory = CounterFacts(ChatCounter(Profile("m")))
    for message in messages:
        _, keys = memory.look_up([message])
        memory.learn(message, keys[0])
    return memory


@pytest.mark.parametrize(
    ("name", "bound", "kept"), [("GENERATION", 10, 20), ("GENERATION_BYTES", 10 * 10_100, 20), ("GENERATION", 40, 40)]
)
def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch, name: str, bound: int, kept: int) -> None:
    """By number, or by size: ids come from clients, and may have any length."""
    monkeypatch.setattr(remembered, name, bound)
    messages = results(40, 5_000)
    assert known(taught(messages), messages[-kept])
    assert known(taught(messages), messages[-1])
    if kept < len(messages):
        assert not known(taught(messages), messages[-kept - 1])


def test_what_is_used_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "GENERATION", 10)
    used, *others = results(40, 10)
    memory = taught([used])
    for other in others:
        assert known(memory, used)
        _, keys = memory.look_up([other])
        memory.learn(other, keys[0])
