"""Sample the memory, descriptors, sockets, and requests in flight of a process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import psutil

from bench.servers import Server


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample: seconds since the start, resident bytes, and the numbers of descriptors, sockets, and open requests."""

    at: float
    memory: int
    descriptors: int
    sockets: int
    in_flight: int

    @property
    def others(self) -> int:
        """The number of descriptors that aren't sockets."""
        return self.descriptors - self.sockets


class Watcher:
    """Sample a process."""

    def __init__(self, server: Server) -> None:
        self.samples: list[Sample] = []
        self._process = psutil.Process(server.process.pid)
        self._server = server
        self._begun = time.monotonic()

    async def sample(self) -> Sample:
        """Take a sample."""
        in_flight = await asyncio.to_thread(self._server.metric, "compaction_requests_in_flight")
        with self._process.oneshot():
            sample = Sample(
                time.monotonic() - self._begun,
                self._process.memory_info().rss,
                self._process.num_fds(),
                len(self._process.net_connections()),
                in_flight,
            )
        self.samples.append(sample)
        return sample

    async def run(self, every: float) -> None:
        """Take a sample every ``every`` seconds until canceled."""
        while True:
            await self.sample()
            await asyncio.sleep(every)


def slope(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the growth of memory in bytes per second, and half the width of its 95 % interval.

    Consecutive samples correlate, so the interval comes from the means of ten stretches.
    """
    stretches = [samples[len(samples) * i // 10 : len(samples) * (i + 1) // 10] for i in range(10)]
    times = [statistics.fmean(sample.at for sample in stretch) for stretch in stretches]
    sizes = [statistics.fmean(sample.memory for sample in stretch) for stretch in stretches]
    fit = statistics.linear_regression(times, sizes)
    left = [size - fit.slope * at - fit.intercept for at, size in zip(times, sizes, strict=True)]
    middle = statistics.fmean(times)
    error = sqrt(sum(x * x for x in left) / 8) / sqrt(sum((at - middle) ** 2 for at in times))
    return fit.slope, 2.306 * error  # Student's t for eight degrees of freedom
