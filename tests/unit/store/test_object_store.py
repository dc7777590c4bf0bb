"""Object storage: versions of entries, sweeps in steps, requests per operation, and failures.

``test_backends.py`` has the tests that all kinds of stores share.
"""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.store.forgetting import remove
from proxy.store.interface import StoreFailed
from tests.kit.object_server import CREDENTIALS, INSTALLED, MISSING, ObjectServer, object_server
from tests.kit.stores import Clock, contents

if not INSTALLED:
    pytest.skip(MISSING, allow_module_level=True)

from proxy.store import object_store
from proxy.store.object_store import CHECK_SECONDS, SWEEP_SECONDS, ObjectsStore


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with object_server() as found:
        yield found


def on(server: ObjectServer, clock: Callable[[], float] | None = None) -> ObjectsStore:
    options = {"endpoint": server.endpoint, "region": "eu-central-1"}
    return ObjectsStore("s3://bucket/archives", options, clock or Clock())


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_write_is_one_request_and_a_read_is_two(server: ObjectServer) -> None:
    async def test() -> None:
        store = on(server)
        await store.put("t", "archive", "k", b"x" * 6_000_000, 60)
        assert server.calls == ["PUT"]
        assert await store.get("t", "archive", "k") == b"x" * 6_000_000
        assert server.calls == ["PUT", "LIST", "GET"]
        assert await store.get("t", "archive", "other") is None
        assert server.calls == ["PUT", "LIST", "GET", "LIST"]

    asyncio.run(test())


def test_the_newest_version_counts_until_it_expires(server: ObjectServer) -> None:
    async def test() -> None:
        clock = Clock()
        store = on(server, clock)
        await store.put("t", "archive", "k", b"old", 1_000)
        clock.now += 1
        await store.put("t", "archive", "k", b"new", 60)
        assert await store.get("t", "archive", "k") == b"new"
        assert [entry.value for entry in await store.entries("archive")] == [b"new"]
        clock.now += 60
        assert await store.get("t", "archive", "k") is None
        assert await store.add("t", "archive", "k", b"again", 60) == b"again"
        await store.put("t", "archive", "k", b"", 0)
        assert (await store.get("t", "archive", "k"), server.objects) == (None, {})

    asyncio.run(test())


def test_a_sweep_removes_expired_and_replaced_versions_once_for_all_replicas(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pages, so that the versions of an entry are on several of them."""
    monkeypatch.setattr(object_store, "PAGE", 3)
    monkeypatch.setattr(object_store, "PAGES", 2)

    async def test() -> None:
        clock = Clock()
        store, replica = on(server, clock), on(server, clock)
        for n in range(8):
            for seconds in (100_000, 100_001, 50 if n % 2 else 100_002):
                clock.now += 0.001
                await store.put("t", "archive", f"k{n}", b"%d" % seconds, seconds)
        server.objects["archives/1/foreign"] = b"not an entry"
        clock.now += 60
        rounds = 0
        while len(server.objects) > 4 + 1 + 1:
            await store.maintain()
            rounds += 1
        assert rounds > 3, "it continues in the next round"
        await store.maintain()
        assert await store.unknown() == 0
        assert await store.counts() == {"": 4}
        assert [entry.value for entry in await store.entries("archive")] == [b"100002"] * 4
        server.calls.clear()
        await replica.maintain()
        assert (server.calls, await replica.unknown(), len(server.calls)) == (["GET"], 0, 1)
        for _ in range(5):
            await replica.maintain()
            await store.maintain()
        assert len(server.calls) <= 2, "at most one look each, for CHECK_SECONDS"
        clock.now += SWEEP_SECONDS + CHECK_SECONDS
        server.calls.clear()
        await replica.maintain()
        assert server.calls.count("LIST") > 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("failure", "error"), [("refuses", r"GenericError 403|PermissionDeniedError"), ("overloaded", "GenericError 503")]
)
def test_a_service_that_fails_raises_without_a_name(server: ObjectServer, failure: Any, error: str) -> None:
    async def test() -> None:
        store = on(server)
        await store.put("tenant", "archive", "k", b"1", 60)
        server.failure = failure
        work: list[Callable[[], Awaitable[object]]] = [
            lambda: store.get("tenant", "archive", "k"),
            lambda: store.get_many("tenant", "archive", ["k"]),
            lambda: store.put("tenant", "archive", "k", b"1", 60),
            lambda: store.add("tenant", "archive", "k", b"1", 60),
            lambda: store.delete("tenant", "archive", "k"),
            lambda: store.entries("archive"),
            lambda: store.scan("", 1),
            lambda: store.remove("tenant"),
            lambda: store.remove_codec(""),
            lambda: store.maintain(),
            lambda: store.unknown(),
        ]
        for result in await asyncio.gather(*(one() for one in work[:-1]), return_exceptions=True):
            assert isinstance(result, StoreFailed)
            assert "tenant" not in str(result)
        with pytest.raises(StoreFailed, match=error):
            await work[-1]()
        server.failure = ""
        assert await store.get("tenant", "archive", "k") == b"1"

    asyncio.run(test())


def test_a_folder_is_for_its_owner_and_keeps_no_trace(tmp_path: Path) -> None:
    """Also not the beginning of a file that a killed process was writing."""

    async def test() -> None:
        store = ObjectsStore(f"file://{tmp_path}/made/here")
        await store.put("team:A", "archive", "k", b"CANARY", 60)
        (written,) = files(tmp_path)
        written.with_name(f"{written.name}#1").write_bytes(b"CANARY")
        assert [entry.tenant for entry in await store.entries("archive")] == ["team:A"]
        assert await remove(store, "team:A") == {"archive": 1}
        assert b"team" not in contents(tmp_path)
        assert files(tmp_path) == []

    asyncio.run(test())
    assert stat.S_IMODE((tmp_path / "made" / "here").stat().st_mode) == 0o700
