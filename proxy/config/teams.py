"""The sections `auth` and `teams`: which callers the proxy serves, and their policy and limits."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from proxy.config.fields import Count, CountOrZero, Date, Name, Section, Text, wrong


class AuthSettings(Section):
    """Who may call."""

    mode: Literal["open", "keys"] = "open"
    """open: anybody, with their own key, which is passed on. keys: only callers with a key listed under a team."""
    keyless: Literal["shared", "separate"] | None = None
    """Callers without any key, in open mode. shared: they are one caller; separate: nothing of theirs is stored, and
    digests take the place of summaries. Left out: shared where the server listens on loopback alone."""


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
    """A key of a team, known by its hash. The hash alone may stand in its place."""

    hash: KeyHash
    """The SHA-256 of the key: `printf %s "$KEY" | sha256sum`, or as `keys new` prints it."""
    expires: Date | None = None
    """The day from whose beginning (UTC) the key is refused. Left out: never."""
    name: Text | None = None
    """What the key is for; for whoever reads the file."""

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
    def ends(self) -> float:
        """When it expires, in seconds since 1970; infinite where it never does."""
        if self.expires is None:
            return math.inf
        return datetime(self.expires.year, self.expires.month, self.expires.day, tzinfo=UTC).timestamp()


class LimitSettings(Section):
    """What a team may use. What is left out is not limited."""

    requests_per_minute: Count | None = None
    """Requests per minute, on all paths together; so many may come at once."""
    concurrent: Count | None = None
    """Requests in work at the same time, streams until their end."""
    summary_tokens_per_day: CountOrZero | None = None
    """Tokens that summaries may cost in a day (UTC), prompts and answers; then digests take their place."""


class TeamSettings(Section):
    """Callers who share a policy."""

    keys: tuple[KeySettings, ...] = ()
    """The keys that the team calls with; several for a change of keys."""
    limits: LimitSettings | None = None
    """What the team may use. Left out: no limits."""
    policy: Name = "default"
    """The name of the policy."""
    models: tuple[Text, ...] | None = None
    """The models it may use, as globs. Left out: all of them; an empty list: none."""
    paths: Literal["all", "models", "chat"] | None = None
    """The paths it may use. all: every path under /v1; models: those that name a model, and the list of models; chat:
    chat completions and the list of models. Left out: models if the team has a list of models, else all."""

    @model_validator(mode="after")
    def _lists_hold(self) -> TeamSettings:
        if self.models is not None and self.paths == "all":
            raise wrong("can't be all for a team with models: other paths name no model", "paths", fix="paths: models")
        return self
