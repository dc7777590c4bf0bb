"""The parts that endpoints and the pipeline work with. ``server.runtime`` builds them."""

from __future__ import annotations

import asyncio

from proxy.access.admin import AdminLink, Sessions
from proxy.access.admission import BodyMemory, ConcurrencyLimit
from proxy.access.quotas import Quotas
from proxy.access.spending import Spending
from proxy.config import Route, Settings
from proxy.dialects.counting import Counter
from proxy.dialects.dialect import Dialect
from proxy.errors import ConfigurationError
from proxy.limits.calibration import Calibration
from proxy.limits.learned import LearnedLimits
from proxy.limits.profiles import Profile
from proxy.limits.profiles.lookup import ReportedWindow
from proxy.pipeline.billing import BackgroundResponses
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.measures import Measures
from proxy.pipeline.recorder import Recorder
from proxy.pipeline.sent_prompts import SentPrompts
from proxy.pipeline.snapshot import ConfigSnapshot
from proxy.recall.rounds import HiddenRounds
from proxy.recall.tool import Reader
from proxy.records.model import RecordStore
from proxy.store import Guarded
from proxy.store.archive import Archive
from proxy.store.items import ItemMemory
from proxy.store.replicated_map import FIRST_READ_SECONDS
from proxy.summary.budget import Budgets
from proxy.summary.store import Summaries
from proxy.upstream.limit_discovery import LimitDiscovery

MOST_MEASURED = 1_000
"""Routes whose profile and counter are remembered."""


class Services:
    """The configuration in force, and everything that outlives a request."""

    instance: str
    """The id that the workers of one server share."""
    admin_link: AdminLink | None
    sessions: Sessions
    configuration: ConfigSnapshot
    measures: Measures
    facts: FactsCache
    store: Guarded
    archive_store: Guarded | None
    """The object storage of the archive, or ``None`` if the archive is in the store."""
    learned: LearnedLimits
    calibration: Calibration
    summaries: Summaries
    archive: Archive
    items: ItemMemory
    hidden_rounds: HiddenRounds
    archive_reader: Reader
    compactor: Compactor
    sent_prompts: SentPrompts
    concurrency: ConcurrencyLimit
    bodies: BodyMemory
    quotas: Quotas
    budgets: Budgets
    records: RecordStore
    recorder: Recorder
    spending: Spending
    background: BackgroundResponses
    draining: bool = False

    @property
    def settings(self) -> Settings:
        """The current settings. A request uses those of its own configuration."""
        return self.configuration.settings

    @property
    def stores(self) -> tuple[Guarded, ...]:
        """The store, and the one of the archive if it's another."""
        return (self.store,) if self.archive_store is None else (self.store, self.archive_store)

    @property
    def failing_stores(self) -> tuple[str, ...]:
        """Return the operations of the stores whose last call failed, and ``records`` if they can't be written."""
        records = ("records",) if self.recorder.failing else ()
        return (*(what for store in self.stores for what in store.failing), *records)

    @property
    def open_breakers(self) -> tuple[str, ...]:
        """Return the operations of the stores that failed repeatedly."""
        return tuple(what for store in self.stores for what in store.open_breakers)

    @property
    def limit_discovery(self) -> LimitDiscovery:
        """The limits that upstreams report, in the current configuration."""
        return self.configuration.limit_discovery

    async def profile(self, route: Route, configuration: ConfigSnapshot | None = None) -> Profile:
        """Return the profile of a route's model. If the configuration doesn't set its limits, query the upstream.

        The route belongs to ``configuration``. Default: the current one.
        """
        if not self.measures.profiles.loaded:
            await self.measures.load()
        configuration = configuration or self.configuration
        upstream = configuration.settings.upstreams[route.upstream]
        stated = self._stated_limits(route, configuration)
        return self.measures.profiles.find(
            route.model, provider=upstream.provider, override=route.profile, reported=stated, address=upstream.base_url
        )

    def _stated_limits(self, route: Route, configuration: ConfigSnapshot) -> ReportedWindow | None:
        """Return the limits that the upstream states, unless the operator states some."""
        configured = route.profile is not None and (route.profile.context_window or route.profile.max_input_tokens)
        return None if configured else configuration.limit_discovery.window(route.upstream, route.model)

    async def recall(self, upstream: str, model: str, tenant: str) -> None:
        """Load what the store has on a model. Only the first call waits, for at most ``FIRST_READ_SECONDS``."""
        limits = self.learned.first_read(upstream, model, tenant)
        ratios = self.calibration.first_read(upstream, model, tenant)
        if limits is not None or ratios is not None:
            await asyncio.wait([read for read in (limits, ratios) if read is not None], timeout=FIRST_READ_SECONDS)

    async def measure(
        self, route: Route, configuration: ConfigSnapshot, dialect: Dialect
    ) -> tuple[Profile, Counter | None]:
        """Return the profile of a route's model, and its counter for a dialect.

        The counter is ``None`` if the files that counting needs are missing or damaged. Then the request can't be
        measured, and the profile may have no limits.
        """
        stated = self._stated_limits(route, configuration)
        known = configuration.measured.get((id(route), dialect.name))
        if known is not None and known[0] is route and known[1] is stated and not self.measures.unavailable:
            return known[2], known[3]
        try:
            profile = await self.profile(route, configuration)
        except ConfigurationError:  # logged once, and reported by ``/readyz``
            return Profile(route.model), None
        counter = await self.measures.usable(profile, dialect)
        if counter is not None and len(configuration.measured) < MOST_MEASURED:
            configuration.measured[id(route), dialect.name] = route, stated, profile, counter
        return profile, counter
