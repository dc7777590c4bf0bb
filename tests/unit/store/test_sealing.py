"""Test the contents of an encrypted file, and reading it with each key."""

import asyncio
import importlib.util
import pickle
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy.server.maintenance import Maintenance
from proxy.store import Entry, ManagedStore, open_store
from proxy.store.sealing import AesGcmCodec, Unreadable
from proxy.telemetry.metrics import STORE_UNREADABLE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cryptography") is None, reason="needs cryptography")

OLD, NEW, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))
ENTRY = Entry("team:a", "summary", "k", b"what was said", 60)

Test = Callable[[ManagedStore], Awaitable[None]]


def with_keys(path: Path, keys: Sequence[bytes], test: Test) -> None:
    async def whole() -> None:
        store = open_store(f"sqlite:///{path}", keys)
        try:
            await test(store)
        finally:
            await store.aclose()

    asyncio.run(whole())


def changed(path: Path, sql: str, *values: object) -> None:
    """Change the file behind the store's back."""
    with sqlite3.connect(path) as db:
        assert db.execute(sql, values).rowcount == 1
    db.close()


def test_only_its_own_key_opens_an_entry_and_only_in_its_own_place() -> None:
    sealed = AesGcmCodec(NEW)
    (written,) = sealed.encrypt([ENTRY])
    assert sealed.decrypt(written) == ENTRY
    assert sealed.encrypt([ENTRY]) != [written]
    with pytest.raises(Unreadable):
        AesGcmCodec(OLD).decrypt(written)
    for elsewhere in (("team:b", "summary", "k"), ("team:a", "archive", "k"), ("team:a", "summary", "j")):
        with pytest.raises(Unreadable):
            sealed.decrypt(Entry(*sealed.row(*elsewhere), written.value, 60))
    raw = written.value
    for damaged in (b"", raw[:11], raw[:-1], raw + b"x", bytes([raw[0] ^ 1]) + raw[1:]):
        with pytest.raises(Unreadable):
            sealed.decrypt(written._replace(value=damaged))


def test_a_pickle_that_was_encrypted_with_the_key_is_refused(tmp_path: Path) -> None:
    """An attacker with the key can write entries, but the store treats them only as data."""

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    sealed = AesGcmCodec(NEW)
    place = sealed.row("team:a", "summary", "k")
    for written in (pickle.dumps(Trap()), pickle.dumps(("team:a", "summary", "k", b""))):
        with pytest.raises(Unreadable):
            sealed.decrypt(Entry(*place, sealed.seal(place, written), 60))
    assert not (tmp_path / "sprung").exists()


def test_names_are_told_apart_and_say_nothing() -> None:
    sealed = AesGcmCodec(NEW)
    places = [sealed.row(*names) for names in (("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("a,", "b", "c"))]
    assert len({place[2] for place in places}) == 4
    assert sealed.row("a", "b", "c") == places[0]
    assert AesGcmCodec(OLD).row("a", "b", "c")[0] != places[0][0]
    assert sealed.row("a", "b", "c")[2] != sealed.row("z", "b", "c")[2]


def test_an_entry_in_another_tenants_place_is_absent_and_logged_without_its_content(tmp_path: Path) -> None:
    path, sealed = tmp_path / "a.db", AesGcmCodec(NEW)

    async def write(store: ManagedStore) -> None:
        await store.put("team:a", "summary", "k", b"PROMPT", 60)

    async def read(store: ManagedStore) -> None:
        before = STORE_UNREADABLE._value.get()
        with capture_logs() as logs:
            assert await store.get("team:b", "summary", "k") is None
        assert STORE_UNREADABLE._value.get() == before + 1
        assert [line["event"] for line in logs] == ["store.undecryptable"]
        assert "PROMPT" not in str(logs)
        assert await store.entries("summary") == []
        await store.put("team:b", "summary", "k", b"again", 60)
        assert await store.get("team:b", "summary", "k") == b"again"

    with_keys(path, [NEW], write)
    changed(path, "UPDATE entries SET tenant = ?, kind = ?, key = ?", *sealed.row("team:b", "summary", "k"))
    with_keys(path, [NEW], read)


def test_what_is_not_even_bytes_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def write(store: ManagedStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)

    async def read(store: ManagedStore) -> None:
        assert await store.get("t", "summary", "k") is None

    for keys in ([NEW], []):
        with_keys(path, keys, write)
        changed(path, "UPDATE entries SET value = 'text' WHERE codec = ?", AesGcmCodec(NEW).id if keys else "")
        with_keys(path, keys, read)


def test_without_the_key_entries_are_absent_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def write(store: ManagedStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)

    async def absent(store: ManagedStore) -> None:
        assert await store.get("t", "summary", "k") is None
        assert await store.entries("summary") == []
        assert await store.unknown() == 1
        with capture_logs() as logs:
            maintenance = Maintenance(store, [])
            await maintenance.once()
            await maintenance.once()
        assert [(line["event"], line["entries"]) for line in logs] == [("store.other_keys", 1)]
        await store.put("t", "summary", "j", b"2", 60)
        assert await store.get("t", "summary", "j") == b"2"
        assert sum((await store.remove("t")).values()) == 1

    async def there(store: ManagedStore) -> None:
        assert await store.get("t", "summary", "k") == b"1"

    with_keys(path, [NEW], write)
    with_keys(path, [OTHER], absent)
    with_keys(path, [], absent)
    with_keys(path, [NEW], there)
