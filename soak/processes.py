"""Start processes for a check and stop them afterward."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent

END_WITHIN = 20.0
"""Seconds that a process has to end after it was asked to."""


class NotStarted(Exception):
    """A process ended too early, or never responded."""


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, address: str, within: float, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a server until the block ends, and yield its process id. ``log`` receives its output.

    The server must respond at ``address`` ``within`` this number of seconds. ``environment`` is added to the variables
    of this process. The server's child processes end with it. Raises ``NotStarted``.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - the checks define all commands
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=output, stderr=output
        )
        try:
            _wait(process, address, within, log)
            yield process.pid
        finally:
            end(process)


@contextlib.contextmanager
def proxy(configuration: Path, port: int, log: Path) -> Iterator[str]:
    """Start the proxy with the public command, and yield its URL."""
    command = [sys.executable, "-m", "proxy", "serve", "--config", str(configuration), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running(command, log, f"{url}/livez", 60):
        yield url


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: first with SIGTERM, later with SIGKILL."""
    family = [process_ for process_ in _family(process.pid) if process_.pid != process.pid]
    process.terminate()
    try:
        process.wait(END_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=END_WITHIN)
    for orphan in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()


def tail(log: Path, lines: int = 30) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _wait(process: subprocess.Popen[bytes], address: str, within: float, log: Path) -> None:
    latest = time.monotonic() + within
    with httpx.Client(trust_env=False, timeout=5) as http:
        while time.monotonic() < latest and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if http.get(address).status_code == 200:
                    return
            time.sleep(0.2)
    raise NotStarted(f"{process.args!r} didn't start. Its output:\n{tail(log)}")
