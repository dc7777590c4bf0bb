"""Apply changes of the configuration files while the proxy runs.

The proxy checks the files once a second, and immediately after SIGHUP. It applies a valid configuration. It reports
errors in an invalid one and keeps the current one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Mapping

import structlog

from proxy.config import Loaded
from proxy.config.loading import attempt
from proxy.config.sources import Sources
from proxy.pipeline.runtime import Runtime
from proxy.telemetry.metrics import RELOADS

log = structlog.get_logger(__name__)

EVERY = 1.0  # seconds between two checks of the files

SETTLED = 0.1
"""Seconds that files must stay unchanged before the proxy reads them, because an editor may still be writing."""

SETTLES_WITHIN = 50  # checks after which the proxy reads files that keep changing


class Reload:
    """Watch the files of one configuration."""

    def __init__(self, service: Runtime, loaded: Loaded, environ: Mapping[str, str], every: float = EVERY) -> None:
        """``loaded`` is the configuration that the service uses. ``every`` is in seconds."""
        self._service = service
        self._environ = environ
        self._every = every
        self._settings = loaded.settings
        running = service.settings.server.host
        # If the command line sets an address, the file's address doesn't count as a change.
        self._host = None if running == loaded.settings.server.host else running
        self._good = loaded.sources
        self.loaded = loaded
        """The configuration in force, with its files."""
        self._sources = loaded.sources
        self._seen = loaded.sources.stamp_as_read
        self._asked = asyncio.Event()
        self.wrong: str | None = None
        """The errors in the configuration on disk, one per line, without secrets."""

    def ask(self) -> None:
        self._asked.set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                await self._look(asked=asked)
            except Exception as error:  # the proxy continues to serve, and checks again
                log.exception("configuration.reload_crashed", error=type(error).__name__)

    async def _look(self, *, asked: bool) -> None:
        stamp = await asyncio.to_thread(self._sources.stamp)
        if stamp == self._seen and not asked:
            return
        for _ in range(SETTLES_WITHIN):
            await asyncio.sleep(SETTLED)
            before, stamp = stamp, await asyncio.to_thread(self._sources.stamp)
            if stamp == before:
                break
        found = await asyncio.to_thread(attempt, self._sources.entry, self._environ)
        if found.sources is None:
            self._seen = stamp
        else:
            self._sources, self._seen = found.sources, found.sources.stamp_as_read
        emptied = None if found.sources is None else _emptied(self._good, found.sources)
        if found.loaded is None or emptied is not None:
            self._refuse(emptied or found.wrong)
        else:
            await self._apply(found.loaded, asked=asked)

    def _refuse(self, wrong: str) -> None:
        if wrong != self.wrong:
            RELOADS.labels(outcome="refused").inc()
            log.error("configuration.wrong", faults=wrong.splitlines(), in_force="the one before")
        self.wrong = wrong

    async def _apply(self, loaded: Loaded, *, asked: bool) -> None:
        was_wrong, self.wrong = self.wrong is not None, None
        self._good, self.loaded = loaded.sources, loaded
        if loaded.settings == self._settings and not asked and not was_wrong:
            return
        waiting = await self._service.reconfigure(loaded.settings.listening(self._host))
        self._settings = loaded.settings
        RELOADS.labels(outcome="applied").inc()
        log.info("configuration.reloaded", files=len(loaded.sources.files), warnings=list(loaded.warnings))
        if waiting:
            log.warning("configuration.needs_restart", settings=waiting)


def _emptied(good: Sources, found: Sources) -> str | None:
    """Return the error for a file that had settings and is now empty. Some editors truncate a file before they write.

    An empty file is valid, but applying it would drop its settings, such as the keys of teams.
    """
    filled = {source.path for source in good.files if source.content.strip()}
    for source in found.files:
        if source.path in filled and not source.content.strip() and source.unreadable is None:
            return f"{source.path}:1: the file has become empty. Fix: write its settings, or restart without them"
    return None


def on_signal(reload: Reload | None) -> None:
    """Make SIGHUP reload the configuration. Only a process's main thread receives signals."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        return
    act = (lambda: log.warning("configuration.none")) if reload is None else reload.ask
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, act)
