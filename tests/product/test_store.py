"""The store seen from the front door: encrypted, forgotten, slow, full, locked and damaged."""

import contextlib
import hashlib
import pickle
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing
import zstandard

from proxy.config import load
from proxy.pipeline import recorder
from proxy.server import maintenance
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from proxy.store import sqlite
from proxy.store.archive import KIND as ARCHIVE
from proxy.store.forgetting import KIND as FORGOTTEN
from proxy.store.replicated_map import name_of
from proxy.store.sqlite import put_aside
from tests.kit.program import call, run, write_config
from tests.kit.scripted import chat, client, proxied
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
KEY, OTHER_KEY = "01" * 32, "02" * 32
CALLER = "sk-caller-Xq7"
CALLER_SHA = hashlib.sha256(CALLER.encode()).hexdigest()
PROMPT, SUMMARY = "PROMPT-CANARY-81f2", "SUMMARY-CANARY-5b0c"


def conversation() -> list[Any]:
    """A conversation over the trigger, with something in its oldest part to look for."""
    messages = chat(7, 1_000)
    messages[1] = {"role": "user", "content": f"{PROMPT} {messages[1]['content']}"}
    return messages


def stand_in() -> StandIn:
    return StandIn(window=WINDOW, summariser=lambda body: Reply(content=f"Goal: {SUMMARY} is what was talked about."))


def configuration(upstream: str, folder: Path, store: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "store": {"url": f"sqlite:///{folder}/state/store.db", **(store or {})},
        "upstreams": {"main": {"base_url": f"{upstream}/v1"}},
        "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
        "policies": {"default": {}},
    }


@contextlib.contextmanager
def running(folder: Path, store: Mapping[str, Any] | None = None, start: Callable[..., Any] = proxied) -> Iterator[str]:
    with serve(stand_in().app) as upstream, start(configuration(upstream, folder, store), folder) as url:
        yield url


def ask(url: str, key: str = CALLER) -> Mapping[str, str]:
    """The headers of the answer to the conversation; that there is one is asserted."""
    with client(url, key) as caller:
        answer = caller.chat.completions.with_raw_response.create(model="m", messages=conversation())
        assert answer.parse().choices[0].message.content
        return answer.headers


def summary_of(url: str, key: str = CALLER) -> str:
    return ask(url, key)["x-compaction-summary"]


def rows(folder: Path) -> list[tuple[str, str, bytes]]:
    """Tenant, kind and value of what is stored, as it lies there."""
    with sqlite3.connect(folder / "state" / "store.db") as db:
        found = db.execute("SELECT tenant, kind, value FROM entries").fetchall()
    db.close()
    return found


def raw(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((folder / "state").iterdir()))


def found_in(folder: Path) -> set[str]:
    content = raw(folder)
    return {canary for canary in (PROMPT, SUMMARY, CALLER, CALLER_SHA) if canary.encode() in content}


def get(url: str, path: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=30) as http:
        return http.get(url + path)


def metric(url: str, name: str) -> float:
    lines = get(url, "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_total"))


def command(folder: Path, *arguments: str, own: bool = False) -> subprocess.CompletedProcess[str]:
    """A command with the configuration that the server was started with. ``own``: in a process of its own."""
    return (run if own else call)(folder, *arguments, "--config", str(folder / "config.yaml"))


def test_with_a_key_nothing_of_it_is_in_any_file(tmp_path: Path) -> None:
    store = {"encryption": {"key": KEY}}
    with running(tmp_path, store) as url:
        assert summary_of(url) == "made"
        assert until(lambda: len({row[1] for row in rows(tmp_path)}) >= 2)
        assert found_in(tmp_path) == set()
        for _, _, value in rows(tmp_path):
            with pytest.raises(zstandard.ZstdError):
                zstandard.decompress(value)
    assert found_in(tmp_path) == set()
    with running(tmp_path, store) as url:
        assert summary_of(url) == "stored"
        with client(url, CALLER) as caller:
            caller.chat.completions.create(model="m", messages=conversation())
        assert summary_of(url, "sk-somebody-else") == "made"


def test_forgetting_a_caller_beside_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "EVERY", 0.2)
    monkeypatch.setattr(recorder, "PAUSE_SECONDS", 0.01)
    with running(tmp_path) as url:
        assert summary_of(url) == "made"
        assert summary_of(url, "sk-other") == "made"
        assert until(lambda: len([row for row in rows(tmp_path) if row[1] == ARCHIVE]) >= 2)
        done = command(tmp_path, "forget", "--key-sha256", CALLER_SHA, own=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "summary: 1 entry removed" in done.stdout
        assert "archive: " in done.stdout
        assert {row[0] for row in rows(tmp_path)} >= {"key:" + hashlib.sha256(b"sk-other").hexdigest()}
        assert CALLER_SHA.encode() not in raw(tmp_path)
        # The server remembers the summary until it notices.
        assert until(lambda: summary_of(url) == "made")
        assert summary_of(url, "sk-other") == "stored"
        command(tmp_path, "forget", "--key-sha256", hashlib.sha256(b"sk-other").hexdigest())
        command(tmp_path, "forget", "--key-sha256", f"sha256:{CALLER_SHA}")
        assert found_in(tmp_path) == set()
    assert found_in(tmp_path) == set()


def test_forgetting_a_caller_drops_what_the_server_remembers_of_its_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "EVERY", 0.2)
    with serve(stand_in().app) as upstream:
        settings = load(write_config(configuration(upstream, tmp_path), tmp_path), {})
        app = Proxy(settings)
        answering = app._conversations["/v1/chat/completions"].answering
        caches = (answering.costs._seen, answering.feedback._turns)
        with serve(app) as url:
            for key in (CALLER, "sk-other"):
                ask(url, key)
                with client(url, key) as caller:
                    caller.chat.completions.create(model="m", messages=conversation()[:9])
            assert until(lambda: all(len({tenant for tenant, _ in cache}) == 2 for cache in caches))
            command(tmp_path, "forget", "--key-sha256", CALLER_SHA)
            other = {"key:" + hashlib.sha256(b"sk-other").hexdigest()}
            assert until(lambda: all({tenant for tenant, _ in cache} == other for cache in caches))


def test_forgetting_a_team_in_an_encrypted_store(tmp_path: Path) -> None:
    teams = {"auth": {"mode": "keys"}, "teams": {"search": {"keys": [f"sha256:{CALLER_SHA}"]}}}
    with serve(stand_in().app) as upstream:
        settings = {**configuration(upstream, tmp_path, {"encryption": {"key": KEY}}), **teams}
        settings["upstreams"]["main"]["api_key"] = "sk-upstream"
        with proxied(settings, tmp_path) as url:
            assert summary_of(url) == "made"
            assert until(lambda: len({row[1] for row in rows(tmp_path)}) >= 2)
        assert b"search" not in raw(tmp_path)
        before = set(rows(tmp_path))
        done = command(tmp_path, "forget", "--team", "search")
        assert done.returncode == 0, done.stderr
        assert "encrypted: 4 entries removed" in done.stdout
        assert "record: 2 entries removed\n" in done.stdout
        assert "ledger row: 1 entry removed\n" in done.stdout
        again = command(tmp_path, "forget", "--team", "search")
        assert again.stdout == "Nothing was stored.\n"
        assert len(before & set(rows(tmp_path))) == 1, "the spending of the month stays"
        with proxied(settings, tmp_path) as url:
            assert summary_of(url) == "made"


def test_a_damaged_file_is_moved_aside_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "store.db").write_bytes(b"no database " * 1000)
    with running(tmp_path) as url:
        assert until(lambda: bool(put_aside(tmp_path / "state" / "store.db")))
        assert summary_of(url) == "made"
        assert until(lambda: bool(rows(tmp_path)))
        assert get(url, "/readyz").text == "ready\n"
        done = command(tmp_path, "forget", "--key-sha256", "0" * 64)
        assert (done.returncode, done.stdout) == (0, "Nothing was stored.\n")
        assert "moved aside" in done.stderr
    with running(tmp_path) as url:
        assert summary_of(url) == "stored"


@contextlib.contextmanager
def slow(seconds: float) -> Iterator[None]:
    do = sqlite.SqliteWorker._do

    def slowly(self: sqlite.SqliteWorker, work: Callable[[sqlite3.Connection], Any]) -> Any:
        time.sleep(seconds)
        return do(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite.SqliteWorker, "_do", slowly)
        yield


@pytest.mark.long
def test_a_slow_store_holds_nobody_up_for_long_and_is_left_alone(tmp_path: Path) -> None:
    with slow(5), running(tmp_path) as url:
        began = time.monotonic()
        with ThreadPoolExecutor(6) as threads:
            made = list(threads.map(lambda n: summary_of(url, f"sk-{n}"), range(6)))
        took = time.monotonic() - began
        assert made == ["made"] * 6
        assert took < 15
        ready = get(url, "/readyz")
        assert ready.status_code == 200
        assert ready.text.startswith("ready; the store fails (read")
        assert until(lambda: metric(url, "compaction_store_breaker") >= 1)
        assert metric(url, "compaction_store_failures") >= 3
        assert summary_of(url, "sk-1") == "stored"  # in memory


class Trap:
    """An object whose pickle runs code when it's read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


def test_a_pickle_in_the_file_is_refused(tmp_path: Path) -> None:
    """Every reader of an entry: a request, the archive's endpoint, the maintenance, a command."""
    with running(tmp_path) as url:
        assert summary_of(url) == "made"
        assert until(lambda: {row[1] for row in rows(tmp_path)} >= {ARCHIVE, "summary.2"})
    trap = tmp_path / "sprung"
    tenant, name = f"key:{CALLER_SHA}", name_of("main", "m")
    with sqlite3.connect(tmp_path / "state" / "store.db") as db:
        ids = [row[0] for row in db.execute("SELECT key FROM entries WHERE kind = ?", (ARCHIVE,))]
        places = [(tenant, "limit", name), (tenant, "spent", name), ("", "ratio", name), ("", FORGOTTEN, CALLER_SHA)]
        put = "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, '', x'', x'')"
        db.executemany(put, [(*place, time.time() + 600) for place in places])
        db.execute("UPDATE entries SET value = ? WHERE kind != ?", (pickle.dumps(Trap(trap)), ARCHIVE))
        packed = zstandard.compress(pickle.dumps(Trap(trap)))
        db.execute("UPDATE entries SET value = ? WHERE kind = ?", (packed, ARCHIVE))
    db.close()
    with structlog.testing.capture_logs() as logs, running(tmp_path) as url:
        with httpx.Client(trust_env=False, timeout=30) as http:
            for id in ids:
                answer = http.get(f"{url}/compaction/archive/{id}", headers={"authorization": f"Bearer {CALLER}"})
                assert answer.status_code == 404
        assert summary_of(url) == "made"
    assert {line["kind"] for line in logs if line["event"] == "shared.unreadable"} >= {"limit"}
    assert {line["event"] for line in logs} >= {"store.entry_unreadable", "archive.entry_unreadable"}
    assert "Trap" not in str(logs)
    done = command(tmp_path, "models", "m")
    assert (done.returncode, done.stderr) == (0, "")
    assert not trap.exists()
