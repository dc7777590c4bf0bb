"""The file of a store: made for its owner alone, and moved aside where it is damaged."""

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
"""What stands between a file's name and the time at which it was moved aside."""

_BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside its file."""


def prepare(path: Path) -> None:
    """Make the file and its folders where they are missing, for their owner alone. Raises ``OSError``."""
    for folder in reversed(path.parents):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=0o700)
    # A file that is there is not opened: closing it would drop the locks of this process's other connections.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def identity(path: Path) -> tuple[int, int] | None:
    """Which file is there now; ``None`` for none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def set_aside(path: Path, seen: tuple[int, int] | None, reason: str) -> None:
    """Move a damaged file out of the way, with what SQLite keeps beside it, unless another process has done so.

    ``seen`` is which file was found damaged. Raises ``OSError``.
    """
    with _alone_in(path.parent):
        if seen is None or identity(path) != seen:
            return
        aside = path.with_name(f"{path.name}{ASIDE}{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
        # First what is beside it: a new file must not find the old one's log.
        for suffix in (*_BESIDE, ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error("store.damaged", moved_to=str(aside), reason=reason)


def put_aside(path: Path) -> list[Path]:
    """The damaged files that were moved out of the way before."""
    return sorted(path.parent.glob(f"{path.name}{ASIDE}*")) if path.parent.is_dir() else []


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here. On Windows open files can't be moved anyway."""
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
