"""Everything that a running proxy holds: it outlives a request, and all requests share it.

Requests are measured with the table of models and the tokenizers from LiteLLM's package. Without them the proxy doesn't
start. If they disappear while it runs, requests pass through uncompacted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Hashable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import structlog

from proxy.access.admin import AdminLink, Sessions
from proxy.access.authenticator import Authenticator
from proxy.access.quotas import BodyMemory, ConcurrencyLimit, Quotas, SharedQuotas
from proxy.access.spending import Allowances, Spending
from proxy.access.web_origins import WebRules
from proxy.config import Route, Settings
from proxy.config.server import OtelSettings
from proxy.dialects.apis import Dialect
from proxy.dialects.counting import Counter
from proxy.errors import ConfigurationError
from proxy.limits.calibration import Calibration
from proxy.limits.learned import LearnedLimits
from proxy.limits.prices import Price, price_of
from proxy.limits.profiles import Profile, Profiles, ReportedWindow
from proxy.limits.tables import CORRECTIONS
from proxy.pipeline.billing import BackgroundResponses
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.recorder import Recorder, Sink, Tags
from proxy.pipeline.sent_prompts import SentPrompts
from proxy.recall.rounds import HiddenRounds
from proxy.recall.tool import Reader
from proxy.records import open_records
from proxy.store import Guarded, Store, open_limits, open_store
from proxy.store.archive import Archive
from proxy.store.forgetting import Holder
from proxy.store.items import ItemMemory
from proxy.store.replicated_map import FIRST_READ_SECONDS
from proxy.store.tenant_cache import CacheCapacity
from proxy.summary.single_flight import Summaries
from proxy.telemetry import metrics
from proxy.telemetry.logs import RequestLog
from proxy.tokens import encoding
from proxy.tokens.text import check
from proxy.upstream.limit_discovery import LimitDiscovery
from proxy.upstream.registry import Upstreams
from proxy.upstream.traits import Memory

log = structlog.get_logger(__name__)

TABLE = "table"  # The name of the table of models among the unavailable files. The others are named by their tokenizer.
RETRY_SECONDS = 10.0  # Time between two attempts to read a table that is unreadable. An attempt can take 50 ms.


class Measures:
    """Profiles of models, and counters for them. Remembers which files are missing or damaged."""

    def __init__(self, profiles: Profiles) -> None:
        self.profiles = profiles
        self.unavailable: dict[str, str] = {}
        self._counters: dict[Hashable, Counter] = {}
        self._error: ConfigurationError | None = None
        self._again = 0.0

    async def load(self) -> None:
        """Read the table of models in a thread, unless it is loaded. Raises ``ConfigurationError``."""
        if self.profiles.loaded:
            return
        if self._error is not None and time.monotonic() < self._again:
            raise ConfigurationError(self._error.message)
        try:
            await asyncio.to_thread(self.profiles.load)
        except ConfigurationError as error:
            self._error, self._again = error, time.monotonic() + RETRY_SECONDS
            self.fail(TABLE, error)
            raise
        self._error = None
        self._repaired(TABLE)

    def counter(self, profile: Profile, dialect: Dialect) -> Counter:
        """Return the counter for a profile; profiles that count alike share one. Raises ``ConfigurationError``."""
        key = dialect.name, dialect.counters.key_of(profile)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = dialect.counters(profile)
        return counter

    async def usable(self, profile: Profile, dialect: Dialect) -> Counter | None:
        """Return the counter for a profile, or ``None`` if its tokenizer can't be used."""
        try:
            counter = self.counter(profile, dialect)
            if profile.tokenizer in self.unavailable:
                await asyncio.to_thread(encoding, profile.tokenizer)
                self._repaired(profile.tokenizer)
        except ConfigurationError as error:
            self.fail(profile.tokenizer, error)
            return None
        return counter

    def fail(self, name: str, error: ConfigurationError) -> None:
        """Remember that the table or a tokenizer can't be used. Log each error once."""
        if self.unavailable.get(name) != error.message:
            self.unavailable[name] = error.message
            log.error("counting.unavailable", reason=error.message, effect="requests pass through uncompacted")

    def _repaired(self, name: str) -> None:
        if self.unavailable.pop(name, None) is not None:
            log.info("counting.available", of=name)


def require(settings: Settings, profiles: Profiles) -> None:
    """Load the table of models and find the tokenizers that requests may need.

    Raises ``ConfigurationError`` if anything is missing. Tokenizers aren't loaded: that takes up to 0.4 s each.
    """
    profiles.load()
    stated = [route.profile.tokenizer for route in settings.models if route.profile is not None]
    for name in sorted({*(family.tokenizer for family in CORRECTIONS.families), *filter(None, stated)}):
        check(name)


if TYPE_CHECKING:
    from proxy.telemetry.otel_export import OtelExport

ONLY_AT_START = {
    "server": ("host", "port", "drain", "cache_memory"),
    "store": None,
    "log": ("level", "format"),
    "metrics": None,
}
"""Settings that need a restart, by section. ``None`` means the whole section."""

OPTIONAL_AT_START = ("otel",)  # sections that need a restart and can be absent

MOST_ROUTES = 1_000
LONGEST_NAME = 200  # remember the routes of this many models, with names of at most this many characters

CHAT, MESSAGES = "chat", "messages"


class ConfigSnapshot:
    """Settings, their teams, and the transports to their upstreams.

    A snapshot doesn't change. A request keeps the one that was current when it arrived, even after a reload.
    """

    def __init__(self, settings: Settings, instance: str, before: ConfigSnapshot | None = None) -> None:
        """Reuse the parts of ``before``, the configuration to replace, that are the same in both."""
        self.settings = settings
        self._routes: dict[tuple[str, str], Route | None] = {}
        self.measured: dict[tuple[int, str, bool], tuple[Route, ReportedWindow | None, Profile, Counter]] = {}
        """Profiles and counters, and the stated limits behind them, by route id, dialect, and long window."""
        self.teams = Authenticator(settings)
        self.web = WebRules(settings)
        self.upstreams: Upstreams = Upstreams(settings.upstreams, None if before is None else before.upstreams)
        self.limit_discovery: LimitDiscovery = LimitDiscovery(
            settings.upstreams,
            self.upstreams.relay,
            instance,
            before=None if before is None else before.limit_discovery,
            kept=self.upstreams.unchanged,
        )

    def route(self, model: str, dialect: str = CHAT) -> Route | None:
        """Return the route of a model, or ``None`` if routes are listed and none matches.

        If no route names the model, requests in other dialects than chat go to the first upstream that has their API.
        The proxy translates requests that their upstream doesn't take.

        The same model has the same route object while it's remembered.
        """
        try:
            return self._routes[model, dialect]
        except KeyError:
            route = self._route(model, dialect)
            if len(self._routes) < MOST_ROUTES and len(model) <= LONGEST_NAME:
                self._routes[model, dialect] = route
            return route

    def _route(self, model: str, dialect: str) -> Route | None:
        route = self.settings.route(model)
        if dialect == CHAT:
            return route
        if route is None:
            return Route(self.upstreams.first(anthropic=dialect == MESSAGES), model, None)
        if self._is_named(model) or self._has(route.upstream, dialect):
            return route
        having = (name for name in self.settings.upstreams if self._has(name, dialect))
        found = next(having, route.upstream)
        return route if found == route.upstream else Route(found, model, None)

    def _is_named(self, model: str) -> bool:
        """Return whether the first matching route is for certain models."""
        return next((one.match != "*" for one in self.settings.models if fnmatchcase(model, one.match)), False)

    def _has(self, upstream: str, dialect: str) -> bool:
        """Return whether an upstream has an API. Most servers have ``/responses``, but few have ``/messages``."""
        apis = self.settings.upstreams[upstream].certain_apis
        return dialect != MESSAGES if apis is None else dialect in apis

    def price(self, route: Route, profile: Profile) -> Price | None:
        """Return the current price of a route's model: the operator's, or else that of the table."""
        price = price_of(self.settings.prices, route.model, profile.price)
        return None if price is None else price.at(time.time())

    async def retire(self, successor: ConfigSnapshot) -> None:
        """Close the parts that the successor doesn't use. Requests with this configuration can still finish."""
        await self.upstreams.retire(successor.upstreams)
        await self.limit_discovery.retire(successor.limit_discovery)

    async def aclose(self) -> None:
        await self.limit_discovery.aclose()
        await self.upstreams.aclose()


def apply_reloadable(running: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """Return the new settings without those that need a restart, and the names of these settings."""
    kept, waiting = {}, []
    for section, names in ONLY_AT_START.items():
        ours, theirs = getattr(running, section), getattr(new, section)
        fields = names or tuple(type(ours).model_fields)
        kept[section] = theirs.model_copy(update={name: getattr(ours, name) for name in fields})
        waiting += [f"{section}.{name}" for name in fields if getattr(ours, name) != getattr(theirs, name)]
    for section in OPTIONAL_AT_START:
        kept[section] = getattr(running, section)
        waiting += [section] if kept[section] != getattr(new, section) else []
    return new.model_copy(update=kept), waiting


INSTANCE = "COMPACTION_PROXY_INSTANCE"  # the environment variable by which the workers of one server share their id
MOST_MEASURED = 1_000  # routes whose profile and counter are remembered

StoredCache = Archive | Calibration | HiddenRounds | ItemMemory | LearnedLimits | SentPrompts | Summaries
"""A cache of tenants' entries, in memory and in the store."""

CurrentSettings = Callable[[], Settings]  # Returns the settings in force. A request uses its own.


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
        """Return the profile of a route's model. For ``long_context`` see ``Profiles.find``."""
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
            sinks.append(otel.spans.add)
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
        if settings is None:
            return None
        # The packages are optional.
        from proxy.telemetry.otel_export import OtelExport, is_disabled

        if is_disabled():
            return None
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        return OtelExport(settings.endpoint, headers, self._upstream)

    def _upstream(self, name: str) -> tuple[str, str | None] | None:
        upstream = self.settings.upstreams.get(name)
        return None if upstream is None else (upstream.provider, upstream.base_url)
