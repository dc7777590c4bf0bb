"""Time limits for requests that take long, at almost no cost for all others.

Setting and canceling a timer of the event loop costs as much as parsing a small body, and a request's timers rarely
expire. So all requests of a loop share one timer, which measures their age roughly.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

TICK = 0.02
"""Seconds. Callbacks run between one and two ticks after they were added."""

FAR_TICK = 1.0
"""Seconds between two checks of limits that expire later than twice this. Nearer limits have their own timer."""


class CoarseTimer:
    """The shared timer of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ticking = False
        self._young: dict[object, Callable[[], None]] = {}
        self._old: dict[object, Callable[[], None]] = {}
        self._far: dict[Deadline, None] = {}
        self._far_ticking = False

    def now(self) -> float:
        """Return the event loop's time in seconds."""
        return self.loop.time()

    def until(self, when: float, late: Callable[[], None] | None = None) -> Deadline:
        """Return a deadline for a block of work. ``late`` is called once the work has taken one to two ticks."""
        return Deadline(self, when, late)

    def task(self) -> asyncio.Task[object]:
        """Return the current task. Raises ``RuntimeError`` if there is none."""
        task = asyncio.current_task(self.loop)
        if task is None:
            raise RuntimeError("no task is running")
        return task

    def add(self, key: object, act: Callable[[], None]) -> None:
        """Call ``act`` in one to two ticks, unless ``key`` is discarded before."""
        self._young[key] = act
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(TICK, self._tick)

    def discard(self, key: object) -> bool:
        """Remove a key if it exists. Return whether it existed."""
        return self._young.pop(key, None) is not None or self._old.pop(key, None) is not None

    def watch(self, limit: Deadline) -> None:
        """Set the timer of a deadline when its time is near."""
        if limit.when - self.loop.time() <= 2 * FAR_TICK:
            limit.arm()
            return
        self._far[limit] = None
        if not self._far_ticking:
            self._far_ticking = True
            self.loop.call_later(FAR_TICK, self._far_tick)

    def unwatch(self, limit: Deadline) -> None:
        """Stop watching a deadline, if it's watched."""
        self._far.pop(limit, None)

    def _far_tick(self) -> None:
        near = self.loop.time() + 2 * FAR_TICK
        for limit in [limit for limit in self._far if limit.when <= near]:
            del self._far[limit]
            limit.arm()
        self._far_ticking = bool(self._far)
        if self._far_ticking:
            self.loop.call_later(FAR_TICK, self._far_tick)

    def _tick(self) -> None:
        due = self._old
        self._old, self._young = self._young, {}
        self._ticking = bool(self._old)
        if self._ticking:
            self.loop.call_later(TICK, self._tick)
        for act in due.values():
            act()


class Deadline:
    """Limit the work in this block to the time ``when``, on the event loop's clock. Raises ``TimeoutError``.

    This is a cheaper ``asyncio.timeout_at``. It sets a timer only after one to two ticks, so work can always take two
    ticks. You can move ``when`` meanwhile. ``expired`` is true once the time is over.
    """

    __slots__ = ("_before", "_late", "_overdue", "_task", "_timer", "expired", "when")

    def __init__(self, own: CoarseTimer, when: float, late: Callable[[], None] | None) -> None:
        self.when = when
        self._overdue = own
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self.expired = False

    def __enter__(self) -> Deadline:
        self._task = self._overdue.task()
        self._before = self._task.cancelling()
        self._overdue.add(self, self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._overdue.discard(self):
            return  # it hasn't begun to watch the time
        self._overdue.unwatch(self)
        if self._timer is not None:
            self._timer.cancel()
        # As in asyncio: if other code has canceled the task, too, that takes precedence.
        if self.expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count the time of a part of the work."""
        left, self.when = self.when - self._overdue.now(), math.inf
        try:
            yield
        finally:
            self.when = self._overdue.now() + left

    def arm(self) -> None:
        """Set the timer."""
        self._timer = self._overdue.loop.call_at(self.when, self._end)

    def _begin(self) -> None:
        self._overdue.watch(self)
        if self._late is not None:
            self._late()

    def _end(self) -> None:
        if self._overdue.now() < self.when:
            self._overdue.watch(self)
            return
        self.expired = True
        self._task.cancel()


_here = threading.local()


def coarse_timer() -> CoarseTimer:
    """Return the shared timer of the running event loop."""
    loop = asyncio.get_running_loop()
    found: CoarseTimer | None = getattr(_here, "found", None)
    if found is None or found.loop is not loop:
        found = _here.found = CoarseTimer(loop)
    return found
