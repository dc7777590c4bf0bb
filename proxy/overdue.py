"""What is done for requests that take long, at next to no cost for all others.

A timer of the event loop costs as much to set and cancel as a small body to parse, and a request's timers hardly ever
run out. So the requests of a loop share one timer, which tells roughly how long each has been there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

TICK = 0.02
"""Seconds. What is added is called between one tick later and two."""


class Overdue:
    """The shared timer of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ticking = False
        self._young: dict[object, Callable[[], None]] = {}
        self._old: dict[object, Callable[[], None]] = {}

    def add(self, key: object, act: Callable[[], None]) -> None:
        """Have ``act`` called in one to two ticks, unless ``key`` is discarded before."""
        self._young[key] = act
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(TICK, self._tick)

    def discard(self, key: object) -> None:
        """Forget a key, if it is there."""
        if self._young.pop(key, None) is None:
            self._old.pop(key, None)

    def _tick(self) -> None:
        due = self._old
        self._old, self._young = self._young, {}
        self._ticking = bool(self._old)
        if self._ticking:
            self.loop.call_later(TICK, self._tick)
        for act in due.values():
            act()


_here = threading.local()


def overdue() -> Overdue:
    """The shared timer of the running event loop."""
    loop = asyncio.get_running_loop()
    found: Overdue | None = getattr(_here, "found", None)
    if found is None or found.loop is not loop:
        found = _here.found = Overdue(loop)
    return found
