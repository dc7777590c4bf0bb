"""Start servers in processes of their own, pin them to a core, and read their CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench import ROOT
from bench.bodies import WINDOWS
from tests.kit.waiting import until

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
    """A running server. ``log`` has its output."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """The root URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu(self) -> float:
        """The CPU seconds of all its threads so far, including those that have ended."""
        # This clock id is the one of clock_getcpuclockid(3) for another process. /proc has a lower resolution.
        return time.clock_gettime((~self.process.pid << 3) | 2)

    @property
    def memory(self) -> int:
        """The resident memory in bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def metric(self, name: str, label: str = "") -> int:
        """Return the sum of a metric's samples, or of those with a label of this value."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=60.0).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == name]
        return int(sum(one.value for one in samples if not label or label in one.labels.values()))


@contextlib.contextmanager
def running(
    module: Sequence[str],
    log: Path,
    *,
    before: Sequence[str] = (),
    core: int | None = None,
    checkout: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run a Python module until the block ends, as soon as it accepts connections. Its last argument is the port.

    ``before`` is a command that runs it. It starts in ``checkout``, with ``environment`` added to the variables of this
    process. If it doesn't start, or if the block raises, print the end of its output.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [*before, sys.executable, "-m", *module, str(port)]
    with log.open("wb") as output:
        variables = {**os.environ, **(environment or {})}
        with pinned(core):  # The child inherits the core from its first instruction.
            process = subprocess.Popen(command, cwd=checkout, env=variables, stdout=output, stderr=output)
        try:
            until(lambda: process.poll() is not None or _accepts(port), START_SECONDS)
            if process.poll() is not None or not _accepts(port):
                raise RuntimeError(f"{module[0]} didn't start; see its output")
            yield Server(port, process, log)
        except BaseException:
            sys.stderr.write(tail(log))
            raise
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def proxy(settings: Mapping[str, Any], folder: Path, **options: Any) -> AbstractContextManager[Server]:
    """Start the proxy with the public command.

    ``folder`` gets its configuration, its log, and unless the settings name another store, its store. ``options`` are
    those of ``running``.
    """
    file = folder / "config.yaml"
    file.write_text(configuration(settings, folder), encoding="utf-8")
    return running(["proxy", "serve", "--config", str(file), "--port"], folder / "proxy.log", **options)


def configuration(settings: Mapping[str, Any], folder: Path) -> str:
    """Return settings as YAML. Unless they name a store, it's in the folder."""
    return yaml.safe_dump({"store": {"url": f"sqlite:///{folder}/store.db"}, **settings}, sort_keys=False)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the measured servers: a core, and an upstream behind them. ``folder`` has their files."""

    core: int
    upstream: Server
    folder: Path

    def passthrough(self, **options: Any) -> AbstractContextManager[Server]:
        """Start the minimal pass-through."""
        log = self.folder / "passthrough.log"
        return running(["bench.passthrough", self.upstream.url], log, core=self.core, **options)

    def proxy(self, *, summarizes: bool = True, **options: Any) -> AbstractContextManager[Server]:
        """Start the proxy with an empty store. Unless it ``summarizes``, summaries are extracts."""
        folder = self.folder / str(time.monotonic_ns())
        folder.mkdir()
        return proxy(_settings(self.upstream, summarizes), folder, core=self.core, **options)

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
