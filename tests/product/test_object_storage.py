"""The archive on object storage, seen from the front door: stored, encrypted, forgotten, and out of order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from proxy.config import load
from proxy.server import maintenance
from proxy.server.app import Proxy, create_app
from proxy.server.loopback import serve
from proxy.store import guarded
from proxy.store.archive import KIND as ARCHIVE
from tests.kit.front_door import ARCHIVE_ID
from tests.kit.object_server import CREDENTIALS, INSTALLED, MISSING, Failure, ObjectServer, object_server
from tests.kit.program import call, write_config
from tests.kit.upstream import StandIn
from tests.kit.waiting import until
from tests.product.test_store import (
    CALLER,
    CALLER_SHA,
    KEY,
    PROMPT,
    configuration,
    get,
    metric,
    rows,
    stand_in,
    summary_of,
)

pytestmark = pytest.mark.skipif(not INSTALLED, reason=MISSING)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(maintenance, "EVERY", 0.1)
    with object_server() as found:
        yield found


@contextlib.contextmanager
def replicas(folder: Path, server: ObjectServer, count: int, **store: Any) -> Iterator[list[Any]]:
    """Return the URLs of proxies that share a store and a bucket, and then the upstream."""
    with fleet(folder, server, count, **store) as (proxies, upstream), contextlib.ExitStack() as running:
        yield [*(running.enter_context(serve(proxy)) for proxy in proxies), upstream]


@contextlib.contextmanager
def fleet(folder: Path, server: ObjectServer, count: int, **store: Any) -> Iterator[tuple[list[Proxy], StandIn]]:
    upstream = stand_in()
    with serve(upstream.app) as url:
        settings = configuration(url, folder, store)
        settings["archive"] = {"url": "s3://bucket/a", "endpoint": server.endpoint}
        config = write_config(settings, folder)
        yield [create_app(load(config, {})) for _ in range(count)], upstream


def command(folder: Path, *arguments: str) -> Any:
    return call(folder, *arguments, "--config", str(folder / "config.yaml"), **CREDENTIALS)


def entry(url: str, id: str, key: str = CALLER) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=30) as http:
        return http.get(f"{url}/compaction/archive/{id}", headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("encrypted", [False, True])
def test_any_replica_returns_the_originals_to_their_caller(
    server: ObjectServer, tmp_path: Path, encrypted: bool
) -> None:
    store = {"encryption": {"key": KEY}} if encrypted else {}
    with replicas(tmp_path, server, 2, **store) as (one, other, upstream):
        assert summary_of(one) == "made"
        assert until(lambda: len(archived(server)) == 3)
        id = ARCHIVE_ID.findall(json.dumps(upstream.conversations[-1].body))[-1]
        found = entry(other, id)
        assert (found.status_code, found.json()["complete"]) == (200, True)
        assert PROMPT in found.text
        assert entry(other, id, "sk-stranger").status_code == 404
        assert ARCHIVE not in {kind for _, kind, _ in rows(tmp_path)}
        assert get(one, "/compaction/status").json()["store"]["archive"] == "s3"
        assert "archive in S3: writable" in command(tmp_path, "doctor").stdout
    raw = server.raw()
    assert (CALLER_SHA.encode() in raw, b"archive" in raw) == ((False, False) if encrypted else (True, True))


@pytest.mark.parametrize("failure", ["refuses", "overloaded", "hangs"])
def test_without_it_requests_succeed_and_the_originals_are_stored_when_it_works_again(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    for name, seconds in {"ARCHIVE_READ_SECONDS": 0.2, "WRITE_SECONDS": 0.2, "FIRST_PAUSE": 0.1}.items():
        monkeypatch.setattr(guarded, name, seconds)
    monkeypatch.setattr("proxy.pipeline.runtime.ARCHIVE_READ_SECONDS", 0.2)
    server.failure = failure
    with capture_logs() as logs, replicas(tmp_path, server, 1) as (url, _):
        before = metric(url, "compaction_archive_entries")
        assert summary_of(url) == "made"
        assert until(lambda: "archive.write_failed" in {line["event"] for line in logs})
        assert metric(url, "compaction_archive_entries") > before
        assert get(url, "/readyz").text == "ready; the store fails (archive_write)\n"
        answer = entry(url, "0" * 20)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == "archive_unavailable"
        assert failure == "hangs" or "FAILED   archive in S3" in command(tmp_path, "doctor").stdout
        assert server.objects == {}
        assert summary_of(url) == "stored", "the store of summaries works"
        server.failure = ""
        assert until(lambda: any("/archive=2e2/" in name for name in server.objects)), "without another request"
        assert entry(url, "0" * 20).status_code == 404
        assert until(lambda: get(url, "/readyz").text == "ready\n")
    assert [line for line in logs if line["log_level"] == "error"] == []


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_forgotten_tenant_leaves_no_trace_although_replicas_write(
    server: ObjectServer, tmp_path: Path, encrypted: bool
) -> None:
    """One replica has stored entries, another has a write in progress, and further ones wait behind it."""
    store = {"encryption": {"key": KEY}} if encrypted else {}
    with (
        fleet(tmp_path, server, 2, **store) as (proxies, _),
        serve(proxies[0]) as one,
        serve(proxies[1]) as other,
    ):
        assert summary_of(one) == "made"
        assert summary_of(one, "sk-stays") == "made"
        assert until(lambda: len(archived(server)) == 6)
        server.held = True
        assert summary_of(other, CALLER) == "stored"
        assert summary_of(other, "sk-stays") == "stored"
        assert until(lambda: server.holding)
        server.calls.clear()
        done = command(tmp_path, "forget", "--key-sha256", CALLER_SHA)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        # A replica may remove the archive's entries before the command does, and encrypted ones have one kind.
        assert re.search(r"encrypted: [1-4] entr" if encrypted else "summary: 1 entry removed", done.stdout)
        # The replicas notice in their next rounds. The one with a write in progress waits for its end.
        pending = proxies[1].service.stores.archive
        assert until(lambda: CALLER_SHA not in str(pending.writes._waiting.keys()))
        assert until(lambda: server.calls.count("LIST") >= 4)
        assert summary_of(one, "sk-stays") == "stored"
        server.held = False
        assert until(lambda: len(tenants(server)) == 1 and len(archived(server)) >= 6)
    # The new versions of the other caller's entries are there, too.
    assert len(tenants(server)) == 1
    assert CALLER_SHA.encode() not in server.raw()
    assert encrypted or hashlib.sha256(b"sk-stays").hexdigest().encode() in server.raw()


def tenants(server: ObjectServer) -> set[str]:
    return {name.split("/")[2] for name in archived(server)}


def archived(server: ObjectServer) -> list[str]:
    return [name for name in server.objects if name.startswith("a/1/")]
