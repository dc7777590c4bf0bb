"""Test that processes on one store spend from one account: conflicts, lost replies, outages, and killed processes."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from proxy.store import Store, StoreFailed, accounts
from proxy.store.accounts import LEASE_SECONDS, Account, Amount, Balance
from proxy.store.sqlite import SqliteStore
from tests.kit.stores import Clock

PLACE = ("team:red", "spending.2", "day 1")


def account(store: Store | None, clock: Clock) -> Account:
    return Account(store, PLACE, 1e9, clock)


async def reserve(of: Account, id: str, tokens: int, limit: int) -> bool:
    return await of.reserve(id, Amount(tokens), lambda total: total.tokens < limit)


class Unreliable(SqliteStore):
    """Loses replies of writes, or fails before it writes. ``failing`` is the share of calls."""

    failing = 0.0
    random = random.Random(7)

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        if self.random.random() < self.failing / 3:
            raise StoreFailed("not read")
        return await super().get_many(tenant, kind, keys)

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float, codec: str = "") -> bytes:
        lost = self._loses()
        found = await super().add(tenant, kind, key, value, seconds, codec)
        if lost:
            raise StoreFailed("reply lost")
        return found

    async def replace(
        self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float, codec: str = ""
    ) -> bool:
        lost = self._loses()
        done = await super().replace(tenant, kind, key, old, new, seconds, codec)
        if lost:
            raise StoreFailed("reply lost")
        return done

    def _loses(self) -> bool:
        chance = self.random.random()
        if chance < self.failing / 3:
            raise StoreFailed("not written")
        return chance < self.failing


def test_each_amount_counts_once_with_conflicts_lost_replies_and_outages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(accounts, "FLUSH_SECONDS", 0.001)

    async def work() -> None:
        clock = Clock(1_000.0)
        stores = [Unreliable(tmp_path / "store.db") for _ in range(3)]
        every = [account(store, clock) for store in stores]
        for store in stores:
            store.failing = 0.4

        async def spend(of: Account, name: str) -> None:
            for number in range(20):
                id = f"{name} {number}"
                assert await reserve(of, id, 10, 1 << 40)
                await asyncio.sleep(random.random() / 500)
                assert of.settle(id, Amount(7, 3))

        await asyncio.gather(*(spend(of, f"{at} {task}") for at, of in enumerate(every) for task in range(3)))
        for store in stores:
            store.failing = 0.0
        for of in every:
            await of.aclose()
        fresh = account(stores[0], clock)
        await fresh.read()
        assert fresh.spent == fresh.total == Amount(3 * 3 * 20 * 7, 3 * 3 * 20 * 3)
        await fresh.aclose()
        for store in stores:
            await store.aclose()

    asyncio.run(work())


def test_the_reservations_of_a_killed_process_end_after_a_minute(tmp_path: Path) -> None:
    async def work() -> None:
        clock = Clock(1_000.0)
        store, other = SqliteStore(tmp_path / "store.db"), SqliteStore(tmp_path / "store.db")
        killed, alive = account(store, clock), account(other, clock)
        assert await reserve(killed, "a", 100, 100)
        assert not await reserve(alive, "b", 100, 100)
        clock.now += LEASE_SECONDS + 1
        assert await reserve(alive, "b", 100, 100)
        await killed.aclose()
        await alive.aclose()
        await store.aclose()
        await other.aclose()

    asyncio.run(work())


def test_an_entry_that_is_lost_or_damaged_does_not_begin_again(tmp_path: Path) -> None:
    async def work() -> None:
        store = SqliteStore(tmp_path / "store.db")
        of = account(store, Clock(1_000.0))
        of.settle("a", Amount(100))
        await of.read()
        await store.put(*PLACE, b"damaged", 60)
        assert not await reserve(of, "b", 1, 100)
        await store.remove(PLACE[0])
        assert not await reserve(of, "b", 1, 100)
        await of.aclose()
        await store.aclose()

    asyncio.run(work())


@pytest.mark.parametrize(
    "stored",
    [
        b'{"until":1e308,"tokens":5,"money":0,"reserved":{}}',
        b'{"until":-1e308,"tokens":5,"money":0,"reserved":{}}',
        b'{"until":90000,"tokens":-1000000,"money":-5,"reserved":{}}',
        b'{"until":90000,"tokens":5,"money":0,"reserved":{"a":[1,-1000000,0,90000]}}',
        b'{"until":90000,"tokens":5,"money":0,"reserved":{"a":[1,1,0,1e308]}}',
    ],
)
def test_an_entry_with_impossible_figures_neither_ends_the_work_nor_gives_a_budget_back(
    tmp_path: Path, stored: bytes
) -> None:
    async def work() -> None:
        store = SqliteStore(tmp_path / "store.db")
        of = account(store, Clock(1_000.0))
        of.settle("a", Amount(100))
        await of.read()
        await store.put(*PLACE, stored, 60)
        assert not await reserve(of, "b", 1, 100)
        assert await reserve(of, "c", 1, 250)
        await of.aclose()
        written = msgspec.json.decode(await store.get(*PLACE) or b"", type=Balance)
        assert 0 <= written.until < 1e11
        await store.aclose()

    asyncio.run(work())
