"""R10: a store that can't be used in one way or another costs summaries, never a request, and is used again after it.

That a slow one holds nobody up is in ``tests/product/test_store.py``.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy.server import maintenance
from proxy.store import guarded, sqlite
from proxy.store.guarded import FAILURES
from proxy.store.sqlite import put_aside
from tests.kit.waiting import until
from tests.product.test_store import get, metric, rows, running, summary_of

PAUSE = 0.2


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "FIRST_PAUSE", PAUSE)
    monkeypatch.setattr(guarded, "LONGEST_PAUSE", PAUSE)
    monkeypatch.setattr(maintenance, "EVERY", PAUSE)


@contextlib.contextmanager
def down(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    file.parent.write_text("in the way")
    yield
    file.parent.unlink()


@contextlib.contextmanager
def locked(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another program has the file for itself, for reading too."""
    file.parent.mkdir()
    with contextlib.closing(sqlite3.connect(file)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.rollback()


@contextlib.contextmanager
def full(file: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    opening, bound = sqlite.SqliteWorker._open, "1"

    def opened(self: sqlite.SqliteWorker) -> sqlite3.Connection:
        connection = opening(self)
        # A bound under what there is already means: no more.
        connection.execute(f"PRAGMA max_page_count = {bound}")
        return connection

    patch.setattr(sqlite.SqliteWorker, "_open", opened)
    yield
    bound = "1000000"


TROUBLES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[None]], str, set[str]]] = {
    "down": (down, "read, write", {"store.read_failed", "store.write_failed", "archive.write_failed"}),
    "locked": (locked, "read, write", {"store.read_failed", "store.write_failed", "archive.write_failed"}),
    "full": (full, "write", {"store.write_failed", "archive.write_failed"}),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_requests_go_through_and_it_is_used_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trouble, left_alone, told = TROUBLES[name]
    file = tmp_path / "state" / "store.db"
    with capture_logs() as logs, contextlib.ExitStack() as ending:
        lasting = ending.enter_context(contextlib.ExitStack())
        lasting.enter_context(trouble(file, monkeypatch))
        url = ending.enter_context(running(tmp_path))
        began = time.monotonic()
        for n in range(4):
            assert summary_of(url, f"sk-{n}") == "made"
            assert summary_of(url, f"sk-{n}") == "stored", "in memory"
        assert time.monotonic() - began < 60
        failures = metric(url, "compaction_store_failures")
        # On a busy machine, the records fail often enough to be listed, too.
        assert until(lambda: get(url, "/readyz").text.startswith(f"ready; the store fails ({left_alone}"))
        assert get(url, "/readyz").status_code == 200, "requests had better come"
        assert until(lambda: told <= {line["event"] for line in logs}), {line["event"] for line in logs}
        if name == "locked":
            assert until(lambda: [line["event"] for line in logs].count("store.upkeep_failed") > 1), "and tried again"
        lasting.close()
        number = iter(range(100, 200))
        assert until(lambda: summary_of(url, f"sk-{next(number)}") == "made" and "summary.2" in kinds(tmp_path))
        assert until(lambda: summary_of(url, f"sk-{next(number)}") == "made" and get(url, "/readyz").text == "ready\n")
    assert failures >= FAILURES
    assert [line for line in logs if line["log_level"] == "error"] == [], "nothing that was not reckoned with"


def test_readyz_reports_the_first_failure_and_the_next_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "FAILURES", 1_000)
    file = tmp_path / "state" / "store.db"
    with contextlib.ExitStack() as ending:
        lasting = ending.enter_context(contextlib.ExitStack())
        lasting.enter_context(down(file, monkeypatch))
        url = ending.enter_context(running(tmp_path))
        assert get(url, "/readyz").text == "ready; the store fails (write)\n", "the start has shown it"
        assert summary_of(url) == "made"
        assert until(lambda: get(url, "/readyz").text == "ready; the store fails (read, write)\n")
        assert get(url, "/readyz").status_code == 200
        lasting.close()
        assert summary_of(url, "sk-other") == "made"
        assert until(lambda: get(url, "/readyz").text == "ready\n")


def kinds(folder: Path) -> set[str]:
    """Return the kinds of entries in the store. Empty if it can't be read yet."""
    try:
        return {row[1] for row in rows(folder)}
    except sqlite3.Error:
        return set()


def damaged(file: Path) -> bool:
    """Overwrite all pages but the first, unless some pages are in the log. Return whether that was done.

    The lock keeps the proxy from writing meanwhile. The commit makes the proxy's connections drop their cached pages,
    which would otherwise hide the damage.
    """
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("BEGIN IMMEDIATE")
        if file.with_name(f"{file.name}-wal").stat().st_size:
            db.execute("ROLLBACK")
            return False
        with file.open("r+b") as raw:
            raw.seek(4096)
            raw.write(b"\xff" * (file.stat().st_size - 4096))
        db.execute("PRAGMA user_version = 1")
        db.execute("COMMIT")
    return True


def test_one_that_is_damaged_under_way_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "state" / "store.db"
    with capture_logs() as logs, running(tmp_path) as url:
        for n in range(3):
            assert summary_of(url, f"sk-{n}") == "made"
        assert until(lambda: len([row for row in rows(tmp_path) if row[1] == "summary.2"]) == 3)
        assert until(lambda: damaged(file))
        assert summary_of(url, "sk-0") == "stored", "in memory"
        assert summary_of(url, "sk-new") == "made"
        assert until(lambda: bool(put_aside(file)))
        assert until(lambda: "summary.2" in kinds(tmp_path))
        assert get(url, "/readyz").text == "ready\n"
    assert "store.damaged" in {line["event"] for line in logs}
    assert "request.crashed" not in {line["event"] for line in logs}
    with running(tmp_path) as url:
        assert summary_of(url, "sk-new") == "stored"
