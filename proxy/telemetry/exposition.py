"""Return the metrics in Prometheus' text format, those of one process or the sums over several workers.

Workers write their metrics to files in a folder that only their parent creates. The files of a worker that ended stay,
so counters never decrease.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from proxy.telemetry.metrics import REGISTRY, TASKS

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the folder. prometheus_client reads it on import."""

SAMPLE_SECONDS = 5.0
"""Seconds between two samples of a process's tasks, memory, and CPU."""

_OWN = ProcessCollector(registry=None)
_WORKER = FOLDER in os.environ
_SUMS: dict[str, Gauge] = {}
_cpu_counted = 0.0

if _WORKER:
    for _name, _help in (
        ("process_virtual_memory_bytes", "Virtual memory size in bytes."),
        ("process_resident_memory_bytes", "Resident memory size in bytes."),
        ("process_open_fds", "Number of open file descriptors."),
    ):
        _SUMS[_name] = Gauge(_name, _help, registry=REGISTRY, multiprocess_mode="livesum")
    _CPU = Counter("process_cpu_seconds", "Total user and system CPU time spent in seconds.", registry=REGISTRY)
else:
    REGISTRY.register(_OWN)


class WorkerSums(Collector):
    """The sums over all workers, including those that ended."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def collect(self) -> Iterable[Metric]:
        """Return the sums."""
        # A worker creates each file empty, and then writes its head.
        files = [str(file) for file in self._folder.glob("*.db") if file.stat().st_size]
        metrics: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return metrics


def registry() -> CollectorRegistry:
    """Return the metrics of this process. With several workers, return their sums, in a worker and in their parent."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return REGISTRY
    sums = CollectorRegistry()
    sums.register(WorkerSums(folder))
    return sums


def exposition() -> bytes:
    """Return all metrics in Prometheus' text format. Call it on the event loop, whose tasks it counts."""
    sample()
    return generate_latest(registry())


def sample() -> None:
    """Measure this process. Call it on the event loop."""
    TASKS.set(len(asyncio.all_tasks()))
    if not _WORKER:
        return
    for family in _OWN.collect():
        for measured in family.samples:
            if (gauge := _SUMS.get(measured.name)) is not None:
                gauge.set(measured.value)
    _count_cpu()


def _count_cpu() -> None:
    global _cpu_counted
    now = time.process_time()
    _CPU.inc(now - _cpu_counted)
    _cpu_counted = now


async def keep_sampling() -> None:
    """Measure this process until the task is cancelled. A scrape may reach another worker, or the parent."""
    while True:
        sample()
        await asyncio.sleep(SAMPLE_SECONDS)
