"""The sections `auth`, `admin`, and `teams`: which callers the proxy serves, and their policy and limits."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from proxy.config.fields import Amount, Count, CountOrZero, Date, Name, Section, Text, wrong


class AuthSettings(Section):
    """Which callers the proxy accepts."""

    main: ClassVar[str | None] = "mode"

    mode: Literal["open", "keys"] = "open"
    """open: accept all callers and forward their own keys. keys: accept only callers with a key listed under a team."""
    keyless: Literal["shared", "separate"] | None = None
    """How to treat callers without a key in open mode. shared: as one caller. separate: store nothing and use digests
    instead of summaries. Default: shared if the server listens only on loopback, else separate."""


SHOWN = 12  # hex digits of a key's hash that commands and records show

_KEY_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def _key_hash(value: str) -> str:
    if not _KEY_HASH.fullmatch(value.lower()):
        raise wrong(
            "must be the hash of a key, sha256: and 64 hex digits, not the key",
            fix='hash the key with: printf %s "$KEY" | sha256sum',
        )
    return value.lower()


KeyHash = Annotated[str, AfterValidator(_key_hash), Field(json_schema_extra={"pattern": "^sha256:[0-9a-fA-F]{64}$"})]
"""The SHA-256 of a key."""


class KeySettings(Section):
    """A key of a team or an administrator, identified by its hash. Also accepts the hash alone."""

    hash: KeyHash
    """The SHA-256 of the key, as `keys new` or `printf %s "$KEY" | sha256sum` prints it."""
    expires: Date | None = None
    """The first day (UTC) on which the proxy rejects the key, such as 2027-01-31. Default: never."""
    name: Text | None = None
    """The key's name in records and reports. Default: the start of its hash."""

    @model_validator(mode="before")
    @classmethod
    def _hash_alone(cls, value: object) -> object:
        return {"hash": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = handler.resolve_ref_schema(handler(schema))
        described = {"title": section.pop("title"), "description": section.pop("description")}
        return {**described, "anyOf": [section["properties"]["hash"], section]}

    @property
    def shown(self) -> str:
        return self.name or self.hash.removeprefix("sha256:")[:SHOWN]

    @property
    def ends(self) -> float:
        """Return when the key expires, in seconds since 1970, or infinity."""
        if self.expires is None:
            return math.inf
        return datetime(self.expires.year, self.expires.month, self.expires.day, tzinfo=UTC).timestamp()


class AdminKeySettings(KeySettings):
    """A key of an administrator, identified by its hash. Also accepts the hash alone."""

    content: bool = True
    """Lets the key read how compaction changed the messages of a request, as stored in the archive."""


class SpendSettings(Section):
    """A budget, in money or in tokens."""

    usd: Amount | None = None
    """US dollars for requests and summaries. Needs the models' prices; a model without one costs nothing."""
    tokens: Count | None = None
    """Tokens of requests, answers, and summaries, as the upstreams report them."""
    per: Literal["day", "month"]
    """The period (UTC) after which the budget starts again."""

    @model_validator(mode="after")
    def _has_one_amount(self) -> SpendSettings:
        if (self.usd is None) == (self.tokens is None):
            raise wrong("needs either usd or tokens", fix="spend: {usd: 50, per: day}")
        return self


class AdminSettings(Section):
    """Keys of administrators. They work only on paths under /compaction, and see the records of all teams."""

    keys: tuple[AdminKeySettings, ...] = ()
    """The keys. List two while you rotate keys."""


class LimitSettings(Section):
    """Limits of a team. Default of each: no limit."""

    main: ClassVar[str | None] = "requests_per_minute"

    requests_per_minute: Count | None = None
    """Requests per minute on all paths, also the maximum burst, refilled evenly. Further requests get 429."""
    concurrent: Count | None = None
    """Maximum concurrent requests. A stream counts until it ends. As many again wait for up to a second."""
    summary_tokens_per_day: CountOrZero | None = None
    """Maximum tokens for summaries per day (UTC), prompts and answers. Then digests; with 0 always."""
    spend: SpendSettings | None = None
    """The team's budget. Further requests get 402, or 429 while reservations of running requests hold the rest."""


class SharedLimitSettings(Section):
    """Limits of teams that replicas count together, with a store on Redis."""

    on_store_failure: Literal["local", "refuse"] = "local"
    """While the store fails or is slow. local: each process counts alone. refuse: teams with a limit get 503."""


class TeamSettings(Section):
    """Callers that share a policy."""

    keys: tuple[KeySettings, ...] = ()
    """The team's keys. List two while you rotate keys."""
    limits: LimitSettings | None = None
    """Limits of the team. Default: no limits."""
    policy: Name = "default"
    """The name of the team's policy."""
    models: tuple[Text, ...] | None = None
    """The models that the team may use, also for summaries, as globs. An empty list allows none. Default: all."""
    paths: Literal["all", "models", "chat"] | None = None
    """The paths that the team may use. all: every path under /v1. models: paths that name a model, and the list of
    models. chat: chat completions and the list of models. Default: models if the team has a list of models, else
    all."""

    @model_validator(mode="after")
    def _lists_hold(self) -> TeamSettings:
        if self.models is not None and self.paths == "all":
            raise wrong("can't be all for a team with models: other paths name no model", "paths", fix="paths: models")
        return self
