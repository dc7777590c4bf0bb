"""One configuration: the settings and the objects built from them. A reload replaces it as a whole."""

from __future__ import annotations

from fnmatch import fnmatchcase

from proxy.access.authenticator import Authenticator
from proxy.access.web_origins import WebRules
from proxy.config import Route, Settings
from proxy.dialects.counting import Counter
from proxy.limits.profiles import Profile
from proxy.limits.profiles.lookup import ReportedWindow
from proxy.upstream.limit_discovery import LimitDiscovery
from proxy.upstream.registry import Upstreams

ONLY_AT_START = {
    "server": ("host", "port", "drain", "cache_memory"),
    "store": None,
    "log": ("level", "format"),
    "metrics": None,
}
"""Settings that need a restart, by section. ``None`` means the whole section."""

OPTIONAL_AT_START = ("otel",)
"""Sections that need a restart and can be absent."""

MOST_ROUTES = 1_000
LONGEST_NAME = 200
"""Remember the routes of this many models, with names of at most this many characters."""

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


def listening(settings: Settings, host: str | None) -> Settings:
    """Return the settings with the address from the command line. Defaults for callers without a key depend on it."""
    if host is None:
        return settings
    return settings.model_copy(update={"server": settings.server.model_copy(update={"host": host})})
