"""S4: the conversation data that the proxy leaves on the disk, and the permissions of its files.

Forgetting, expiry and other keys are in ``tests/product/test_store.py`` and ``tests/store/``.
"""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from proxy.store import sqlite
from proxy.store.archive import KIND as ARCHIVE
from proxy.store.forgetting import forget
from proxy.store.sqlite import SqliteStore, put_aside
from tests.kit.program import ROOT, program, write_config
from tests.kit.waiting import until
from tests.product.test_store import CALLER, KEY, PROMPT, SUMMARY, configuration, conversation, stand_in

RESULT = "what the canary sang in a result"
CANARIES = (PROMPT, SUMMARY, RESULT, CALLER)

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions and signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


def messages() -> list[Any]:
    """A conversation to compact, with something to look for in the user's words and in a result."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    head, *rest = conversation()
    return [
        head,
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": f"{RESULT}: " + "la " * 500},
        {"role": "assistant", "content": "Read."},
        *rest,
    ]


@contextlib.contextmanager
def started(
    folder: Path,
    store: Mapping[str, Any] | None,
    policy: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The program itself with a umask that allows everything; wherever it may write is in the folder."""
    for name in ("home", "tmp", "here"):
        (folder / name).mkdir(mode=0o700)
    places = {"HOME": "home", "XDG_STATE_HOME": "home/state", "XDG_CACHE_HOME": "home/cache"}
    places |= {"TMPDIR": "tmp", "SQLITE_TMPDIR": "tmp"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in places.items()}}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with serve(stand_in().app) as upstream:
        settings = {**configuration(upstream, folder), "policies": {"default": policy or {}}, "store": store or {}}
        config = write_config(settings, folder)
        with program(config, log=Path(os.devnull), cwd=folder / "here", env=environment, umask=0) as running:
            yield running.url, running.process


def compacted(url: str) -> None:
    """Have the conversation compacted, for a caller with a key."""
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "m", "messages": messages()},
        headers={"authorization": f"Bearer {CALLER}"},
        timeout=60,
        trust_env=False,
    )
    assert (answer.status_code, answer.headers["x-compaction-summary"]) == (200, "made")


def archived(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("compaction_archive_entries_total") and "written" in line
    )


def found(folder: Path) -> dict[str, set[str]]:
    shown: dict[str, set[str]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            shown[path.relative_to(folder).as_posix()] = {word for word in CANARIES if word.encode() in content}
    return {name: words for name, words in shown.items() if words}


@posix
def test_by_default_it_is_one_file_for_its_owner_alone(tmp_path: Path) -> None:
    """Kill the process, so that the write-ahead log stays. Also shows that the canaries can be found."""
    with started(tmp_path, None) as (url, process):
        compacted(url)
        assert until(lambda: archived(url) > 0)
        process.kill()
        process.wait(10)
    state = tmp_path / "home" / "state"
    assert {word for words in found(tmp_path).values() for word in words} == {SUMMARY}, "and no caller's key"
    assert all(name.startswith("home/state/compaction-proxy/compaction.db") for name in found(tmp_path))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.rglob("*"))}
    assert modes.keys() >= {"compaction.db", "compaction.db-wal", "compaction-proxy", "state"}
    assert set(modes.values()) == {0o600, 0o700}
    assert {name for name, mode in modes.items() if mode == 0o700} == {"state", "compaction-proxy"}
    # A killed server can't remove the folder with its sign-in link, which is valid for that server only.
    left = list((tmp_path / "tmp").rglob("*"))
    assert {path.name for path in left if path.is_file() and len(path.name) < 64} <= {"link"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in left} <= {0o600, 0o700}
    assert list((tmp_path / "here").iterdir()) == []


@posix
def test_without_a_file_nothing_is_written_anywhere(tmp_path: Path) -> None:
    with started(tmp_path, {"url": "sqlite://"}) as (url, process):
        compacted(url)
        assert until(lambda: archived(url) > 0)
        process.kill()
        process.wait(10)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in files if not name.startswith("tmp/compaction-proxy-")} == {"config.yaml"}


@posix
def test_encrypted_nothing_is_to_be_read_anywhere_after_a_crash(tmp_path: Path) -> None:
    with started(tmp_path, {"encryption": {"key": KEY}}) as (url, process):
        compacted(url)
        assert until(lambda: archived(url) > 0)
        process.kill()
        process.wait(10)
    state = tmp_path / "home" / "state" / "compaction-proxy"
    assert (state / "compaction.db-wal").stat().st_size > 0
    assert found(tmp_path) == {}


@posix
@pytest.mark.parametrize("archive", [True, False])
def test_what_is_taken_out_is_kept_only_where_a_policy_keeps_an_archive(tmp_path: Path, archive: bool) -> None:
    """The summary is kept either way, with what a policy has it quote."""
    with started(tmp_path, None, {} if archive else {"archive": None}) as (url, process):
        compacted(url)
        # An orderly end of the program stores everything that belongs to the request.
        process.terminate()
        process.wait(30)
    entries = asyncio.run(kept(tmp_path / "home" / "state" / "compaction-proxy" / "compaction.db"))
    assert bool(entries[ARCHIVE]) == archive
    assert entries["summary.2"]
    assert not any(RESULT.encode() in value for value in entries["summary.2"])


async def kept(file: Path) -> dict[str, list[bytes]]:
    store = SqliteStore(file)
    values = {kind: [entry.value for entry in await store.entries(kind)] for kind in (ARCHIVE, "summary.2")}
    await store.aclose()
    return values


@posix
def test_a_damaged_file_that_was_moved_aside_is_its_owners_too(tmp_path: Path) -> None:
    async def test() -> None:
        store = SqliteStore(tmp_path / "a.db")
        await store.put("t", "summary.2", "k", b"x" * 9000, 60)
        await store.maintain()
        with (tmp_path / "a.db").open("r+b") as file:
            file.write(b"\xff" * 4096)
        await store.aclose()
        store = SqliteStore(tmp_path / "a.db")
        await store.maintain()
        await store.put("t", "summary.2", "k", b"", 60)
        await store.aclose()

    before = os.umask(0)
    try:
        asyncio.run(test())
    finally:
        os.umask(before)
    assert put_aside(tmp_path / "a.db")
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@linux
@pytest.mark.parametrize("most", [sqlite.IN_MEMORY, 1])
def test_writing_the_file_anew_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Small bodies stay in memory. Larger ones use a file that never has a name."""
    monkeypatch.setattr(sqlite, "IN_MEMORY", most)
    monkeypatch.setenv("SQLITE_TMPDIR", str(tmp_path))
    seen: set[str] = set()
    named: set[str] = set()

    def look() -> int:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                seen.add(os.readlink(f"/proc/self/fd/{number}"))
        named.update(path.name for path in tmp_path.iterdir())
        return 0

    async def test() -> None:
        store = SqliteStore(tmp_path / "a.db")
        for n in range(120):
            await store.put(f"t{n % 2}", "archive", f"k{n}", os.urandom(100_000), 60)
        await store._writer.run(lambda db: db.set_progress_handler(look, 20))
        assert await in_memory(store)
        await forget(store, "t1")
        assert await in_memory(store)
        await store.aclose()

    async def in_memory(store: SqliteStore) -> bool:
        row = await store._writer.run(lambda db: db.execute("PRAGMA temp_store").fetchone())
        return bool(row == (2,))

    asyncio.run(test())
    temporary = {name for name in seen if "etilqs" in name}
    assert bool(temporary) == (most == 1)
    assert all(name.endswith(" (deleted)") for name in temporary)
    assert named <= {"a.db", "a.db-wal", "a.db-shm", "a.db-journal"}
