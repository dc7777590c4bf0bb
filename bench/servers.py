"""The processes to measure: start them, pin them to a core, and read their CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import yaml

from bench.bodies import WINDOWS

START_SECONDS = 400.0
"""Longest wait for a server that starts. Below callgrind on a busy machine it takes minutes."""

ROOT = Path(__file__).resolve().parent.parent


def cores() -> tuple[int, int]:
    """Return the core of the measured servers, and the one of upstream and client. They're equal on one core."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


class Server:
    """A server in a process of its own."""

    def __init__(
        self, command: Sequence[str], port: int, core: int | None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        self.spawned = time.perf_counter()
        with pinned(core):  # The child inherits the core from its first instruction.
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=self._log, stderr=self._log, env={**os.environ, **(environment or {})}
            )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def cpu(self) -> float:
        """The CPU seconds of all its threads so far, including those that have ended."""
        return cpu_seconds(self._process.pid)

    @property
    def megabytes(self) -> float:
        """The resident memory in MB."""
        return float(psutil.Process(self._process.pid).memory_info().rss) / 1e6

    def connected(self) -> socket.socket:
        """Return a connection as soon as the server accepts one. Raises ``RuntimeError`` if it doesn't start."""
        latest = time.perf_counter() + START_SECONDS
        while time.perf_counter() < latest and self._process.poll() is None:
            try:
                made = socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS)
            except ConnectionRefusedError:
                time.sleep(0.002)
                continue
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        raise RuntimeError(f"the server on port {self.port} didn't start; see its output")

    def output(self) -> str:
        """Return the end of the process's output."""
        self._log.seek(0)
        return self._log.read()[-2_000:].decode(errors="replace")

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextlib.contextmanager
def upstream(core: int | None) -> Iterator[Server]:
    """Start the upstream."""
    port = free_port()
    with _running(Server([sys.executable, "-m", "bench.upstream", str(port)], port, core)) as server:
        server.connected().close()
        yield server


@contextlib.contextmanager
def passthrough(
    core: int | None, behind: Server, environment: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> Iterator[Server]:
    """Start the minimal pass-through. ``before`` is a command that runs it."""
    port = free_port()
    command = [sys.executable, "-m", "bench.passthrough", str(port), f"http://127.0.0.1:{behind.port}"]
    with _running(Server([*before, *command], port, core, environment)) as server:
        yield server


@contextlib.contextmanager
def proxy(
    core: int | None,
    behind: Server,
    folder: Path,
    configure: Callable[[int, Path], str] | None = None,
    environment: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Iterator[Server]:
    """Start the proxy with the public command. Its configuration and store are in ``folder``.

    ``configure`` returns a configuration for the upstream's port and the database. Default: ``configuration``.
    ``before`` is a command that runs it.
    """
    port = free_port()
    file = folder / f"config-{port}.yaml"
    text = (configure or configuration)(behind.port, folder / f"store-{port}.db")
    file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", str(port)]
    with _running(Server([*before, *command], port, core, environment)) as server:
        yield server


def configuration(upstream_port: int, database: Path, *, summarizes: bool = True) -> str:
    """Return the proxy's configuration as YAML: the defaults, with addresses and the models' windows.

    If it doesn't summarize, no route matches the summary model, and summaries are extracts.
    """
    models: list[dict[str, object]] = [
        {
            "match": name,
            "upstream": "main",
            "profile": {
                "context_window": window,
                "max_input_tokens": window,
                "max_output_tokens": min(16_000, window // 4),
                "tokenizer": "o200k_base",
            },
        }
        for name, window in WINDOWS.items()
    ]
    models.append({"match": "*" if summarizes else "*-*", "upstream": "main"})
    policy = {"mode": "enforce"} if summarizes else {"mode": "enforce", "summary": {"model": "none"}}
    main = {"provider": "openai", "base_url": f"http://127.0.0.1:{upstream_port}/v1"}
    settings = {
        "store": {"url": f"sqlite:///{database}"},
        "upstreams": {"main": main},
        "models": models,
        "policies": {"default": policy},
    }
    return yaml.safe_dump(settings, sort_keys=False)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process so far, including those that have ended."""
    # This clock id is the one of clock_getcpuclockid(3) for another process. /proc has a lower resolution.
    return time.clock_gettime((~pid << 3) | 2)


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        yield server
    except BaseException:
        sys.stderr.write(server.output())
        raise
    finally:
        server.stop()


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Run the block on one core, or on all if ``core`` is ``None``."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
