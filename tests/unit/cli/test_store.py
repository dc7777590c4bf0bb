"""Copies of one store in another: interrupted, repeated, encrypted with other keys, and with tenants forgotten."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from proxy.cli.store import Deployment, Migration
from proxy.records import open_records
from proxy.records.model import RecordQuery
from proxy.store import ManagedStore, open_store
from proxy.store.accounts import Balance
from proxy.store.forgetting import ALLOWANCE as KIND
from proxy.store.forgetting import forget
from proxy.store.sqlite import SqliteStore
from tests.kit.records import record

pytest.importorskip("cryptography")
OLD, NEW = b"o" * 32, b"n" * 32
DAYS = 7 * 86_400.0
UNTIL = time.time() + DAYS


class Killed(BaseException):
    """The process ends here."""


class Ending(SqliteStore):
    """A store in a process that is killed at a write."""

    left = 0

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float, codec: str = "") -> bytes:
        if self.left == 0:
            raise Killed
        self.left -= 1
        return await super().add(tenant, kind, key, value, seconds, codec)


def place(url: str, keys: Sequence[bytes] = (), *, every: bool = False) -> Deployment:
    several = [keys, ()] if every else [keys]
    return Deployment([open_store(url, own) for own in several], [open_records(url, own) for own in several])


async def migrated(source: Deployment, target: Deployment) -> Migration:
    migration = Migration(source, target, "source", DAYS)
    try:
        await migration.run()
    finally:
        await source.aclose()
        await target.aclose()
    return migration


async def everything(place: Deployment) -> dict[tuple[str, str, str], tuple[bytes, int]]:
    """Return the entries, with their lifetimes in minutes."""
    try:
        found = {}
        for store in place.stores:
            async for entries in store.pages():
                for one in entries:
                    found[one.tenant, one.kind, one.key] = (one.value, round(one.seconds / 60))
        return found
    finally:
        await place.aclose()


async def filled(store: ManagedStore, count: int = 30) -> None:
    for number in range(count):
        await store.put(f"team:{number % 3}", "summary", f"s{number}", b"S%d" % number, 60 * (number + 10))
        await store.put(f"team:{number % 3}", "archive", f"a{number}", b"A%d" % number, 60 * (number + 10))
    await store.put("team:0", "making", "k", b"token", 60)
    await store.put("team:0", KIND, "b", msgspec.json.encode(Balance(UNTIL, 5)), 600)


@pytest.fixture(params=["sqlite-redis", "redis-sqlite", "sqlite-sqlite"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The addresses of the source and of the target."""
    redis = request.getfixturevalue("redis").url if "redis" in request.param else ""
    files = iter([f"sqlite:///{tmp_path}/one/store.db", f"sqlite:///{tmp_path}/two/store.db"])
    return [redis if name == "redis" else next(files) for name in request.param.split("-")]


@pytest.mark.long
def test_everything_is_copied_once_with_its_lifetime_and_under_the_keys_of_the_target(urls: list[str]) -> None:
    source, target = urls

    async def test() -> None:
        for keys, count in (((OLD,), 30), ((), 31)):  # one entry more, from before encryption
            store = open_store(source, keys)
            await filled(store, count) if keys else await store.put("team:1", "item", "plain", b"I", 600)
            await store.aclose()
        records = open_records(source, [OLD])
        written = [record(f"team:{number % 3}") for number in range(5)]
        await records.write(written, DAYS)
        await records.remove("team:2")  # a row that the ledger must not get back
        rows = await records.ledger(0, 99_999)
        await records.aclose()
        newer = open_store(target, [NEW])
        await newer.put("team:0", "summary", "s0", b"the target's", 900)
        await newer.put("team:0", KIND, "b", msgspec.json.encode(Balance(UNTIL, 3)), 600)
        await newer.aclose()

        def wanted() -> Deployment:
            return place(target, [NEW])

        first = await migrated(place(source, [OLD], every=True), wanted())
        copied = first.copied
        assert copied.counts == {"summary": 29, "archive": 30, "item": 1, "record": 4, "ledger row": len(rows)}
        assert copied.present == {"summary": 1, KIND: 1}
        found = await everything(wanted())
        assert found["team:1", "summary", "s1"] == (b"S1", 11)
        assert found["team:0", "summary", "s0"] == (b"the target's", 15)
        assert found["team:1", "item", "plain"] == (b"I", 10)
        assert msgspec.json.decode(found["team:0", KIND, "b"][0], type=Balance).tokens == 8
        assert not [row for row in found if row[1] == "making"]

        again = (await migrated(place(source, [OLD], every=True), wanted())).copied
        assert {kind for kind, count in again.counts.items() if count} == {"record", "ledger row"}
        assert again.present["archive"] == 30
        assert await everything(wanted()) == found
        records = open_records(target, [NEW])
        assert await records.ledger(0, 99_999) == rows
        assert len(await records.select(RecordQuery())) == 4
        await records.write([record("team:0")], DAYS)
        total = sum(sums.requests for _, sums in await records.ledger(0, 99_999))
        assert total == sum(sums.requests for _, sums in rows) + 1
        await records.aclose()

    asyncio.run(test())


def test_a_run_that_is_killed_anywhere_is_continued(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/one.db"

    async def test() -> None:
        store = open_store(url)
        await filled(store, 6)
        await store.aclose()
        for runs in itertools.count(1):  # noqa: B007 - read after the loop
            ending = Ending(tmp_path / "two.db")
            ending.left = 3
            try:
                await migrated(place(url), Deployment([ending], [open_records(f"sqlite:///{tmp_path}/two.db")]))
            except Killed:
                continue
            break
        assert runs == 5
        wanted = {row: found for row, found in (await everything(place(url))).items() if row[1] != "making"}
        copied = await everything(place(f"sqlite:///{tmp_path}/two.db"))
        account, _ = copied.pop(row := ("team:0", KIND, "b"))
        assert (
            msgspec.json.decode(account, type=Balance).tokens
            == msgspec.json.decode(wanted.pop(row)[0], type=Balance).tokens
        )
        assert copied == wanted

    asyncio.run(test())


def test_a_tenant_that_is_forgotten_during_a_run_is_removed_from_the_target(tmp_path: Path) -> None:
    source, target = place(f"sqlite:///{tmp_path}/one.db"), place(f"sqlite:///{tmp_path}/two.db")

    async def test() -> None:
        await filled(source.stores[0], 9)
        migration = Migration(source, target, "source", DAYS)
        copy_records = migration._copy_records
        migration._copy_records = forgetting  # type: ignore[method-assign]
        forgetting.then = copy_records  # type: ignore[attr-defined]
        await migration.run()
        await source.aclose()
        left = await everything(target)
        assert {tenant for tenant, kind, _ in left if kind != KIND} == {"team:1", "team:2"}
        assert ("team:0", KIND, "b") in left, "what a team has spent stays"

    async def forgetting(*records: object) -> None:
        await forget(source.stores[0], "team:0")
        await forgetting.then(*records)  # type: ignore[attr-defined]

    asyncio.run(test())
