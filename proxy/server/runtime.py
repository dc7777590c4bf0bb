"""Build everything that a running proxy holds, and close it."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import TYPE_CHECKING

from proxy.access.admin import AdminLink, Sessions
from proxy.access.admission import BodyMemory, ConcurrencyLimit
from proxy.access.quotas import Quotas, SharedQuotas
from proxy.access.spending import Spending
from proxy.config import Settings
from proxy.config.server import OtelSettings
from proxy.limits.calibration import Calibration
from proxy.limits.learned import LearnedLimits
from proxy.limits.profiles import Profiles
from proxy.pipeline.billing import BackgroundResponses
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.measures import Measures
from proxy.pipeline.recorder import Recorder, Sink
from proxy.pipeline.sent_prompts import SentPrompts
from proxy.pipeline.services import Services
from proxy.pipeline.snapshot import ConfigSnapshot, apply_reloadable
from proxy.pipeline.stored_facts import StoredFacts
from proxy.recall.rounds import HiddenRounds
from proxy.recall.tool import Reader
from proxy.records import open_records
from proxy.server.maintenance import Maintenance
from proxy.store import Guarded, ManagedStore, open_store
from proxy.store.archive import Archive
from proxy.store.guarded import ARCHIVE_READ_SECONDS
from proxy.store.items import ItemMemory
from proxy.store.opening import open_archive, open_limits
from proxy.summary.budget import Budgets
from proxy.summary.store import Summaries
from proxy.telemetry.metrics import RequestMetrics
from proxy.telemetry.request_log import RequestLog

if TYPE_CHECKING:
    from proxy.telemetry.otel_export import OtelExport

INSTANCE = "COMPACTION_PROXY_INSTANCE"
"""The environment variable by which the workers of one server share their id."""


class Runtime(Services):
    """The services of one process."""

    def __init__(self, settings: Settings, profiles: Profiles | None = None) -> None:
        """``profiles`` may have its table loaded already."""
        self.instance = os.environ.get(INSTANCE) or secrets.token_hex(8)
        self.admin_link = AdminLink.from_environment(os.environ)
        self.sessions = Sessions()
        self.configuration = ConfigSnapshot(settings, self.instance)
        self.measures = Measures(profiles or Profiles())
        keys = settings.store.encryption.keys
        self.store = Guarded(open_store(settings.store.url, keys, settings.store.max_bytes))
        archived = open_archive(settings.archive.url, settings.archive.options, keys)
        self.archive_store = (
            None if archived is None else Guarded(archived, prefix="archive_", read_seconds=ARCHIVE_READ_SECONDS)
        )
        self.stored_facts = StoredFacts(self.store)
        self.facts = FactsCache(self.stored_facts)
        self.learned = LearnedLimits(self.store)
        self.calibration = Calibration(self.store)
        self.summaries = Summaries(self.store)
        self.archive = Archive(self.archive_store or self.store)
        self.items = ItemMemory(self.store)
        self.hidden_rounds = HiddenRounds(self.store)
        self.archive_reader = Reader(self.archive)
        self.compactor = Compactor(self.facts, self.summaries, self.archive)
        self.sent_prompts = SentPrompts(self.store)
        self.concurrency = ConcurrencyLimit(lambda: self.settings.server)
        self.bodies = BodyMemory(lambda: self.settings.server)
        counts = open_limits(settings.store.url)
        shared = None if counts is None else SharedQuotas(counts)
        self.quotas = Quotas(shared, lambda: self.settings.limits.on_store_failure)
        self.budgets = Budgets(self.store)
        self.records = open_records(settings.store.url, keys)
        self.spending = Spending(self.store, lambda: self.settings)
        self.background = BackgroundResponses(self.store)
        self.request_log = RequestLog(lambda: self.settings.log.requests)
        self.metrics = RequestMetrics()
        sinks: list[Sink] = [self.spending.add, self.metrics.add, self.request_log.add]
        self.otel = self._otel(settings.otel)
        begin_trace = None
        if self.otel is not None:
            sinks += self.otel.sinks
            begin_trace = self.otel.tracing.begin
        self.recorder = Recorder(self.records, lambda: self.settings.record_seconds, sinks, begin_trace)
        self.maintenance = self._maintenance(archived)

    def _maintenance(self, archived: ManagedStore | None) -> Maintenance:
        return Maintenance(
            self.store.unguarded,
            [
                self.summaries,
                self.archive,
                self.items,
                self.hidden_rounds,
                self.learned,
                self.calibration,
                self.sent_prompts,
                self.stored_facts,
                self.recorder,
                self.spending,
                self.budgets,
                self.background,
            ],
            self.records,
            lambda: self.settings.record_count,
            archived,
            self._settled,
        )

    async def _settled(self) -> None:
        """Wait for the writes in progress."""
        for cache in (
            self.summaries,
            self.archive,
            self.items,
            self.hidden_rounds,
            self.learned,
            self.calibration,
            self.sent_prompts,
            self.stored_facts,
        ):
            await cache.settled()

    def _otel(self, settings: OtelSettings | None) -> OtelExport | None:
        """Return the export of spans and metrics, or ``None`` if it's off."""
        if settings is None:
            return None
        # The packages are optional.
        from proxy.telemetry.otel_export import OtelExport, is_disabled

        if is_disabled():
            return None
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        return OtelExport(
            settings.endpoint,
            headers,
            traces=settings.traces,
            metrics=settings.metrics,
            upstreams=self._upstream,
            models=lambda: self.settings.model_names,
        )

    def _upstream(self, name: str) -> tuple[str, str | None] | None:
        upstream = self.settings.upstreams.get(name)
        return None if upstream is None else (upstream.provider, upstream.base_url)

    async def reconfigure(self, settings: Settings) -> list[str]:
        """Use other settings for new requests. Return the names of changed settings that need a restart."""
        before = self.configuration
        changed, waiting = apply_reloadable(before.settings, settings)
        self.configuration = ConfigSnapshot(changed, self.instance, before)
        await before.retire(self.configuration)
        return waiting

    async def aclose(self) -> None:
        """Close everything."""
        await self.maintenance.aclose()
        await self.limit_discovery.aclose()
        await self.summaries.stop()  # before the connections that they use are closed
        await self.configuration.aclose()
        # If the store fails, each of these gives up after seconds. One after the other would take most of a minute.
        async with asyncio.TaskGroup() as writers:
            for writer in (
                self.summaries,
                self.archive,
                self.items,
                self.hidden_rounds,
                self.learned,
                self.calibration,
                self.sent_prompts,
                self.stored_facts,
                self.budgets,
                self.background,
                self.quotas,
                self.recorder,
            ):
                writers.create_task(writer.aclose())
        for last in (self.metrics, self.spending, self.records, self.store):
            await last.aclose()
        if self.archive_store is not None:
            await self.archive_store.aclose()
        if self.otel is not None:
            await self.otel.aclose()
        self.facts.close()
