"""The whole configuration, as written and in force."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property

from pydantic import Field, field_validator

from proxy.config.fields import Name, Section, Text, wrong
from proxy.config.policy import Policy, WrittenPolicy
from proxy.config.server import (
    LogSettings,
    MetricsSettings,
    OtelSettings,
    RecordSettings,
    ServerSettings,
    StoreSettings,
)
from proxy.config.teams import AdminSettings, AuthSettings, SharedLimitSettings, TeamSettings
from proxy.config.upstreams import Prices, Route, RouteSettings, UpstreamSettings, default_upstreams
from proxy.constants import DAY


class _SettingsFields(Section):
    server: ServerSettings = ServerSettings()
    """Where to listen, and limits on requests."""
    store: StoreSettings = Field(default_factory=StoreSettings)
    """Where to store summaries and the archive."""
    records: RecordSettings | None = RecordSettings()
    """How long to keep the records of requests. null: keep none."""
    log: LogSettings = LogSettings()
    """Which lines to log, and their format."""
    metrics: MetricsSettings = MetricsSettings()
    """Where to serve the metrics."""
    otel: OtelSettings | None = None
    """Where to send spans and metrics with OpenTelemetry. null: nowhere."""
    prices: Prices = Field(default_factory=dict)
    """Prices in US dollars per token, by the upstream's name for the model or a glob, where they differ from LiteLLM's
    table."""
    auth: AuthSettings = AuthSettings()
    """Which callers the proxy accepts."""
    limits: SharedLimitSettings = SharedLimitSettings()
    """Limits of teams that replicas count together."""
    admin: AdminSettings | None = None
    """Who can see the records of all teams. null: on loopback, the person with the link that `serve` prints."""
    upstreams: Mapping[Name, UpstreamSettings] = Field(default_factory=default_upstreams)
    """The services that the proxy sends requests to, by name. Default: OpenAI, and Anthropic for requests in its
    format, each with the caller's own key."""
    models: tuple[RouteSettings, ...] = ()
    """Which models go to which upstream; the first match wins. Default: all models go to the first upstream."""
    teams: Mapping[Name, TeamSettings] = Field(default_factory=dict)
    """Callers that share a policy, by name."""

    @field_validator("upstreams")
    @classmethod
    def _has_upstream(cls, upstreams: Mapping[str, UpstreamSettings]) -> Mapping[str, UpstreamSettings]:
        if not upstreams:
            raise wrong(
                "is empty",
                fix="add an upstream, as in main: {base_url: https://api.openai.com/v1}, or remove the line",
                shows=False,
            )
        return upstreams


class WrittenSettings(_SettingsFields):
    """Configuration of compaction-proxy."""

    include: tuple[Text, ...] = ()
    """More files with policies and teams, relative to this one. *, ?, and ** work as in file names."""
    policies: Mapping[Name, WrittenPolicy] = Field(default_factory=dict)
    """How to compact conversations, by name. `default` applies to callers without a team."""


class Settings(_SettingsFields):
    """A configuration in force: every policy is complete."""

    policies: Mapping[str, Policy] = Field(default_factory=lambda: {"default": Policy.build("default", {})})
    """Policies by name. `default` always exists."""

    @field_validator("policies")
    @classmethod
    def _has_default(cls, policies: Mapping[str, Policy]) -> Mapping[str, Policy]:
        return policies if "default" in policies else {"default": Policy.build("default", {}), **policies}

    def listening(self, host: str | None) -> Settings:
        """Return the settings with the address from the command line, if there is one.

        Defaults for callers without a key depend on it.
        """
        if host is None:
            return self
        return self.model_copy(update={"server": self.server.model_copy(update={"host": host})})

    @property
    def record_seconds(self) -> float:
        """Return the seconds to keep the record of a request, 0 for none."""
        return 0.0 if self.records is None else self.records.days * DAY

    @property
    def record_count(self) -> int:
        return 0 if self.records is None else self.records.max

    @cached_property
    def model_names(self) -> frozenset[str]:
        """Return the models that the configuration names, without globs, by the upstreams' names."""
        named = [route.model or route.match for route in self.models]
        for policy in self.policies.values():
            named += policy.summary.models
        return frozenset(name for name in named if not any(mark in name for mark in "*?["))

    def route(self, model: str) -> Route | None:
        """Return the route of a model, or ``None`` if the configuration lists routes and none matches."""
        if not self.models:
            return Route(next(iter(self.upstreams)), model, None)
        for route in self.models:
            if fnmatchcase(model, route.match):
                return Route(route.upstream, route.model or model, route.profile)
        return None
