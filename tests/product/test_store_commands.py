"""A proxy with a file moves to Redis and a folder for the archive: `store status` and `store migrate`."""

import asyncio
import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.config import load
from proxy.server.loopback import serve
from proxy.store import open_store
from proxy.store.archive import KIND as ARCHIVE
from tests.kit.front_door import ARCHIVE_ID
from tests.kit.program import call, write_config
from tests.kit.redis_server import RedisServer
from tests.kit.scripted import PROFILE, chat, key_hash, proxied
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

pytest.importorskip("cryptography")
WINDOW = 16_000
HEADERS = {"authorization": "Bearer sk-team"}
BODY = {"model": "m", "messages": chat(60, 250)}


def settings(url: str, tokens: int = 5_000_000) -> dict[str, Any]:
    """The configuration of both proxies, without their stores."""
    limits = {"spend": {"tokens": tokens, "per": "month"}}
    return {
        "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
        "models": [{"match": "*", "upstream": "main", "profile": dict(PROFILE)}],
        "auth": {"mode": "keys"},
        "teams": {"one": {"keys": [key_hash("sk-team")], "limits": limits}},
    }


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=HEADERS, trust_env=False, timeout=60)


def get(url: str, path: str) -> Any:
    return httpx.get(f"{url}{path}", headers=HEADERS, trust_env=False).json()


def held(config: Path) -> Counter[str]:
    """Return the entries in the store of a configuration, by kind."""

    async def counted() -> Counter[str]:
        store = load(config, {}).store
        async with contextlib.aclosing(open_store(store.url, store.encryption.keys)) as entries:
            return Counter([entry.kind async for page in entries.pages() for entry in page])

    return asyncio.run(counted())


def test_a_conversation_continues_on_redis_as_if_nothing_had_happened(redis: RedisServer, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content="Goal: SUMMARY."))
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    with serve(upstream.app) as behind:
        with proxied(settings(behind), old) as url:
            first = ask(url)
            assert first.headers["x-compaction-summary"] == "made"
            id = first.headers["x-compaction-id"]
            archive = ARCHIVE_ID.findall(upstream.conversations[0].raw.decode())[0]
            assert until(lambda: get(url, "/compaction/report")["total"]["requests"] == 1)
            messages = get(url, f"/compaction/archive/{archive}")
            before = get(url, "/compaction/report")["total"]
            ask(url)
            # While the proxy runs: to a server that fails, then again.
            moved = {
                **settings(behind, tokens=1),
                "store": {"url": redis.url, "encryption": {"key": "b" * 64}},
            }
            config = write_config(moved, new)
            with redis.client() as client:
                client.config_set("maxmemory", "1")
                failed = call(new, "store", "migrate", "--from", str(old / "config.yaml"), "--config", str(config))
                client.config_set("maxmemory", "0")
            assert failed.returncode == 2
            assert "run the command again" in failed.stderr
        made = len(upstream.summaries)
        source = f"sqlite:///{old}/store.db"
        for _ in range(2):
            done = call(new, "store", "migrate", "--from", source, "--config", str(config))
            assert done.returncode == 0, done.stderr
            assert "summary.2: " in done.stdout
        assert held(old / "config.yaml")["summary.2"] == held(config)["summary.2"] > 0
        assert held(config)[ARCHIVE] > 0
        assert b"SUMMARY" not in redis.raw()
        with proxied(moved, new) as url:
            spent = ask(url)
            assert spent.status_code == 402, "the budget carries over"
            assert get(url, f"/compaction/requests/{id}")["id"] == id
            assert get(url, "/compaction/report")["total"]["output"] == 2 * before["output"] > 0
        with proxied({**moved, **settings(behind)}, new) as url:
            assert ask(url).headers["x-compaction-summary"] == "stored"
            assert get(url, f"/compaction/archive/{archive}") == messages
            assert until(lambda: get(url, "/compaction/report")["total"]["compacted"] == 3)
    assert len({one.raw for one in upstream.conversations}) == 1
    assert len(upstream.summaries) == made


def test_a_migration_from_a_store_with_other_keys_or_from_none(redis: RedisServer, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    with serve(upstream.app) as behind, proxied(settings(behind), tmp_path) as url:
        ask(url)
    config = tmp_path / "config.yaml"
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE entries SET codec = 'other' WHERE kind = ?", (ARCHIVE,))
    target = tmp_path / "redis.yaml"
    target.write_text(yaml.safe_dump({"store": {"url": redis.url}}))
    moved = call(tmp_path, "store", "migrate", "--from", str(config), "--config", str(target))
    assert moved.returncode == 1
    assert "can't be read" in moved.stderr
    missing = call(tmp_path, "store", "migrate", "--from", "sqlite:///no.db", "--config", str(target))
    assert (missing.returncode, f"there is no {tmp_path}/no.db" in missing.stderr) == (2, True)
    same = call(tmp_path, "store", "migrate", "--from", str(target), "--config", str(target))
    assert (same.returncode, "this is the store of the configuration" in same.stderr) == (2, True)


@pytest.mark.parametrize("command", [["requests"], ["report"], ["show", "0" * 24], ["forget", "--team", "a"]])
def test_a_relative_store_that_is_not_in_this_folder_is_named(command: list[str], tmp_path: Path) -> None:
    server, elsewhere = tmp_path / "server", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (server / "state").mkdir(parents=True)
    config = server / "config.yaml"
    config.write_text("store: {url: 'sqlite:///state/x.db'}\nupstreams: {main: {}}\n")
    done = call(elsewhere, *command, "--config", str(config))
    assert done.returncode == 2
    file = "x-records.db" if command[0] in ("requests", "report", "show") else "x.db"
    assert done.stderr == (
        f"store.url: there is no {elsewhere}/state/{file}. A relative path starts at the current folder. "
        "Fix: run the command in the server's folder, or write an absolute path\n"
    )


def test_commands_that_send_nothing_say_that_any_key_of_an_upstream_will_do(tmp_path: Path) -> None:
    config = str(write_config({"upstreams": {"main": {"api_key": "${ACME_API_KEY}"}}}, tmp_path))
    for command in (["requests"], ["report"], ["show", "0" * 24], ["forget", "--team", "a"]):
        done = call(tmp_path, *command, "--config", config)
        assert done.returncode == 2
        assert "Fix: export ACME_API_KEY=VALUE\nThis command sends nothing, so API keys of upstreams" in done.stderr
        assert "isn't set" not in call(tmp_path, *command, "--config", config, ACME_API_KEY="x").stderr
    assert "sends nothing" not in str(call(tmp_path, "check", config))
    checked = call(tmp_path, "check", config)
    assert (checked.returncode, checked.stderr.count("--no-env")) == (1, 1)
    assert call(tmp_path, "check", "--no-env", config).returncode == 0
