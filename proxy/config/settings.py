"""The whole configuration, as written and in force."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from pydantic import Field, field_validator

from proxy.config.fields import Name, Section, Text, wrong
from proxy.config.models import ProfileSettings, Route, RouteSettings
from proxy.config.policy import Policy, WrittenPolicy
from proxy.config.server import ServerSettings
from proxy.config.store import EncryptionSettings, StoreSettings, default_store_url
from proxy.config.teams import AuthSettings, KeySettings, LimitSettings, TeamSettings
from proxy.config.upstreams import UpstreamSettings, default_upstreams

__all__ = [
    "AuthSettings",
    "EncryptionSettings",
    "KeySettings",
    "LimitSettings",
    "Policy",
    "ProfileSettings",
    "Route",
    "RouteSettings",
    "ServerSettings",
    "Settings",
    "StoreSettings",
    "TeamSettings",
    "UpstreamSettings",
    "WrittenSettings",
    "default_store_url",
]


class _SettingsFields(Section):
    server: ServerSettings = ServerSettings()
    """Where to listen, and how much to take."""
    store: StoreSettings = Field(default_factory=StoreSettings)
    """Where summaries and the archive are kept."""
    auth: AuthSettings = AuthSettings()
    """Who may call."""
    upstreams: Mapping[Name, UpstreamSettings] = Field(default_factory=default_upstreams)
    """The services that answer, by name. Left out: OpenAI, and Anthropic for requests in its format, each with the
    caller's own key."""
    models: tuple[RouteSettings, ...] = ()
    """Which models go where; the first match wins. Left out: every model goes to the first upstream."""
    teams: Mapping[Name, TeamSettings] = Field(default_factory=dict)
    """Callers who share a policy, by name."""

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
    """Further files, relative to this one, with policies and teams; *, ? and ** as in file names."""
    policies: Mapping[Name, WrittenPolicy] = Field(default_factory=dict)
    """What is done to conversations, by name. `default` applies to callers without a team."""


class Settings(_SettingsFields):
    """A configuration in force: every policy is complete."""

    policies: Mapping[str, Policy] = Field(default_factory=lambda: {"default": Policy()})
    """By name; `default` is always there."""

    @field_validator("policies")
    @classmethod
    def _has_default(cls, policies: Mapping[str, Policy]) -> Mapping[str, Policy]:
        return policies if "default" in policies else {"default": Policy(), **policies}

    def route(self, model: str) -> Route | None:
        """Where a model goes; ``None`` where routes are listed and none matches."""
        if not self.models:
            return Route(next(iter(self.upstreams)), model, None)
        for route in self.models:
            if fnmatchcase(model, route.match):
                return Route(route.upstream, route.model or model, route.profile)
        return None
