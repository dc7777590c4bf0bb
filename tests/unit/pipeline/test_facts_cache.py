"""Test that the cache of message facts is bounded in number and size."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from proxy.compaction.turn import FACTS_BYTES, Facts
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile
from proxy.pipeline.facts_cache import CounterFacts, FactsCache, FactsMemory
from tests.kit import engine
from tests.kit.generator import SETTINGS
from tests.kit.messages import assistant, call, result, user


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


@pytest.mark.parametrize(("id_length", "each"), [(5_000, FACTS_BYTES + 5_100), (10, FACTS_BYTES + 60)])
def test_the_oldest_are_forgotten(id_length: int, each: int) -> None:
    """By size: ids come from clients, and may have any length."""
    messages = results(40, id_length)
    memory = taught(messages, counted(20 * each))
    assert known(memory, messages[-1])
    assert known(memory, messages[-10])
    assert not known(memory, messages[-21])
    assert all(known(taught(messages, counted(100 * each)), message) for message in messages)


def test_the_tenant_with_the_most_loses_its_facts() -> None:
    facts = FactsMemory(60 * (FACTS_BYTES + 120))
    memory = CounterFacts(ChatCounter(Profile("m")), facts)
    few, many = results(10, 10), results(400, 11)
    taught(few, memory, "few")
    taught(many, memory, "many")
    assert all(memory.look_up([message], "few")[0] != [None] for message in few)
    assert memory.look_up([many[-1]], "many")[0] != [None]
    assert memory.look_up([many[0]], "many")[0] == [None]
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
        held = sum(facts.bytes for part in parts for facts in (*part.young.values(), *part.old.values()))
        assert held == cache._facts._weight == sum(sum(part.weights) for part in parts)
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


def test_what_fits_stays_known_however_often_it_comes_by_turns() -> None:
    """A look-up of older facts frees their place among the older ones."""
    messages = results(90, 10)
    memory = taught(messages, counted(100 * (FACTS_BYTES + 120)))
    for _ in range(3):
        assert all(known(memory, message) for message in messages)


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
