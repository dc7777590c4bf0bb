"""The parts that endpoints and the pipeline work with. ``server.runtime`` builds them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from proxy.access.admission import BodyMemory, ConcurrencyLimit
from proxy.access.authenticator import Caller
from proxy.access.quotas import Quotas
from proxy.config import Route, Settings
from proxy.dialects.chat.counting import Counter
from proxy.errors import ConfigurationError
from proxy.limits.calibration import Calibration
from proxy.limits.learned import (
    LearnedLimit,
    LearnedLimits,
    budget,
    for_others,
    limit_from_overflow,
    lower,
    published,
    reserved_output,
)
from proxy.limits.profiles import Profile, Profiles
from proxy.overflow import Overflow
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.measures import Measures
from proxy.pipeline.snapshot import ConfigSnapshot
from proxy.store import Guarded
from proxy.store.archive import Archive
from proxy.store.replicated_map import FIRST_READ_SECONDS
from proxy.summary.budget import Budgets
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.store import Summaries
from proxy.upstream.limit_discovery import LimitDiscovery, StatedLimit

log = structlog.get_logger(__name__)

MOST_MEASURED = 1_000
"""Routes whose profile and counter are remembered."""


class Services:
    """The configuration in force, and everything that outlives a request."""

    instance: str
    """The id that the workers of one server share."""
    configuration: ConfigSnapshot
    measures: Measures
    remembered: FactsCache
    store: Guarded
    learned: LearnedLimits
    calibration: Calibration
    summaries: Summaries
    archive: Archive
    compactor: Compactor
    concurrency: ConcurrencyLimit
    bodies: BodyMemory
    quotas: Quotas
    budgets: Budgets
    draining: bool = False

    @property
    def settings(self) -> Settings:
        """The current settings. A request uses those of its own configuration."""
        return self.configuration.settings

    @property
    def enquiries(self) -> LimitDiscovery:
        """The limits that upstreams report, in the current configuration."""
        return self.configuration.enquiries

    @property
    def profiles(self) -> Profiles:
        """The table of models."""
        return self.measures.profiles

    async def profile(self, route: Route, configuration: ConfigSnapshot | None = None) -> Profile:
        """Return the profile of a route's model. If the configuration doesn't set its limits, query the upstream.

        The route belongs to ``configuration``, by default the current one.
        """
        if not self.measures.profiles.loaded:
            await self.measures.load()
        configuration = configuration or self.configuration
        upstream = configuration.settings.upstreams[route.upstream]
        told = self._told_limits(route, configuration)
        return self.profiles.find(
            route.model, provider=upstream.provider, override=route.profile, told=told, address=upstream.base_url
        )

    def _told_limits(self, route: Route, configuration: ConfigSnapshot) -> StatedLimit | None:
        """Return the limits that the upstream states, unless the operator states some."""
        stated = route.profile is not None and (route.profile.context_window or route.profile.max_input_tokens)
        return None if stated else configuration.enquiries.told(route.upstream, route.model)

    async def recall(self, upstream: str, model: str, tenant: str) -> None:
        """Load what the store has on a model. Only the first call waits, for at most ``FIRST_READ_SECONDS``."""
        limits = self.learned.first_read(upstream, model, tenant)
        ratios = self.calibration.first_read(upstream, model, tenant)
        if limits is not None or ratios is not None:
            await asyncio.wait([read for read in (limits, ratios) if read is not None], timeout=FIRST_READ_SECONDS)

    async def measure(self, route: Route, configuration: ConfigSnapshot) -> tuple[Profile, Counter | None]:
        """Return the profile of a route's model, and its counter.

        The counter is ``None`` if the files that counting needs are missing or damaged. Then the request can't be
        measured, and the profile may have no limits.
        """
        told = self._told_limits(route, configuration)
        known = configuration.measured.get(id(route))
        if known is not None and known[0] is route and known[1] is told and not self.measures.faults:
            return known[2], known[3]
        try:
            profile = await self.profile(route, configuration)
        except ConfigurationError:  # logged once, and reported by ``/readyz``
            return Profile(route.model), None
        counter = await self.measures.usable(profile)
        if counter is not None and len(configuration.measured) < MOST_MEASURED:
            configuration.measured[id(route)] = route, told, profile, counter
        return profile, counter

    def counter(self, profile: Profile) -> Counter:
        """Return the counter for a profile. Raises ``ConfigurationError`` if its tokenizer isn't installed."""
        return self.measures.counter(profile)

    async def summary_models(
        self,
        configuration: ConfigSnapshot,
        route: Route,
        caller: Caller,
        max_tokens: int,
        provisional: LearnedLimit | None = None,
    ) -> Sequence[UpstreamSummaryModel]:
        """Return the models that may summarize a conversation on a route, in the order to try them.

        ``max_tokens`` is the maximum size of the summary, which their windows reserve. ``provisional`` is a provisional
        limit of the route's own model. The caller's key goes only to the upstream of the caller's request.
        """
        policy = caller.policy
        names: list[str | Route] = [policy.summary.model or route]
        if policy.summary.fallback_model is not None:
            names.append(policy.summary.fallback_model)
        models = []
        for name in names:
            found = configuration.settings.route(name) if isinstance(name, str) else name
            if found is None:
                log.warning("summary.no_route", model=name, policy=policy.name)
                continue
            try:
                models.append(await self._summary_model(configuration, route, found, caller, max_tokens, provisional))
            except ConfigurationError as error:  # the other models, or a digest, take its place
                log.error("summary.model_unusable", model=name, upstream=found.upstream, reason=error.message)
        return models

    async def _summary_model(
        self,
        configuration: ConfigSnapshot,
        route: Route,
        found: Route,
        caller: Caller,
        max_tokens: int,
        provisional: LearnedLimit | None,
    ) -> UpstreamSummaryModel:
        """Return the model of the route ``found``. The other arguments are those of ``summary_models``.

        Raises ``ConfigurationError`` if its upstream can't be used, or its tokenizer isn't installed.
        """
        profile = await self.profile(found, configuration)
        counter = self.counter(profile)
        # Reasoning must not use all of a small window that it shares with the transcript.
        shared = (profile.context_window or 0) // 2
        most = min(filter(None, (profile.max_output_tokens, shared)), default=None)
        output = output_limit(found.model, max_tokens, most)
        await self.recall(found.upstream, found.model, caller.tenant)
        learned = self.learned.get(found.upstream, found.model, caller.tenant)
        if provisional is not None and (found.upstream, found.model) == (route.upstream, route.model):
            learned = lower(learned, for_others(provisional))
        factor = self.calibration.factor(found.upstream, found.model, caller.tenant)
        return UpstreamSummaryModel(
            await configuration.upstreams.lane(found.upstream),
            found.model,
            found.upstream,
            input_limit=budget(profile, reserved_output(profile, output, None), learned, factor),
            max_output=most,
            count=counter.text,
            credential=caller.credential if found.upstream == route.upstream else None,
            timeout=caller.policy.summary.timeout,
            budget=self.budgets.of(caller),
            on_overflow=partial(self._on_overflow, found, caller.tenant, published(profile, factor), factor),
        )

    def _on_overflow(
        self, route: Route, tenant: str, most: LearnedLimit, factor: float, overflow: Overflow, sent: int, output: int
    ) -> None:
        """Learn the limit that a summary model's error names."""
        told = limit_from_overflow(overflow, sent, output, factor)
        if told.source == "refusal":
            self.learned.learn(route.upstream, route.model, tenant, told, most)
