"""Test that the cache of message facts is bounded in number and size."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from proxy.compaction.turn import FACTS_BYTES, PART_BYTES, Facts
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.request import parse as parse_chat
from proxy.dialects.messages.counting import MessagesCounter
from proxy.dialects.messages.request import parse as parse_messages
from proxy.dialects.responses.counting import ResponsesCounter
from proxy.dialects.responses.request import parse as parse_responses
from proxy.limits.profiles import Profile
from proxy.pipeline.facts_cache import CounterFacts, FactsCache, FactsMemory
from tests.kit import engine, three_apis
from tests.kit.generator import SETTINGS
from tests.kit.messages import assistant, call, result, user

APIS = {
    "chat": (ChatCounter, parse_chat),
    "messages": (MessagesCounter, parse_messages),
    "responses": (ResponsesCounter, parse_responses),
}


def results(count: int, id_length: int) -> list[bytes]:
    """Tool results whose ids have a length."""
    ids = (f"{n:04}".ljust(id_length, "x") for n in range(count))
    return [json.dumps({"role": "tool", "tool_call_id": id_, "content": "ok"}).encode() for id_ in ids]


def known(memory: CounterFacts, message: bytes) -> bool:
    return memory.look_up([message])[0][0] is not None


def taught(messages: list[bytes], memory: CounterFacts, tenant: str = "") -> CounterFacts:
    """A memory that has seen messages, one after the other."""
    for message in messages:
        _, keys = memory.look_up([message], tenant)
        memory.learn(message, keys[0], tenant)
    return memory


def counted(most: int) -> CounterFacts:
    return CounterFacts(ChatCounter(Profile("m")), FactsMemory(most))


@pytest.mark.parametrize(("id_length", "each"), [(5_000, 5_430), (10, 440)])
def test_a_full_cache_loses_the_share_that_does_not_fit(id_length: int, each: int) -> None:
    """By size: ids come from clients, and may have any length. Conversations that take turns stay mostly known."""
    messages = results(440, id_length)
    memory, read = counted(400 * each), []
    for _ in range(12):
        found, keys = memory.look_up(messages)
        read.append(found.count(None))
        for message, key in zip(messages, keys, strict=True):
            memory.learn(message, key)
    assert read[0] == 440
    # A tenth doesn't fit. Without the oldest ones, all would be read again.
    assert 40 <= sum(read[2:]) / 10 <= 110
    memory = taught(messages, counted(500 * each))
    assert all(known(memory, message) for message in messages)


def test_the_tenant_with_the_most_loses_its_facts() -> None:
    facts = FactsMemory(60 * (FACTS_BYTES + PART_BYTES + 20))
    memory = CounterFacts(ChatCounter(Profile("m")), facts)
    few, many = results(10, 10), results(400, 11)
    taught(few, memory, "few")
    taught(many, memory, "many")
    assert all(memory.look_up([message], "few")[0] != [None] for message in few)
    assert 30 < sum(memory.look_up([message], "many")[0] != [None] for message in many) < 60
    assert memory.look_up([few[0]], "many")[0] == [None], "tenants share no facts"


def conversation(number: int) -> list[bytes]:
    """Messages with large results, which get short forms."""
    said: list[object] = [user(f"Task {number}")]
    for place in range(8):
        text = "\n".join(f"{number}.{place}.{line}: src/file_{line}.py has value_{line}" for line in range(400))
        said += [assistant(None, call(f"c{place}", "read_file", path=f"f{place}.py")), result(f"c{place}", text)]
    return [json.dumps(message).encode() for message in [*said, user("Go on.")]]


def test_a_cache_charges_what_it_holds() -> None:
    """Short forms are charged when they're made. Before, each message is a small part of its length."""
    requests = [engine.request(conversation(number), SETTINGS[0], 20_000) for number in range(4)]
    messages = [message for request in requests for message in request.messages]
    cache = FactsCache(most=10_000_000)
    memory, running = cache.memory(engine.COUNTER), engine.Engine(cache)

    def charged() -> int:
        parts = cache._facts._parts.values()
        held = sum(facts.bytes for part in parts for facts in part.facts.values())
        assert held == cache._facts._weight == sum(part.weight for part in parts)
        return held

    async def compacted() -> None:
        for request in requests:
            assert (await running.send(request)).verdict == "compacted"

    taught(messages, memory, "t")
    counted = charged()
    assert counted < 1_200 * len(messages)
    engine.run(compacted())
    assert charged() > counted + 10_000
    assert None not in memory.look_up(messages, "t")[0]
    cache.close()


def spoken(number: int) -> list[dict[str, object]]:
    """A conversation with plain messages, or with calls and results."""
    words, id_ = f"{number} " * 50, f"call_{number:024x}"
    if number % 2:
        return [user(words), assistant(words)]
    return [assistant(None, call(id_, "read_file", path=words)), result(id_, words)]


@pytest.mark.long
@pytest.mark.parametrize("api", APIS)
def test_the_charge_is_near_the_real_bytes(api: str) -> None:
    """Within 15 %. Without short forms, which few messages have, nothing is made for them."""
    made: list[Any] = [user("Begin."), *chain.from_iterable(map(spoken, range(300)))]
    counter, parse = APIS[api]
    units = list(map(bytes, parse(three_apis.request(api, "m", made, stream=False)).units))
    memory = CounterFacts(counter(Profile("m")), FactsMemory())
    taught(units[:10], memory)
    gc.collect()
    tracemalloc.start()
    taught(units, memory)
    gc.collect()
    real = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert real == pytest.approx(memory._memory._weight, rel=0.15)


def test_nothing_is_charged_for_facts_that_are_dropped() -> None:
    memory = FactsMemory(20 * FACTS_BYTES)
    held = [Facts("user", "user", 1, b"") for _ in range(40)]
    for number, facts in enumerate(held):
        memory.add("counter", "", b"%d" % number, facts)
        assert number % 2 or not facts.forms
    before = memory._weight
    dropped = [facts for facts in held if facts.cache is None]
    for facts in dropped:
        facts.forms["form", None] = None
    assert len(dropped) >= 20
    assert memory._weight == before <= memory.most


def test_threads_share_a_full_cache() -> None:
    memory, switching = FactsMemory(8 * FACTS_BYTES), sys.getswitchinterval()

    def work(thread: int) -> None:
        for number in range(2_000):
            memory.add("counter", f"{thread}.{number % 5}", b"%d" % number, Facts("user", "user", 1, b""))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [None] * 8
    finally:
        sys.setswitchinterval(switching)
