"""The failures of a fleet, one at a time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from redis import Redis

from soak.fleet.gate import Gate
from soak.fleet.replicas import Replica
from tests.kit.object_server import Failure, ObjectServer
from tests.kit.redis_server import RedisServer

SLOW_SECONDS = 0.5
"""Seconds that the slow server takes for a command."""

PAUSED_SECONDS = 8.0
KILLS = 3
BETWEEN_KILLS = 4.0

KEPT = ("--appendonly", "yes")
"""Options of a server that keeps its data on disk."""

Disturbance = Callable[[], None]


class Disturbances:
    """The failures. Each method returns when its failure is over."""

    def __init__(
        self,
        replicas: list[Replica],
        server: RedisServer,
        gate: Gate,
        objects: ObjectServer,
        folder: Path,
        seconds: float,
        summarised: threading.Event,
    ) -> None:
        """Each failure lasts ``seconds``, except kills and pauses. ``summarised`` is set when a summary begins."""
        self._summarised = summarised
        self.kills = 0
        self._replicas = replicas
        self._server = server
        self._gate = gate
        self._objects = objects
        self._folder = folder
        self._seconds = seconds
        self._random = random.Random(1)  # noqa: S311 - no secret
        self._servers = 1

    @property
    def all(self) -> dict[str, Disturbance]:
        """Return the failures by name."""
        return {
            "replicas killed": self._kill,
            "Redis paused": self._pause,
            "Redis slow": self._slow,
            "Redis killed, back with data": self._restart,
            "Redis killed, back empty": lambda: self._restart(empty=True),
            "Redis out of memory": self._fill,
            "Redis failed over": self._fail_over,
            "objects refused": lambda: self._objects_fail("refuses"),
            "objects hang": lambda: self._objects_fail("hangs"),
            "objects overloaded": lambda: self._objects_fail("overloaded"),
        }

    def _kill(self) -> None:
        for _ in range(KILLS):
            replica = self._random.choice(self._replicas)
            self._summarised.clear()
            self._summarised.wait(BETWEEN_KILLS)
            replica.kill()
            self.kills += 1
            time.sleep(BETWEEN_KILLS / 2)
            replica.start()
            time.sleep(self._random.uniform(0, BETWEEN_KILLS))

    def _pause(self) -> None:
        pid = self._pid()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSED_SECONDS)
        os.kill(pid, signal.SIGCONT)

    def _slow(self) -> None:
        self._gate.slow_down(SLOW_SECONDS)
        time.sleep(self._seconds)
        self._gate.slow_down(0)

    def _restart(self, *, empty: bool = False) -> None:
        self._server.stop()
        time.sleep(self._seconds)
        if empty:
            self._server.lose_data()
        self._server.start()

    def _fill(self) -> None:
        with self._client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1mb")
            time.sleep(self._seconds)
            client.config_set("maxmemory", "0")

    def _fail_over(self) -> None:
        """Kill the primary. Some seconds later, its replica takes its place."""
        self._servers += 1
        folder = self._folder / f"redis{self._servers}"
        folder.mkdir()
        second = RedisServer(folder, KEPT, None, "")
        second.start()
        with second.client() as client:
            client.replicaof("127.0.0.1", str(self._server.port))
            while client.info("replication")["master_link_status"] != "up":
                time.sleep(0.1)
        self._server.stop()
        time.sleep(self._seconds / 4)
        with second.client() as client:
            client.replicaof("NO", "ONE")
        self._gate.lead_to(second.port)
        self._server = second

    def _objects_fail(self, failure: Failure) -> None:
        self._objects.failure = failure
        time.sleep(self._seconds)
        self._objects.failure = ""

    @contextlib.contextmanager
    def _client(self) -> Iterator[Redis]:
        with self._server.client() as client:
            yield client

    def _pid(self) -> int:
        with self._client() as client:
            return int(client.info("server")["process_id"])

    def end(self) -> None:
        """Stop the server that is in use now."""
        self._server.stop()
