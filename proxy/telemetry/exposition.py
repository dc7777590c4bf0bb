"""Return the metrics in Prometheus' text format, those of one process or the sums over several workers.

Workers write their metrics to files in a folder that only their parent creates. The files of a worker that ended stay,
so counters never decrease.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from proxy.telemetry.metrics import REGISTRY

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the folder. prometheus_client reads it on import."""

if FOLDER not in os.environ:
    REGISTRY.register(ProcessCollector(registry=None))


class WorkerSums(Collector):
    """The sums over all workers, including those that ended."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def collect(self) -> Iterable[Metric]:
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
    """Return all metrics in Prometheus' text format."""
    return generate_latest(registry())
