"""Test the part of each cache, and of each tenant in it."""

import random

from proxy.store.forgetting import drop
from proxy.store.tenant_cache import CacheCapacity, TenantMemory


def test_the_parts_are_no_more_than_the_whole() -> None:
    for total in (16_000_000, 256_000_000, 1_000_000_007):
        capacity = CacheCapacity(total)
        assert 0.9 * total < capacity.facts + capacity.items + capacity.summaries <= total


def test_the_tenant_with_the_most_loses_its_least_recently_used() -> None:
    memory: TenantMemory[bytes] = TenantMemory(1_000, len)
    memory["quiet", "a"] = b"x" * 100
    for number in range(50):
        memory["busy", str(number)] = b"x" * 100
        assert memory.get(("busy", "0"))
    assert memory.bytes <= 1_000
    assert memory["quiet", "a"]
    assert ("busy", "0") in memory
    assert ("busy", "49") in memory
    assert ("busy", "30") not in memory
    # Another tenant gets its equal part.
    for number in range(50):
        memory["new", str(number)] = b"x" * 100
    parts = {tenant: sum(place[0] == tenant for place in memory) for tenant in ("quiet", "busy", "new")}
    assert parts["quiet"] == 1
    assert min(parts["busy"], parts["new"]) >= 3


def test_the_newest_value_stays_even_if_it_is_too_large() -> None:
    memory: TenantMemory[bytes] = TenantMemory(1_000, len)
    memory["a", "small"] = b"x" * 10
    memory["b", "large"] = b"x" * 5_000
    assert memory["b", "large"]
    memory["a", "next"] = b"x"
    assert list(memory) == [("a", "next")]


def test_values_are_replaced_removed_and_forgotten() -> None:
    memory: TenantMemory[bytes] = TenantMemory(10_000, len)
    chance = random.Random(1)
    kept: dict[tuple[str, ...], bytes] = {}
    for _ in range(2_000):
        place = (chance.choice("abc"), str(chance.randrange(20)))
        if chance.random() < 0.3:
            assert memory.pop(place, None) == kept.pop(place, None)
        else:
            memory[place] = kept[place] = b"x" * chance.randrange(1, 100)
        assert memory.bytes == sum(map(len, kept.values()))
        assert len(memory) == len(kept)
    assert dict(memory) == kept
    assert drop(memory, lambda tenant: tenant == "a") == {"a"}
    assert {place[0] for place in memory} == {"b", "c"}
