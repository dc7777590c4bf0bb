"""Replicas of the proxy that can be killed, and a client that spreads requests over them."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.servers import free_port
from soak.processes import END_WITHIN, ROOT, NotStarted, tail

START_WITHIN = 60.0
"""Seconds until a replica must serve."""


class Replica:
    """One process. ``killed`` are the times at which it was killed."""

    def __init__(self, number: int, configuration: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"replica{number}.log"
        self.killed: list[float] = []
        self.up = False
        self._command = [
            sys.executable,
            "-m",
            "proxy",
            "serve",
            "--config",
            str(configuration),
            "--port",
            str(self.port),
        ]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._logged = 0

    def start(self) -> None:
        """Start the process, and wait until it serves. Raises ``NotStarted``."""
        self._logged = len(_text(self.log))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the check defines the command
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        latest = time.monotonic() + START_WITHIN
        while time.monotonic() < latest and self._process.poll() is None:
            if self.answers("/livez"):
                self.up = True
                return
            time.sleep(0.2)
        raise NotStarted(f"a replica didn't start. Its output:\n{tail(self.log)}")

    def answers(self, path: str) -> str | None:
        """Return the body of a response with the status 200."""
        with contextlib.suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=10) as http:
            response = http.get(f"{self.url}{path}")
            return response.text if response.status_code == 200 else None
        return None

    def kill(self) -> None:
        """Kill the process, as the system does when memory runs out."""
        self.up = False
        self.killed.append(time.monotonic())
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_WITHIN)

    def end(self) -> None:
        """End the process as an operator does."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_WITHIN)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def shares_limits(self) -> bool:
        """Return whether the process counts the limits of teams together with the others."""
        text = _text(self.log)[self._logged :]
        return text.rfind("quotas.breaker_opened") <= text.rfind("quotas.breaker_closed")

    @property
    def counted_alone(self) -> int:
        """Return the number of requests of a team that the replica counted alone, because the server took too long."""
        return _text(self.log).count("quotas.not_shared")

    @property
    def memory(self) -> int:
        """Return the resident bytes, 0 without a process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(psutil.Process(self._process.pid).memory_info().rss) if self._process is not None else 0
        return 0


class Balancer:
    """Sends each request to a random replica, and to another one if that refuses the connection.

    ``used`` is the replica of the last request.
    """

    def __init__(self, replicas: Sequence[Replica], seed: int) -> None:
        self.used = replicas[0]
        self._replicas = replicas
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def transport(self, library: Any) -> Any:
        """Return a transport for ``httpx`` or another version of it, which one thread uses."""
        balancer = self

        class Transport(library.BaseTransport):  # type: ignore[misc]
            def __init__(self) -> None:
                self._inner = library.HTTPTransport()

            def handle_request(self, request: Any) -> Any:
                candidates = balancer.order()
                for number, replica in enumerate(candidates, 1):
                    balancer.used = replica
                    request.url = request.url.copy_with(port=replica.port)
                    try:
                        return self._inner.handle_request(request)
                    except library.ConnectError:
                        if number == len(candidates):
                            raise
                raise AssertionError("unreachable")

            def close(self) -> None:
                self._inner.close()

        return Transport()

    def order(self) -> list[Replica]:
        """Return the replicas in random order, the running ones first."""
        return sorted(self._random.sample(list(self._replicas), len(self._replicas)), key=lambda one: not one.up)


@contextlib.contextmanager
def running(configurations: Sequence[Path], folder: Path, environment: Mapping[str, str]) -> Iterator[list[Replica]]:
    """Run a replica for each configuration as long as the block runs. Raises ``NotStarted``."""
    replicas = [Replica(number, file, folder, environment) for number, file in enumerate(configurations)]
    try:
        for replica in replicas:
            replica.start()
        yield replicas
    finally:
        for replica in replicas:
            replica.end()


def crashes(log: Path) -> list[str]:
    """Return lines that a replica's log must not have: crashes, errors of tasks that nobody saw, and leaks."""
    wrong = ("Traceback", "request.crashed", "never retrieved", "was never awaited", "Unclosed", "ResourceWarning")
    return [line for line in _text(log).splitlines() if any(sign in line for sign in wrong)]


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
