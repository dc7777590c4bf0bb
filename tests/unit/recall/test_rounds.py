"""Hidden rounds: shared through the store, remembered by each process, and forgotten with their tenant."""

from __future__ import annotations

import msgspec

from proxy.dialects.rounds import HiddenRound
from proxy.recall.rounds import KIND, MOST, HiddenRounds, prefixes
from proxy.store import ManagedStore, StoreFailed, open_store
from tests.kit.stores import with_store

ROUND = HiddenRound("p", "text", ["c1"], [b"{}"], None, [], [])
OTHER = msgspec.structs.replace(ROUND, prefix="q", own=b"{}")
TALK = ("team", "conversation")


def test_rounds_are_shared_read_once_and_forgotten() -> None:
    async def shared(store: ManagedStore) -> None:
        one, two = HiddenRounds(store), HiddenRounds(store)
        await one.keep(TALK, 3, [ROUND], 60)
        assert await two.of(TALK, [1, 3]) == [ROUND]
        assert await two.of(("other", "conversation"), [1, 3]) == []
        assert await two.of(("team", "other"), [1, 3]) == []

    async def answered_elsewhere(store: ManagedStore) -> None:
        """Only one new assistant message is this process's own answer."""
        one, two = HiddenRounds(store), HiddenRounds(store)
        await one.keep(TALK, 3, [ROUND], 60)
        await two.keep(TALK, 5, [ROUND, OTHER], 60)
        assert await one.of(TALK, [1, 3]) == [ROUND]
        assert await one.of(TALK, [1, 3, 5]) == [ROUND, OTHER]

    async def bounded(store: ManagedStore) -> None:
        one = HiddenRounds(store)
        await one.keep(TALK, 3, [OTHER, *[ROUND] * MOST], 60)
        assert await HiddenRounds(store).of(TALK, [3]) == [ROUND] * MOST

    async def unreadable(store: ManagedStore) -> None:
        await store.put(*_place(), b"\xc1", 60)
        assert await HiddenRounds(store).of(TALK, [3]) == []

    async def of_an_earlier_version(store: ManagedStore) -> None:
        fields = {name: value for name, value in msgspec.structs.asdict(ROUND).items() if name != "own"}
        await store.put(*_place(), msgspec.msgpack.encode([fields]), 60)
        assert await HiddenRounds(store).of(TALK, [3]) == [ROUND]

    async def forgotten(store: ManagedStore) -> None:
        one = HiddenRounds(store)
        one.answered(TALK, 3, [ROUND])
        one.answered(("other", "conversation"), 3, [ROUND])
        assert one.forget(lambda tenant: tenant == "team") == {"team"}
        assert await one.of(TALK, [3]) == []
        assert await one.of(("other", "conversation"), [3]) == [ROUND]

    with_store(
        lambda: open_store("sqlite://"),
        *(shared, answered_elsewhere, bounded, unreadable, of_an_earlier_version, forgotten),
    )


async def _fails(*_: object) -> bytes:
    raise StoreFailed("down")


def test_a_process_knows_its_own_rounds_while_the_store_fails() -> None:
    async def failing(store: ManagedStore) -> None:
        put_many = store.put_many
        store.get_many = store.put_many = _fails  # type: ignore[method-assign, assignment]
        one = HiddenRounds(store)
        await one.keep(TALK, 3, [ROUND], 60)
        assert await one.of(TALK, [3]) == [ROUND]
        assert await one.of(TALK, [3, 5]) == [ROUND]
        assert await one.of(("team", "other"), [3]) == []
        store.put_many = put_many  # type: ignore[method-assign]
        await one.aclose()
        del store.get_many  # type: ignore[misc]
        assert await HiddenRounds(store).of(TALK, [3]) == [ROUND], "they are written when the store works"

    with_store(lambda: open_store("sqlite://"), failing)


def test_each_prefix_has_a_digest() -> None:
    found = prefixes([b"a", b"b"])
    assert len(set(found)) == 3
    assert prefixes([b"a"]) == found[:2]
    assert prefixes([b"b", b"a"])[2] != found[2]


def _place() -> tuple[str, str, str]:
    return TALK[0], KIND, TALK[1]
