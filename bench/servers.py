"""Start servers in processes of their own, pin them to a core, and read their CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench import ROOT
from bench.bodies import WINDOWS

START_SECONDS = 400.0
"""Longest wait for a server that starts. Below callgrind on a busy machine it takes minutes."""

END_SECONDS = 20.0
"""Longest wait for a server that ends after SIGTERM."""


def cores() -> tuple[int, int]:
    """Return the core of the measured servers, and the one of upstream and client. They're equal on one core."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. ``spawned`` is the start of its process, by ``time.perf_counter``. ``log`` has its output."""

    port: int
    process: subprocess.Popen[bytes]
    spawned: float
    log: Path

    @property
    def url(self) -> str:
        """The root URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self.process.pid

    @property
    def cpu(self) -> float:
        """The CPU seconds of all its threads so far, including those that have ended."""
        # This clock id is the one of clock_getcpuclockid(3) for another process. /proc has a lower resolution.
        return time.clock_gettime((~self.pid << 3) | 2)

    @property
    def memory(self) -> int:
        """The resident memory in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def connected(self) -> socket.socket:
        """Return a connection as soon as the server accepts one. Raises ``RuntimeError`` if it doesn't start."""
        latest = time.perf_counter() + START_SECONDS
        while time.perf_counter() < latest and self.process.poll() is None:
            try:
                made = socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS)
            except ConnectionRefusedError:
                time.sleep(0.002)
                continue
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        raise RuntimeError(f"the server on port {self.port} didn't start; see its output")


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    log: Path,
    *,
    core: int | None = None,
    checkout: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a server until the block ends. If the block raises, print the end of its output.

    It starts in ``checkout``, with ``environment`` added to the variables of this process.
    """
    with log.open("wb") as output:
        variables = {**os.environ, **(environment or {})}
        with pinned(core):  # The child inherits the core from its first instruction.
            spawned = time.perf_counter()
            process = subprocess.Popen(command, cwd=checkout, env=variables, stdout=output, stderr=output)
        try:
            yield Server(port, process, spawned, log)
        except BaseException:
            sys.stderr.write(tail(log))
            raise
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def proxy(settings: Mapping[str, Any], folder: Path, before: Sequence[str] = (), **options: Any) -> Iterator[Server]:
    """Start the proxy with the public command, and wait until it accepts connections.

    ``folder`` gets its configuration, its log, and unless the settings name another store, its store. ``before`` is a
    command that runs the proxy. ``options`` are those of ``running``.
    """
    file, port = folder / "config.yaml", free_port()
    store = {"store": {"url": f"sqlite:///{folder}/store.db"}}
    file.write_text(yaml.safe_dump({**store, **settings}, sort_keys=False), encoding="utf-8")
    command = [*before, sys.executable, "-m", "proxy", "serve", "--config", str(file), "--port", str(port)]
    with running(command, port, folder / "proxy.log", **options) as server:
        server.connected().close()
        yield server


@contextlib.contextmanager
def upstream(core: int | None, folder: Path) -> Iterator[Server]:
    """Start the benchmark's upstream."""
    port = free_port()
    command = [sys.executable, "-m", "bench.upstream", str(port)]
    with running(command, port, folder / "upstream.log", core=core) as server:
        server.connected().close()
        yield server


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the measured servers: a core, and an upstream behind them. ``folder`` has their files."""

    core: int
    upstream: Server
    folder: Path

    @contextlib.contextmanager
    def passthrough(self, before: Sequence[str] = (), **options: Any) -> Iterator[Server]:
        """Start the minimal pass-through. ``before`` is a command that runs it."""
        port = free_port()
        command = [*before, sys.executable, "-m", "bench.passthrough", str(port), self.upstream.url]
        with running(command, port, self.folder / "passthrough.log", core=self.core, **options) as server:
            server.connected().close()
            yield server

    @contextlib.contextmanager
    def proxy(self, *, summarizes: bool = True, **options: Any) -> Iterator[Server]:
        """Start the proxy with an empty store. Unless it ``summarizes``, summaries are extracts."""
        folder = self.folder / str(time.monotonic_ns())
        folder.mkdir()
        with proxy(_settings(self.upstream, summarizes), folder, core=self.core, **options) as server:
            yield server

    @contextlib.contextmanager
    def both(self, *, summarizes: bool = True, **options: Any) -> Iterator[tuple[Server, Server]]:
        """Start both, the pass-through first."""
        with self.passthrough(**options) as theirs, self.proxy(summarizes=summarizes, **options) as ours:
            yield theirs, ours


def _settings(behind: Server, summarizes: bool) -> dict[str, Any]:
    """Return the defaults, with addresses and the models' windows.

    If the proxy doesn't summarize, no route matches the summary model.
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
    return {
        "upstreams": {"main": {"provider": "openai", "base_url": f"{behind.url}/v1"}},
        "models": [*models, {"match": "*" if summarizes else "*-*", "upstream": "main"}],
        "policies": {"default": {} if summarizes else {"summary": {"model": "none"}}},
    }


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tail(log: Path, lines: int = 30) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


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
