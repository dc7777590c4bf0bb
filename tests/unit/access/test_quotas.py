"""Decisions of a store that is slow, or of a process that is busy. Real servers: tests/product/test_fleet.py."""

import asyncio
from collections.abc import Collection, Mapping

import pytest

from proxy.access.quotas import SharedQuotas
from proxy.config.teams import LimitSettings
from proxy.store.redis_store import Admission

pytestmark = pytest.mark.anyio

LIMITS = LimitSettings(concurrent=1)


class Counts:
    """A store that decides after ``go``. ``calls`` has its calls in order."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.calls: list[str] = []

    async def admit(self, team: str, id: str, per_minute: int | None, concurrent: int | None) -> Admission:
        await self.go.wait()
        self.calls.append("admit")
        return Admission("admitted", 0)

    async def release(self, team: str, ids: Collection[str]) -> None:
        self.calls.append("release")

    async def renew(self, held: Mapping[str, Collection[str]]) -> None:
        raise AssertionError

    async def aclose(self) -> None:
        self.calls.append("close")


async def test_a_late_decision_is_taken_back_after_it_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.access.quotas.ADMIT_SECONDS", 0.001)
    counts = Counts()
    quotas = SharedQuotas(counts)
    assert (await quotas.admit("team", LIMITS))[0] is None
    assert counts.calls == []
    counts.go.set()
    await quotas.aclose()
    assert counts.calls == ["admit", "release", "close"]
