"""The rounds of maintenance: they begin no file, survive errors, and drop tenants that another process forgot."""

import asyncio
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy.limits.learned import Limits
from proxy.server.maintenance import Maintenance
from proxy.store.forgetting import forget
from proxy.store.replicated_map import ReplicatedMap
from proxy.store.sqlite import SqliteStore
from tests.kit.stores import with_store


@pytest.mark.parametrize("where", ["folder", "round"])
def test_an_error_of_one_round_does_not_end_upkeep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A network folder that can't be read for a moment, or a fault of the proxy's own."""
    monkeypatch.setattr("proxy.server.maintenance.EVERY", 0.01)
    failing = True

    def fault(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            if failing:
                raise (PermissionError(errno.EACCES, "no") if where == "folder" else KeyError("a fault"))
            return real(*arguments, **named)

        return run

    async def test(store: SqliteStore) -> None:
        nonlocal failing
        await store.put("t", "summary", "k", b"1", 60)
        place = (Path, "stat") if where == "folder" else (SqliteStore, "entries")
        monkeypatch.setattr(*place, fault(getattr(*place)))
        maintenance = Maintenance(store, [])
        with capture_logs() as logs:
            maintenance.start()
            async with asyncio.timeout(10):
                while not logs:  # noqa: ASYNC110 - the log has no event to wait for
                    await asyncio.sleep(0.01)
        assert {line["event"] for line in logs} == {"store.upkeep_failed"}
        failing = False
        done, real = asyncio.Event(), store.maintain

        async def maintain_again() -> None:
            await real()
            done.set()

        monkeypatch.setattr(store, "maintain", maintain_again)
        async with asyncio.timeout(10):
            await done.wait()
        await maintenance.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)


def test_a_running_process_notices_that_a_tenant_was_forgotten(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        shared = ReplicatedMap(store, "limit", Limits, 10)
        maintenance = Maintenance(store, [shared])
        await maintenance.once()
        for tenant in ("team:leaving", "team:a"):
            shared.put(tenant, "u", "m", Limits("u", "m"))
            await store.put(tenant, "summary", "k", b"1", 60)
        command = SqliteStore(tmp_path / "a.db")
        await forget(command, "team:leaving")
        await store.put("team:leaving", "summary", "since", b"1", 60)
        await maintenance.once()
        assert shared.get("team:leaving", "u", "m") is None
        assert shared.get("team:a", "u", "m") == Limits("u", "m")
        assert await store.get("team:leaving", "summary", "since") is None
        await maintenance.once()
        # After one more round, which removes late writes, the tenant is like any other.
        shared.put("team:leaving", "u", "m", Limits("u", "m"))
        await store.put("team:leaving", "summary", "later", b"1", 60)
        await maintenance.once()
        assert shared.get("team:leaving", "u", "m") is not None
        assert await store.get("team:leaving", "summary", "later") == b"1"
        await forget(command, "team:leaving")
        await maintenance.once()
        assert shared.get("team:leaving", "u", "m") is None
        await shared.aclose()
        await command.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)


def test_a_command_on_a_machine_with_a_slow_clock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: SqliteStore) -> None:
        shared = ReplicatedMap(store, "limit", Limits, 10)
        maintenance = Maintenance(store, [shared])
        await maintenance.once()
        now = time.time()
        for clock in (now - 86_000.0, now - 86_000.0 + 5, now - 90_000.0):
            shared.set_local("t", "u", "m", Limits("u", "m"))
            with monkeypatch.context() as patched:
                patched.setattr("proxy.store.forgetting.time.time", lambda clock=clock: clock)
                await forget(store, "t")
            await maintenance.once()
            assert shared.get("t", "u", "m") is None
        await shared.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)


def test_who_starts_after_it_has_nothing_to_drop(tmp_path: Path) -> None:
    async def test(store: SqliteStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        await forget(store, "t")
        shared = ReplicatedMap(store, "limit", Limits, 10)
        maintenance = Maintenance(store, [shared])
        shared.put("t", "u", "m", Limits("u", "m"))
        await maintenance.once()
        assert shared.get("t", "u", "m") is not None
        await shared.aclose()

    with_store(lambda: SqliteStore(tmp_path / "a.db"), test)
