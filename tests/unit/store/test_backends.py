"""The contract of all stores: names, lifetimes, removal, encryption, and new keys."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.store import Entry, Guarded, ManagedStore, StoreFailed
from proxy.store.forgetting import forget, forgotten
from proxy.store.interface import Refused
from proxy.store.redis_store import RedisStore
from tests.kit.redis_server import RedisServer
from tests.kit.stores import PLACES, Place, place, with_store

KEY, NEW_KEY = b"k" * 32, b"n" * 32
READ = 30
"""Keys per read of a store."""
ODD = "team:a*b?[c]\\:../ü\n"
"""A tenant whose name has characters with a meaning in patterns, in keys, and in paths."""


@pytest.fixture(params=PLACES)
def there(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("proxy.store.redis_store.KEYS", READ)
    monkeypatch.setattr("proxy.store.sqlite.KEYS", READ)
    with place(request.param, tmp_path, request) as found:
        yield found


KEYS = pytest.mark.parametrize("keys", [(), (KEY,)], ids=["plain", "encrypted"])


@KEYS
@pytest.mark.parametrize("name", [ODD, "'; DROP TABLE entries; --\x00é", "summary"])
def test_entries_are_found_by_tenant_kind_and_key(there: Place, keys: tuple[bytes, ...], name: str) -> None:
    async def write(store: ManagedStore) -> None:
        await store.put(name, "summary", name, b"one\x00\n\xff", 60)
        assert await store.get(name, "summary", name) == b"one\x00\n\xff"
        for other in (
            ("u", "summary", name),
            (name, "limit", name),
            (name, "summary", "j"),
            (f"{name}:", "summary", name),
        ):
            assert await store.get(*other) is None
        await store.put(name, "summary", name, b"two", 60)

    async def read(store: ManagedStore) -> None:
        assert await store.get(name, "summary", name) == b"two"
        (entry,) = await store.entries("summary")
        assert (entry.tenant, entry.key, entry.value) == (name, name, b"two")
        assert 50 < entry.seconds <= 60
        assert [one.key async for page in store.pages() for one in page] == [name]

    with_store(lambda: there.open(keys), write, read)


@KEYS
def test_an_entry_is_added_once_and_replaced_or_removed_by_comparison(there: Place, keys: tuple[bytes, ...]) -> None:
    async def test(store: ManagedStore) -> None:
        await store.put("t", "summary", "k", b"two", 60)
        assert await store.add("t", "summary", "k", b"three", 60) == b"two"
        assert await store.add("t", "making", "k", b"token", 60) == b"token"
        assert not await store.replace("t", "making", "k", b"next", b"new", 60)
        assert await store.replace("t", "making", "k", b"token", b"next", 60)
        assert await store.replace("t", "making", "k", b"next", b"new", 60)
        assert await store.replace("t", "making", "k", b"new", b"", 0)
        assert not await store.replace("t", "making", "k", b"new", b"", 0)
        assert await store.get("t", "making", "k") is None
        assert await store.get("t", "summary", "k") == b"two"

    with_store(lambda: there.open(keys), test)


@KEYS
def test_of_many_processes_that_add_an_entry_one_succeeds(there: Place, keys: tuple[bytes, ...]) -> None:
    async def whole() -> None:
        stores = [there.open(keys) for _ in range(4)]
        got = await asyncio.gather(
            *(store.add("t", "making", "k", b"%d" % number, 60) for number, store in enumerate(stores * 5))
        )
        assert {await store.get("t", "making", "k") for store in stores} == set(got)
        assert len(set(got)) == 1
        replaced = await asyncio.gather(
            *(store.replace("t", "making", "k", got[0], b"new %d" % number, 60) for number, store in enumerate(stores))
        )
        assert sum(replaced) == 1
        for store in stores:
            await store.aclose()

    asyncio.run(whole())


@KEYS
def test_entries_outlive_the_process_and_end_with_their_time(there: Place, keys: tuple[bytes, ...]) -> None:
    async def write(store: ManagedStore) -> None:
        await store.put_many([Entry("t", "summary", key, b"1", there.seconds(at)) for key, at in LIFETIMES.items()])
        await store.put("t", "summary", "never", b"1", -1)

    async def read(store: ManagedStore) -> None:
        found = await store.get_many("t", "summary", [*LIFETIMES, "never"])
        assert found == dict.fromkeys(LIFETIMES, b"1")
        await there.pass_time(11)
        assert await store.get_many("t", "summary", [*LIFETIMES, "never"]) == {"long": b"1"}
        assert [entry.key for entry in await store.entries("summary")] == ["long"]
        assert await store.add("t", "summary", "short", b"2", there.seconds(1_000)) == b"2"
        await store.maintain()
        assert await store.unknown() == 0
        assert len(await store.entries("summary")) == 2

    with_store(lambda: there.open(keys), write, read)


LIFETIMES = {"short": 10, "long": 1_000}


@KEYS
def test_many_entries_are_read_at_once(there: Place, keys: tuple[bytes, ...]) -> None:
    async def test(store: ManagedStore) -> None:
        await store.put_many([Entry("t", "item", f"{n}", b"%d" % n, 60 if n % 2 else -1) for n in range(2 * READ)])
        several = await store.get_many("t", "item", ["no", *map(str, range(2 * READ))])
        assert several == {f"{n}": b"%d" % n for n in range(1, 2 * READ, 2)}
        assert await store.get_many("t", "item", []) == {}

    with_store(lambda: there.open(keys), test)


@KEYS
def test_the_names_of_removed_entries_are_gone(there: Place, keys: tuple[bytes, ...]) -> None:
    async def test(store: ManagedStore) -> None:
        for key in ("canary-replaced", "canary-expired"):
            await store.put("t", "summary", key, b"1", 60)
        assert await store.replace("t", "summary", "canary-replaced", b"1", b"", 0)
        await store.put("t", "summary", "canary-expired", b"2", -1)
        await store.maintain()
        await store.rebuild()
        await store.erase()
        assert b"canary" not in there.raw()
        assert [page async for page in store.pages() if page] == []
        backend = there.backend()
        assert (await backend.counts()).total() == 0
        await backend.aclose()

    with_store(lambda: there.open(keys), test)


@KEYS
def test_many_entries_are_written_at_once(there: Place, keys: tuple[bytes, ...]) -> None:
    count = 230  # more than a statement of SQLite has rows

    def entries(text: bytes) -> list[Entry]:
        return [Entry(f"t{n % 2}", "item", f"{n}", b"%b %d" % (text, n), 60 if n % 10 else -1) for n in range(count)]

    async def write(store: ManagedStore) -> None:
        await store.put_many([])
        await store.put_many(entries(b"old" * 1_000))
        await store.put_many(entries(b"new"))

    async def read(store: ManagedStore) -> None:
        for tenant in range(2):
            found = await store.get_many(f"t{tenant}", "item", [f"{n}" for n in range(count)])
            assert found == {f"{n}": b"new %d" % n for n in range(count) if n % 2 == tenant and n % 10}
        assert len(await store.entries("item")) == count * 9 // 10

    with_store(lambda: there.open(keys), write, read)


def test_one_entry_that_redis_refuses_does_not_count_against_the_server(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        guarded = Guarded(store)  # type: ignore[arg-type]
        for _ in range(5):
            with pytest.raises(Refused):
                await guarded.put_many([Entry("t", "item", "bad", b"1", 1e17), Entry("t", "item", "good", b"2", 60)])
        assert guarded.failing == ()
        assert await guarded.get_many("t", "item", ["bad", "good"]) == {"good": b"2"}
        with redis.client() as client:
            client.config_set("min-replicas-to-write", 1)
            try:
                with pytest.raises(StoreFailed) as failure:
                    await guarded.put_many([Entry("t", "item", "good", b"3", 60)])
            finally:
                client.config_set("min-replicas-to-write", 0)
        assert not isinstance(failure.value, Refused)
        assert guarded.failing == ("write",)

    with_store(lambda: RedisStore(redis.url), test)


@KEYS
def test_a_forgotten_tenant_leaves_nothing(there: Place, keys: tuple[bytes, ...]) -> None:
    async def test(store: ManagedStore) -> None:
        for number in range(240):
            await store.put(ODD, "summary" if number % 2 else "archive", f"k{number}", b"CANARY", 60)
        await store.put("other", "summary", "k", b"stays", 60)
        assert await store.get(ODD, "archive", "k2") == b"CANARY"
        before = there.raw()
        for part in (b"CANARY", b"team", b"k77", b"summary", b"archive"):
            assert (part in before) is not bool(keys), part
        assert await forget(store, ODD) == ({"encrypted": 240} if keys else {"summary": 120, "archive": 120})
        raw = there.raw()
        assert b"CANARY" not in raw
        assert b"k77" not in raw
        assert b"team" not in raw
        assert await store.get("other", "summary", "k") == b"stays"
        assert await store.remove(ODD) == {}
        assert len(await forgotten(store)) == 1

    with_store(lambda: there.open(keys), test)


def test_entries_under_an_old_key_are_encrypted_again_and_those_without_encryption_removed(there: Place) -> None:
    async def old(store: ManagedStore) -> None:
        for number in range(90):
            await store.put("t", "summary", f"k{number}", b"%d" % number, 60)
        await store.put("gone", "summary", "k", b"1", 60)

    async def plain(store: ManagedStore) -> None:
        assert await store.unknown() == 91
        entries = [Entry("t", "summary", f"k{number}", b"not encrypted", 60) for number in range(230)]
        await store.put_many(entries)

    async def new(store: ManagedStore) -> None:
        assert await store.unknown() == 230
        await store.put("t", "summary", "k1", b"new", 60)
        assert await store.get_many("t", "summary", ["k0", "k1", "k99"]) == {"k0": b"0", "k1": b"new"}
        assert len(await store.entries("summary")) == 91
        assert await forget(store, "gone") == {"encrypted": 1}
        assert b"not encrypted" in there.raw()
        await store.maintain()
        assert await store.unknown() == 0
        assert b"not encrypted" not in there.raw()

    async def renewed(store: ManagedStore) -> None:
        assert await store.unknown() == 0
        assert await store.get_many("t", "summary", ["k1", "k7"]) == {"k1": b"new", "k7": b"7"}
        assert len(await store.entries("summary")) == 90

    with_store(lambda: there.open((KEY,)), old)
    with_store(lambda: there.open(()), plain)
    with_store(lambda: there.open((NEW_KEY, KEY)), new)
    with_store(lambda: there.open((NEW_KEY,)), renewed)
