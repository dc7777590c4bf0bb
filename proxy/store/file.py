"""The file of a store: create it with private permissions, and move it away if it is damaged."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

ASIDE = ".damaged-"
"""Infix between the name of a damaged file and the time at which the proxy moved it."""

_BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of SQLite's companion files."""


def prepare(path: Path) -> None:
    """Create the file and its missing folders, accessible only to their owner. Raises ``OSError``."""
    for folder in reversed(path.parents):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=0o700)
    # Don't open an existing file: closing it would drop the locks of this process's other connections.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the current file, or ``None`` if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def set_aside(path: Path, seen: tuple[int, int] | None, reason: str) -> None:
    """Move a damaged file and SQLite's companion files away, unless another process has already done so.

    ``seen`` is the identity of the damaged file. Raises ``OSError``.
    """
    with _alone_in(path.parent):
        if seen is None or identity(path) != seen:
            return
        aside = path.with_name(f"{path.name}{ASIDE}{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
        # Move the companion files first: a new file must not pick up the old log.
        for suffix in (*_BESIDE, ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error("store.damaged", moved_to=str(aside), reason=reason)


def put_aside(path: Path) -> list[Path]:
    """Return the damaged files that the proxy moved away earlier."""
    return sorted(path.parent.glob(f"{path.name}{ASIDE}*")) if path.parent.is_dir() else []


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes. Windows needs no lock, because it can't move open files."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
