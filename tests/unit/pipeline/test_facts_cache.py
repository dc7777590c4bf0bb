"""Test that the cache of message facts is bounded in number and size."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from proxy.compaction.turn import FACTS_BYTES, Facts
from proxy.pipeline.facts_cache import FactsCache, FactsMemory
from tests.kit import engine
from tests.kit.generator import SETTINGS
from tests.kit.messages import assistant, call, result, user


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
    running = engine.Engine(cache)

    def charged() -> int:
        parts = cache._facts._parts.values()
        held = sum(facts.bytes for part in parts for facts in part.facts.values())
        assert held == cache._facts._weight == sum(part.weight for part in parts)
        return held

    async def compacted() -> None:
        for request in requests:
            assert (await running.send(request)).verdict == "compacted"

    engine.run(cache.turns(messages, engine.COUNTER, "t"))
    counted = charged()
    assert counted < 1_200 * len(messages)
    engine.run(compacted())
    assert charged() > counted + 10_000
    assert sum(len(part.facts) for part in cache._facts._parts.values()) >= len(set(messages))
    cache.close()


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
