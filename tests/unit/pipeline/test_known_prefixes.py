"""Test that a known beginning changes no outcome, no figure, and no byte that leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.compaction.turn import Facts
from proxy.config import Policy
from proxy.dialects.apis import DIALECTS
from proxy.dialects.prefixes import Prefixes
from proxy.limits.profiles import Profile
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.exchange import CONVERSATIONS, Exchange
from proxy.pipeline.facts_cache import CounterFacts, FactsCache
from proxy.pipeline.job import CompactionInput, Outcome
from proxy.pipeline.rules import rules_for
from proxy.store.archive import Archive
from proxy.summary.store import Summaries
from tests.kit.engine import Plain
from tests.kit.growing_bodies import APIS, LONG, body, rounds, sessions, text_message
from tests.kit.recorded import SESSION, as_blocks, as_items, recorded_messages

EXAMPLES = settings().max_examples

PROFILES = {
    "chat": Profile("gpt-4o", tokenizer="o200k_base", tools="typescript", escapes=True),
    "responses": Profile("gpt-4o", tokenizer="o200k_base"),
    "messages": Profile("claude-fable-5-1", tokenizer="o200k_base"),
}
"""Counters with all rules: results of one of several calls, and reasoning that is bound to the prompt."""


class Process:
    """One process of the server, with or without a memory of prefixes."""

    def __init__(self, api: str, budget: int, *, remembers: bool) -> None:
        self.memory = Prefixes() if remembers else None
        self.dialect = DIALECTS[api]
        self.counter = self.dialect.counter(PROFILES[api])
        self.policy = Policy.build("p", {})
        self.budget = budget
        store = Plain()
        self.facts = FactsCache()
        self.compactor = Compactor(self.facts, Summaries(store), Archive(store))

    async def send(self, raw: bytes, mode: Any = "enforce") -> dict[str, Any]:
        """Return everything that follows from a body."""
        read = await self.dialect.parse(raw, self.memory, "t")
        case = CompactionInput(
            body=read,
            counter=self.counter,
            policy=self.policy,
            mode=mode,
            budget=self.budget,
            tenant="t",
            upstream="u",
            rules=rules_for(self.policy, window_known=True),
            largest_budget=2 * self.budget,
        )
        outcome = self.compactor.untouched(case) or await self.compactor.compact(case)
        return {**figures(outcome), "sent": read.rewritten(units=outcome.messages)}


def figures(outcome: Outcome) -> dict[str, Any]:
    fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    for name in ("received", "prompt", "forecast", "reason", "summary"):
        fields[name] = repr(fields[name])
    fields["messages"] = outcome.messages and list(map(bytes, outcome.messages))
    return fields


@given(sessions(), st.sampled_from([2_000, 8_000, 40_000]), st.sampled_from(["enforce", "shadow"]))
@settings(max_examples=EXAMPLES * 2)
def test_every_outcome_is_that_of_a_whole_parse(session: tuple[str, list[bytes]], budget: int, mode: str) -> None:
    api, bodies = session
    on, off = (Process(api, budget, remembers=remembers) for remembers in (True, False))

    async def run() -> None:
        for raw in bodies:
            for _ in range(2):  # a beginning is stored when it comes for the second time
                assert await on.send(raw, mode) == await off.send(raw, mode)

    asyncio.run(run())


def growing(api: str, turns: int, size: int = 1) -> list[bytes]:
    messages, bodies = [text_message(api, "user", LONG)], []
    for number in range(turns):
        messages += [*rounds(api, number), text_message(api, "user", f"{number}" + "responsibility " * size)]
        bodies.append(body(api, messages))
    return bodies


@pytest.mark.parametrize("api", APIS)
def test_a_turn_looks_up_only_what_is_new(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    look_up = CounterFacts.look_up

    def counted(self: CounterFacts, raws: Any, tenant: str = "") -> tuple[list[Facts | None], list[bytes]]:
        looked.append(len(raws))
        return look_up(self, raws, tenant)

    monkeypatch.setattr(CounterFacts, "look_up", counted)
    process = Process(api, 20_000, remembers=True)

    async def run() -> None:
        for raw in growing(api, 40):
            await process.send(raw, "shadow")

    asyncio.run(run())
    assert max(looked[2:]) <= 20, Counter(looked)


@pytest.mark.skipif(not SESSION.exists(), reason="the recorded session isn't part of the project")
@pytest.mark.parametrize("api", APIS)
def test_a_recorded_session_has_the_same_outcomes(api: str) -> None:
    messages = recorded_messages()[:120]
    on, off = (Process(api, 20_000, remembers=remembers) for remembers in (True, False))

    async def run() -> None:
        for end in range(20, len(messages), 4):
            raw = body(api, units_of(api, messages[:end]))
            assert await on.send(raw) == await off.send(raw)

    asyncio.run(run())
    assert on.memory is not None
    assert on.memory.weight > 0


def units_of(api: str, messages: list[Any]) -> list[Any]:
    if api == "responses":
        return [item for items in as_items(messages) for item in items]
    return as_blocks([m for m in messages if m["role"] != "system"]) if api == "messages" else messages


@pytest.mark.parametrize("api", APIS)
def test_a_known_conversation_keeps_its_name(api: str) -> None:
    on, off = (Process(api, 20_000, remembers=remembers) for remembers in (True, False))
    bodies = growing(api, 6)

    async def name(process: Process, raw: bytes, model: str, *, released: bool = False) -> tuple[str, str]:
        read = await process.dialect.parse(raw, process.memory, "t")
        exchange = Exchange(
            *[cast(Any, None)] * 4,
            caller=cast(Any, SimpleNamespace(tenant="t")),
            bill=cast(Any, None),
            dialect=process.dialect,
            body=read,
            original=read,
            route=cast(Any, SimpleNamespace(upstream="u", model=model)),
            profile=PROFILES[api],
            counter=process.counter,
            memory=cast(Any, None),
            time=cast(Any, None),
        )
        if released:
            read.release()
        return exchange.conversation

    async def run() -> None:
        expected = {model: await name(off, bodies[0], model) for model in "mno"}
        assert len(set(expected.values())) == 3
        for raw in bodies:
            for model in "mnmo":
                await name(on, raw, model, released=True)
                assert await name(on, raw, model) == expected[model] == await name(off, raw, model)
        read = await on.dialect.parse(bodies[-1], on.memory, "t")
        assert read.begun is not None
        for number in range(20):
            await name(on, bodies[-1], str(number))
        assert len(read.begun.prefix.conversations) == CONVERSATIONS

    asyncio.run(run())
