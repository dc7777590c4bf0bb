"""Connections to Redis servers, Sentinels, and clusters, and the store on a real server."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from proxy.records.model import RecordQuery
from proxy.records.redis import RedisRecords
from proxy.store import StoreFailed
from proxy.store.redis_client import check, close, connect, name, parts
from proxy.store.redis_store import RedisStore
from proxy.telemetry.record import RequestRecord, new_id
from tests.kit.program import free_port
from tests.kit.redis_server import MISSING, PROGRAM, RedisServer, redis_server
from tests.kit.stores import with_store
from tests.kit.waiting import until

needs_redis = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


def test_an_address_holds_user_password_database_and_options() -> None:
    client = connect("rediss://me:p%40ss@host:7000/3?ssl_ca_certs=/ca.pem")
    assert isinstance(client, Redis)
    given = client.connection_pool.connection_kwargs
    assert (given["host"], given["port"], given["db"]) == ("host", 7000, 3)
    assert (given["username"], given["password"], given["ssl_ca_certs"]) == ("me", "p@ss", "/ca.pem")
    assert client.connection_pool.connection_class.__name__ == "SSLConnection"


def test_an_address_of_sentinels_needs_a_service() -> None:
    with pytest.raises(ValueError, match="the name of the service"):
        connect("redis+sentinel://one:26379")


@pytest.mark.parametrize("form", ["rediss://host/0", "rediss+sentinel://host:1/service/0", "rediss+cluster://host"])
def test_an_address_may_have_parameters(form: str) -> None:
    check(f"{form}?socket_timeout=1.5&ssl_ca_certs=/missing.pem&ssl_min_version=772&client_name=me")


def test_parameters_of_sentinels_have_the_types_that_the_client_needs() -> None:
    given = connect("redis+sentinel://one:1/service/2?socket_timeout=1.5").connection_pool.connection_kwargs
    assert (given["socket_timeout"], given["db"]) == (1.5, 2)


@pytest.mark.parametrize("odd", ["a:b", "a*?[b]", "\\", "ü\n", "", "100%"])
def test_any_text_is_a_part_of_a_name(odd: str) -> None:
    key = name("entry", odd, "end")
    assert parts(key.encode()) == ["entry", odd, "end"]
    assert not set(key) & set("*?[]\\\n")


@needs_redis
def test_a_connection_sends_nothing_before_its_first_command(redis: RedisServer) -> None:
    """A slow server would otherwise take several times as long for it."""

    async def read() -> None:
        client = connect(redis.url)
        assert await client.get("a") is None
        await close(client)

    with redis.client() as observer:
        observer.ping()
        observer.config_resetstat()
        asyncio.run(read())
        assert {*observer.info("commandstats")} - {"cmdstat_config|resetstat", "cmdstat_info"} == {"cmdstat_get"}


async def used(url: str) -> None:
    """Use every kind of operation. Raises ``AssertionError``."""
    store, records = RedisStore(url), RedisRecords(url)
    try:
        for number in range(60):
            await store.put("t", "summary", f"{number}", b"%d" % number, 60)
        assert await store.get_many("t", "summary", ["1", "59", "60"]) == {"1": b"1", "59": b"59"}
        assert await store.add("t", "summary", "1", b"other", 60) == b"1"
        assert len(await store.entries("summary")) == 60
        made = [RequestRecord(new_id(), time.time(), tenant="t", kind="summary", parent="p") for _ in range(5)]
        await records.write(made, 60)
        assert [one.id for one in await records.select(RecordQuery(parent="p"))] == [one.id for one in made][::-1]
        assert (await records.ledger(0, 10**6))[0][1].summaries == 5
        await records.maintain(3)
        assert len(await records.select(RecordQuery())) == 3
        assert await records.remove("t") == {"record": 3, "ledger row": 1}
        assert await store.remove("t") == {"summary": 60}
        await store.maintain()
    finally:
        await store.aclose()
        await records.aclose()


@needs_redis
def test_a_password(tmp_path: Path) -> None:
    with redis_server(tmp_path / "server", ["--requirepass", "secret"], password="secret") as server:
        asyncio.run(used(server.url))


@pytest.mark.long
@needs_redis
def test_a_cluster(tmp_path: Path) -> None:
    with redis_server(tmp_path / "server", ["--cluster-enabled", "yes", "--cluster-port", f"{free_port()}"]) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            assert until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        asyncio.run(used(f"redis+cluster://127.0.0.1:{server.port}"))


@pytest.mark.long
@needs_redis
def test_a_replica_that_sentinels_promote(tmp_path: Path) -> None:
    with redis_server(tmp_path / "one") as one, redis_server(tmp_path / "two", _follows(one)) as two:
        folder = tmp_path / "sentinel"
        folder.mkdir()
        watched = f"sentinel monitor service 127.0.0.1 {one.port} 1\nsentinel down-after-milliseconds service 300\n"
        (folder / "sentinel.conf").write_text(f"{watched}sentinel failover-timeout service 1000\n")
        with redis_server(folder, ["--sentinel"], config=folder / "sentinel.conf") as sentinel:

            async def test() -> None:
                store = RedisStore(f"redis+sentinel://127.0.0.1:{sentinel.port}/service/0")
                await store.put("t", "summary", "k", b"1", 60)
                with two.client() as client:
                    assert until(lambda: client.dbsize() > 0)
                with sentinel.client() as client:
                    assert until(lambda: client.execute_command("SENTINEL", "REPLICAS", "service"))
                one.stop()
                assert until(lambda: _role(two) == b"master")
                assert await _in_time(store) == b"1"
                await store.aclose()

            asyncio.run(test())


async def _in_time(store: RedisStore) -> bytes | None:
    """Read until the store has found the promoted server, as further requests would."""
    for _ in range(100):
        with contextlib.suppress(StoreFailed):
            return await store.get("t", "summary", "k")
        await asyncio.sleep(0.1)
    return None


def _role(server: RedisServer) -> bytes | None:
    # A server that is promoted closes its connections.
    with server.client() as client, contextlib.suppress(RedisError):
        return bytes(client.role()[0])
    return None


def _follows(server: RedisServer) -> list[str]:
    return ["--replicaof", "127.0.0.1", str(server.port)]


def run(server: RedisServer, *tests: Callable[[RedisStore], Awaitable[None]]) -> None:
    """Run tests one after the other, each with a store of its own on the same server."""
    with_store(lambda: RedisStore(server.url), *tests)


def test_the_name_of_a_removed_entry_leaves_the_index_unless_it_was_added_again(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        for key in ("replaced", "expired", "again"):
            await store.put("t", "summary", key, b"1", 60)
        assert await store.replace("t", "summary", "replaced", b"1", b"", 0)
        await store.put("t", "summary", "expired", b"2", -1)
        await store._leave_index("", "summary", [("t", "again")])  # another process has just added it
        with redis.client() as client:
            ((name, until),) = client.zrange("compaction:index:1::summary", 0, -1, withscores=True)
        assert name == b"t:again"
        assert 50 < until - time.time() <= 61
        assert [entry.key for entry in await store.entries("summary")] == ["again"]

    run(redis, test)


def test_a_server_that_is_down_raises_and_works_again_without_a_new_client(redis: RedisServer) -> None:
    async def test(store: RedisStore) -> None:
        await store.put("t", "summary", "k", b"1", 60)
        redis.stop()
        for work in (
            lambda: store.get("t", "summary", "k"),
            lambda: store.get_many("t", "summary", ["k"]),
            lambda: store.put("t", "summary", "k", b"1", 60),
            lambda: store.add("t", "summary", "k", b"1", 60),
            lambda: store.replace("t", "summary", "k", b"1", b"2", 60),
            lambda: store.entries("summary"),
            lambda: store.remove("t"),
            lambda: store.maintain(),
            lambda: store.unknown(),
        ):
            with pytest.raises(StoreFailed, match="Redis: ConnectionError"):
                await work()
        redis.start()
        assert await store.get("t", "summary", "k") is None
        await store.put("t", "summary", "k", b"2", 60)
        assert [entry.value for entry in await store.entries("summary")] == [b"2"]

    run(redis, test)
