"""The commands: `store backup` while requests run, `store migrate` to a new place, and `forget`."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.server.loopback import serve
from proxy.store.archive import KIND as ARCHIVE
from tests.kit.front_door import ARCHIVE_ID
from tests.kit.program import call, write_config
from tests.kit.redis_server import RedisServer
from tests.kit.scripted import PROFILE, chat, key_hash, proxied
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

pytest.importorskip("cryptography")


def settings(upstream: str, store: dict[str, Any], tokens: int = 50_000_000) -> dict[str, Any]:
    return {
        "store": store,
        "upstreams": {"main": {"base_url": f"{upstream}/v1", "api_key": "sk-upstream"}},
        "models": [{"match": "*", "upstream": "main", "profile": dict(PROFILE)}],
        "auth": {"mode": "keys"},
        "teams": {"one": {"keys": [key_hash("sk-team")], "limits": {"spend": {"tokens": tokens, "per": "month"}}}},
    }


def in_file(folder: Path) -> dict[str, Any]:
    return {"url": f"sqlite:///{folder}/store.db"}


def conversation(number: int) -> list[Any]:
    system, first, *rest = chat(40, 250)
    return [system, {**first, "content": f"Task {number}. {first['content']}"}, *rest]


def ask(url: str, number: int, key: str = "sk-team") -> httpx.Response:
    body, headers = {"model": "m", "messages": conversation(number)}, {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)


def get(url: str, path: str) -> Any:
    return httpx.get(f"{url}{path}", headers={"authorization": "Bearer sk-team"}, trust_env=False).json()


@contextlib.contextmanager
def busy(url: str) -> Iterator[list[int]]:
    """Send requests until the block ends. Yield their statuses."""
    ended, statuses = threading.Event(), list[int]()

    def work() -> None:
        while not ended.is_set():
            statuses.append(ask(url, 100 + len(statuses)).status_code)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", ["sqlite", "encrypted", "redis", "moved"])
def test_a_backup_while_requests_run_restores_every_record_and_summary(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A store that is ``moved`` is copied without a backup, twice, from a file to an encrypted Redis server."""
    old, new, upstream = tmp_path / "old", tmp_path / "new", StandIn(window=16_000, summariser=summarized)
    for folder in (old, new):
        folder.mkdir()
    keys: dict[str, Any] = {"encryption": {"key": "a" * 64}} if kind == "encrypted" else {}
    url = request.getfixturevalue("redis").url if kind == "redis" else f"sqlite:///{old}/store.db"
    backup, source = tmp_path / "backup.db", str(tmp_path / "backup.db")
    with serve(upstream.app) as behind:
        with proxied(settings(behind, {"url": url, **keys}), old) as entrance:
            ids = [ask(entrance, number).headers["x-compaction-id"] for number in range(3)]
            archives = {one for seen in upstream.conversations for one in ARCHIVE_ID.findall(seen.raw.decode())}
            assert until(lambda: get(entrance, "/compaction/report")["total"]["requests"] == 3)
            assert until(lambda: all("error" not in get(entrance, f"/compaction/archive/{one}") for one in archives))
            messages = [get(entrance, f"/compaction/archive/{one}") for one in archives]
            with busy(entrance) as statuses:
                assert until(lambda: get(entrance, "/compaction/report")["total"]["requests"] >= 5, 60)
                done = call(old, "store", "backup", str(backup), "--config", str(old / "config.yaml"))
                sent = len(statuses)
                assert until(lambda: len(statuses) > sent, 60)
            assert done.returncode == 0, done.stderr
            assert set(statuses) == {200}
        assert backup.stat().st_mode & 0o077 == 0
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("backup")] == ["backup.db"]
        if kind == "encrypted":
            assert b"SUMMARY" not in backup.read_bytes()
        if kind == "redis":
            with request.getfixturevalue("redis").client() as client:
                client.flushall()
        place = {"url": url if kind == "redis" else f"sqlite:///{new}/store.db", **keys}
        if kind == "moved":
            place = {"url": request.getfixturevalue("redis").url, "encryption": {"key": "b" * 64}}
            source = f"sqlite:///{old}/store.db"
        restored = settings(behind, place)
        config = write_config(restored, new)
        for _ in range(2 if kind == "moved" else 1):
            done = call(new, "store", "migrate", "--from", source, "--config", str(config))
            assert done.returncode == 0, done.stderr
        assert kind != "moved" or b"SUMMARY" not in request.getfixturevalue("redis").raw()
        made = len(upstream.summaries)
        with proxied(restored, new) as entrance:
            assert [get(entrance, f"/compaction/requests/{id}")["id"] for id in ids] == ids
            assert [get(entrance, f"/compaction/archive/{one}") for one in archives] == messages
            assert get(entrance, "/compaction/report")["total"]["requests"] >= 5
            for number in range(3):
                assert ask(entrance, number).headers["x-compaction-summary"] == "stored"
        assert len(upstream.summaries) == made
        with proxied(settings(behind, place, tokens=1), new) as entrance:
            assert ask(entrance, 0).status_code == 402, "the budget carries over"


def summarized(body: dict[str, Any]) -> Reply:
    return Reply(content="Goal: SUMMARY.")


def test_a_backup_that_is_restored_twice_counts_once(tmp_path: Path, redis: RedisServer) -> None:
    config, other, backup = tmp_path / "config.yaml", tmp_path / "other.yaml", str(tmp_path / "b.db")
    with serve(StandIn(window=16_000).app) as behind:
        write_config(settings(behind, {"url": f"sqlite:///{tmp_path}/store.db"}), tmp_path)
        absent = call(tmp_path, "store", "backup", backup, "--config", str(config))
        assert (absent.returncode, "store.url: there is no" in absent.stderr) == (2, True)
        with proxied(settings(behind, {"url": f"sqlite:///{tmp_path}/store.db"}), tmp_path) as url:
            ask(url, 0)
            assert until(lambda: get(url, "/compaction/report")["total"]["requests"] == 1)
            assert call(tmp_path, "store", "backup", backup, "--config", str(config)).returncode == 0
            again = call(tmp_path, "store", "backup", backup, "--config", str(config))
            assert (again.returncode, f"{backup}: exists already. Fix: " in again.stderr) == (2, True)
            left = ask(url, 1).headers["x-compaction-budget-remaining"]
        write_config(settings(behind, {"url": redis.url}), tmp_path, "other.yaml")
        with redis.client() as client:
            client.config_set("maxmemory", "1")
            failed = call(tmp_path, "store", "migrate", "--from", backup, "--config", str(other))
            client.config_set("maxmemory", "0")
        assert (failed.returncode, "Fix: run the command again with --add" in failed.stderr) == (2, True)
        for _ in range(2):
            assert call(tmp_path, "store", "migrate", "--from", backup, "--add", "--config", str(other)).returncode == 0
        for file in (config, other):  # in the store that the backup comes from, everything would count twice
            full = call(tmp_path, "store", "migrate", "--from", backup, "--config", str(file))
            assert (full.returncode, "store.url: isn't empty. Fix: " in full.stderr) == (2, True)
        with proxied(settings(behind, {"url": redis.url}), tmp_path) as url:
            assert get(url, "/compaction/report")["total"]["requests"] == 1
            assert ask(url, 1).headers["x-compaction-budget-remaining"] == left, "the spending counts once"


def test_forgetting_leaves_the_budget_and_refuses_an_unknown_team(tmp_path: Path) -> None:
    place, upstream = {"url": f"sqlite:///{tmp_path}/store.db"}, StandIn(window=16_000, summariser=summarized)
    with serve(upstream.app) as behind:
        with proxied(settings(behind, place), tmp_path) as url:
            assert ask(url, 0).status_code == 200
            assert until(lambda: get(url, "/compaction/report")["total"]["requests"] == 1)

        def forget(*options: str) -> Any:
            return call(tmp_path, "forget", *options, "--config", str(tmp_path / "config.yaml"))

        unknown = forget("--team", "onee")
        assert unknown.returncode == 2
        assert unknown.stderr == (
            "There is no team 'onee' in the configuration, and nothing is stored of it. "
            "The ledger has: one. Fix: did you mean 'one'?\n"
        )
        tried = forget("--team", "one", "--dry-run")
        assert (tried.returncode, tried.stderr) == (0, "")
        lines = tried.stdout.splitlines()
        assert {line.partition(":")[0] for line in lines} == {"archive", "ledger row", "record", "summary"}
        assert "ledger row: 1 entry would be removed" in lines
        assert forget("--team", "one", "--dry-run").stdout == tried.stdout
        done = forget("--team", "one")
        assert done.stdout == tried.stdout.replace("would be removed", "removed")
        with proxied(settings(behind, place, tokens=1), tmp_path) as url:
            assert ask(url, 0).status_code == 402, "the budget stays used"
        changed = settings(behind, place, tokens=1)
        changed["teams"]["one"]["keys"] = [{"hash": key_hash("sk-team"), "expires": "2026-01-01"}, key_hash("sk-new")]
        with proxied(changed, tmp_path) as url:
            assert ask(url, 0).status_code == 401
            assert ask(url, 0, "sk-new").status_code == 402, "the budget belongs to the name"


def test_a_restore_touches_no_file_that_is_not_a_backup(tmp_path: Path) -> None:
    """Such a file may belong to another program, or be the store of a server."""
    with serve(StandIn(window=16_000).app) as behind, proxied(settings(behind, in_file(tmp_path)), tmp_path) as url:
        ask(url, 0)
        assert until(lambda: get(url, "/compaction/report")["total"]["requests"] == 1)
        config = str(tmp_path / "config.yaml")
        assert call(tmp_path, "store", "backup", str(tmp_path / "b.db"), "--config", config).returncode == 0
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for name, script in (("other", "CREATE TABLE a (b)"), ("likely", "CREATE TABLE entries (b)")):
        with contextlib.closing(sqlite3.connect(wrong / name)) as other:
            other.execute(script)
    whole = (tmp_path / "b.db").read_bytes()
    contents = {"empty": b"", "text": b"no database " * 999, "half a page": whole[:2_000], "keys": b"\x00" * 40_000}
    for name, content in {**contents, "the store": (tmp_path / "store.db").read_bytes()}.items():
        (wrong / name).write_bytes(content)
    before = {file.name: file.read_bytes() for file in wrong.iterdir()}
    write_config(settings("http://127.0.0.1:9", in_file(wrong.with_name("new"))), tmp_path, "new.yaml")
    for name in before:
        new = str(tmp_path / "new.yaml")
        done = call(tmp_path, "store", "migrate", "--from", str(wrong / name), "--config", new)
        assert (done.returncode, done.stdout) == (2, ""), name
        assert f"{wrong / name}" in done.stderr, name
        assert "Fix: pass a file that store backup wrote" in done.stderr, name
    assert {file.name: file.read_bytes() for file in wrong.iterdir()} == before
    assert not wrong.with_name("new").exists()


def test_a_migration_from_a_store_with_other_keys_or_from_none(redis: RedisServer, tmp_path: Path) -> None:
    with serve(StandIn(window=16_000).app) as behind, proxied(settings(behind, in_file(tmp_path)), tmp_path) as url:
        ask(url, 0)
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
