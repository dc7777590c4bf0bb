"""Everything that a running proxy holds: it outlives a request, and all requests share it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.access.admin import AdminLink, Sessions
from proxy.access.quotas import BodyMemory, ConcurrencyLimit, Quotas, SharedQuotas
from proxy.access.spending import Spending
from proxy.config import Route, Settings
from proxy.config.server import OtelSettings
from proxy.dialects.apis import Dialect
from proxy.dialects.counting import Counter
from proxy.errors import ConfigurationError
from proxy.limits.calibration import Calibration
from proxy.limits.learned import LearnedLimits
from proxy.limits.profiles import Profile, Profiles
from proxy.limits.profiles.lookup import ReportedWindow
from proxy.pipeline.billing import BackgroundResponses
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.measures import Measures
from proxy.pipeline.recorder import Recorder, Sink
from proxy.pipeline.sent_prompts import SentPrompts
from proxy.pipeline.snapshot import ConfigSnapshot, apply_reloadable
from proxy.pipeline.tags import Tags
from proxy.recall.rounds import HiddenRounds
from proxy.recall.tool import Reader
from proxy.records import open_records
from proxy.store import Guarded, Store, open_limits, open_store
from proxy.store.archive import Archive
from proxy.store.cache_capacity import CacheCapacity
from proxy.store.forgetting import Holder
from proxy.store.items import ItemMemory
from proxy.store.replicated_map import FIRST_READ_SECONDS
from proxy.summary.allowance import Allowances
from proxy.summary.store import Summaries
from proxy.telemetry import metrics
from proxy.telemetry.logs import RequestLog
from proxy.upstream.traits import Memory

if TYPE_CHECKING:
    from proxy.telemetry.otel_export import OtelExport

INSTANCE = "COMPACTION_PROXY_INSTANCE"
"""The environment variable by which the workers of one server share their id."""

MOST_MEASURED = 1_000
"""Routes whose profile and counter are remembered."""

StoredCache = Archive | Calibration | HiddenRounds | ItemMemory | LearnedLimits | SentPrompts | Summaries
"""A cache of tenants' entries, in memory and in the store."""

CurrentSettings = Callable[[], Settings]
"""Returns the settings in force. A request uses those of its own configuration."""


class Stores:
    """The store, and the caches of tenants' entries in it."""

    def __init__(self, settings: Settings) -> None:
        keys = settings.store.encryption.keys
        self.store = Guarded(open_store(settings.store.url, keys, settings.store.max_bytes))
        self.archive = Archive(self.store)
        capacity = CacheCapacity(settings.server.cache_memory)
        self.facts = FactsCache(capacity.facts)
        self.hidden_rounds = HiddenRounds(self.store)
        self.items = ItemMemory(self.store, most=capacity.items)
        self.sent_prompts = SentPrompts(self.store)
        self.summaries = Summaries(self.store, memory=capacity.summaries)


class ModelLimits:
    """The limits of models, and the ways they count."""

    def __init__(self, stores: Stores, profiles: Profiles) -> None:
        self.measures = Measures(profiles)
        self.learned = LearnedLimits(stores.store)
        self.calibration = Calibration(stores.store)

    async def load(self, upstream: str, model: str, tenant: str) -> None:
        """Load what the store has on a model. Only the first call waits, for at most ``FIRST_READ_SECONDS``."""
        limits = self.learned.first_read(upstream, model, tenant)
        ratios = self.calibration.first_read(upstream, model, tenant)
        if limits is not None or ratios is not None:
            await asyncio.wait([read for read in (limits, ratios) if read is not None], timeout=FIRST_READ_SECONDS)

    async def profile(self, route: Route, configuration: ConfigSnapshot, *, long_context: bool = False) -> Profile:
        """Return the profile of a route's model. If the configuration doesn't set its limits, query the upstream.

        The route belongs to ``configuration``. For ``long_context`` see ``Profiles.find``.
        """
        if not self.measures.profiles.loaded:
            await self.measures.load()
        upstream = configuration.settings.upstreams[route.upstream]
        stated = _stated_limits(route, configuration)
        return self.measures.profiles.find(
            route.model,
            provider=upstream.provider,
            override=route.profile,
            reported=stated,
            address=upstream.base_url,
            long_context=long_context,
        )

    async def measure(
        self, route: Route, configuration: ConfigSnapshot, dialect: Dialect, *, long_context: bool = False
    ) -> tuple[Profile, Counter | None]:
        """Return the profile of a route's model, and its counter for a dialect.

        The counter is ``None`` if the files that counting needs are missing or damaged. Then the request can't be
        measured, and the profile may have no limits.
        """
        stated = _stated_limits(route, configuration)
        key = id(route), dialect.name, long_context
        before = configuration.measured.get(key)
        if before is not None and before[0] is route and before[1] is stated and not self.measures.unavailable:
            return before[2], before[3]
        try:
            profile = await self.profile(route, configuration, long_context=long_context)
        except ConfigurationError:  # logged once, and reported by ``/readyz``
            return Profile(route.model), None
        counter = await self.measures.usable(profile, dialect)
        if counter is not None and len(configuration.measured) < MOST_MEASURED:
            configuration.measured[key] = route, stated, profile, counter
        return profile, counter


def _stated_limits(route: Route, configuration: ConfigSnapshot) -> ReportedWindow | None:
    """Return the limits that the upstream states, unless the operator states some."""
    configured = route.profile is not None and (route.profile.context_window or route.profile.max_input_tokens)
    return None if configured else configuration.limit_discovery.window(route.upstream, route.model)


class Access:
    """The limits on callers and on concurrent requests, and the sessions of the dashboard."""

    def __init__(self, url: str, settings: CurrentSettings) -> None:
        """``url`` is that of the store."""
        self.admin_link = AdminLink.from_environment(os.environ)
        self.sessions = Sessions()
        self.concurrency = ConcurrencyLimit(lambda: settings().server)
        self.bodies = BodyMemory(lambda: settings().server)
        counts = open_limits(url)
        shared = None if counts is None else SharedQuotas(counts)
        self.quotas = Quotas(shared, lambda: settings().limits.on_store_failure)


class Money:
    """The cost of requests, and the spending of teams. ``allowances`` limit the tokens of summaries."""

    def __init__(self, stores: Stores, settings: CurrentSettings) -> None:
        self.spending = Spending(stores.store, settings)
        self.allowances = Allowances(stores.store)
        self.background = BackgroundResponses(stores.store)


class Records:
    """The records of requests, and everything that gets each finished one."""

    def __init__(
        self, settings: Settings, current: CurrentSettings, store: Store, spent: Sink, otel: OtelExport | None
    ) -> None:
        """``store`` has the key of the tags. ``spent`` counts the spending of teams."""
        self.tags = Tags(store)
        self.store = open_records(settings.store.url, settings.store.encryption.keys)
        self.otel = otel
        sinks: list[Sink] = [spent, metrics.add, RequestLog(lambda: current().log.requests).add]
        begin_trace = None
        if otel is not None:
            sinks += otel.sinks
            begin_trace = otel.tracing.begin
        self.recorder = Recorder(self.store, lambda: current().record_seconds, sinks, begin_trace)


class Runtime:
    """The configuration in force, and everything that outlives a request, in groups.

    ``instance`` is the id that the workers of one server share. ``draining`` is true once the process is to end.
    """

    def __init__(self, settings: Settings, profiles: Profiles | None = None) -> None:
        """``profiles`` may have its table loaded already."""
        self.instance = os.environ.get(INSTANCE) or secrets.token_hex(8)
        self.draining = False
        self.configuration = ConfigSnapshot(settings, self.instance)
        self.access = Access(settings.store.url, lambda: self.settings)
        self.stores = Stores(settings)
        self.limits = ModelLimits(self.stores, profiles or Profiles())
        self.traits = Memory()
        self.money = Money(self.stores, lambda: self.settings)
        self.records = Records(
            settings, lambda: self.settings, self.stores.store, self.money.spending.add, self._otel(settings.otel)
        )
        self.compactor = Compactor(self.stores.facts, self.stores.summaries, self.stores.archive)
        self.archive_reader = Reader(self.stores.archive)

    @property
    def settings(self) -> Settings:
        """The current settings. A request uses those of its own configuration."""
        return self.configuration.settings

    @property
    def failing_stores(self) -> tuple[str, ...]:
        """Return the operations of the stores whose last call failed, and ``records`` if they can't be written."""
        records = ("records",) if self.records.recorder.failing else ()
        return (*self.stores.store.failing, *records)

    @property
    def stored_caches(self) -> tuple[StoredCache, ...]:
        """Return what is written to the store in the background."""
        stores, limits = self.stores, self.limits
        first = (stores.summaries, stores.archive, stores.items, stores.hidden_rounds)
        return (*first, limits.learned, limits.calibration, stores.sent_prompts)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Return everything that remembers something of tenants."""
        return (*self.stored_caches, self.records.recorder, self.money.background, self)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop what the upstreams of the current configuration remember of tenants."""
        return self.configuration.upstreams.forget(forgotten)

    async def settled(self) -> None:
        for cache in self.stored_caches:
            await cache.settled()

    async def profile(self, route: Route) -> Profile:
        """Return the profile of a route's model in the current configuration. See ``Limits.profile``."""
        return await self.limits.profile(route, self.configuration)

    async def reconfigure(self, settings: Settings) -> list[str]:
        """Use other settings for new requests. Return the names of changed settings that need a restart."""
        before = self.configuration
        changed, waiting = apply_reloadable(before.settings, settings)
        following = ConfigSnapshot(changed, self.instance, before)
        await following.upstreams.prepare()
        self.configuration = following
        await before.retire(self.configuration)
        return waiting

    async def aclose(self) -> None:
        """Close everything. Stop maintenance before."""
        await self.configuration.limit_discovery.aclose()
        await self.stores.summaries.stop()  # before the connections that they use are closed
        await self.configuration.aclose()
        money, records = self.money, self.records
        # If the store fails, each of these gives up after seconds. One after the other would take most of a minute.
        async with asyncio.TaskGroup() as writers:
            others = (money.allowances, money.background, self.access.quotas, records.recorder)
            for closing in (*(one.aclose() for one in self.stored_caches), *(one.aclose() for one in others)):
                writers.create_task(closing)
        await money.spending.aclose()
        await records.store.aclose()
        await self.stores.store.aclose()
        if records.otel is not None:
            await records.otel.aclose()
        self.stores.facts.close()

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
