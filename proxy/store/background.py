"""Tasks that write to the store in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

CLOSING_SECONDS = 5.0
"""Seconds to finish pending writes when the process ends."""


AGAIN_SECONDS = 0.1
"""Seconds after which ``cancelled`` cancels a task again."""


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task that uses the store, and wait until it has ended.

    redis-py loses a cancellation that arrives together with an answer, so cancel a task until it ends.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_SECONDS)


class BackgroundWrites:
    """Run writes as tasks. ``turn`` is for writes that use the store one at a time."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.turn = asyncio.Lock()

    def start(self, write: Coroutine[None, None, None]) -> None:
        """Start a write. Call this in the event loop."""
        task = asyncio.get_running_loop().create_task(write)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def drained(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait up to ``seconds`` for pending writes. Return whether all of them finished."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        return not self._tasks

    async def cancel(self) -> None:
        """Cancel pending writes, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("store.write_failed", reason=type(error).__name__, exc_info=error)
