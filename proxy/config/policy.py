"""The section `policies`: how the proxy compacts conversations.

Names and meanings come from LangChain's ``SummarizationMiddleware`` and of DeepAgents. Sizes are in tokens unless a
field says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator

from proxy.compaction.triggers import KEEP, TRIGGER, Clause, Trigger
from proxy.config.fields import (
    CountOrZero,
    Days,
    KeepField,
    Name,
    ReserveField,
    Section,
    Text,
    TriggerField,
    lowest,
    off_for_false,
    wrong,
)
from proxy.config.patterns import SearchedPattern
from proxy.config.sections import EngineSection, PolicySection, names, sections, with_sections

S = TypeVar("S")
P = TypeVar("P", bound="PolicyFields")

PREPARE_FRACTION = 0.75


class ArchiveSettings(Section):
    """Store the originals of removed content, for the caller who sent them."""

    main: ClassVar[str | None] = "days"

    days: Days = 30
    """Days to store the originals, at most 36,500."""


ARCHIVE = PolicySection(
    "archive", ArchiveSettings, "Store the originals of removed content; null turns this off.", nullable=True
)


class UnknownModelSettings(Section):
    """Conditions for models whose context window is unknown, so fractions have no meaning."""

    trigger: TriggerField = (Clause(tokens=170_000),)
    """When to compact, in tokens or messages."""
    keep: KeepField = Clause(messages=6)
    """Minimum recent conversation to keep, in tokens or messages."""

    @field_validator("trigger")
    @classmethod
    def _absolute_trigger(cls, trigger: Trigger) -> Trigger:
        if any(clause.fraction is not None for clause in trigger):
            raise wrong(
                "must not hold a fraction, because the window is unknown", fix="SETTING: {tokens: 170000}", shows=False
            )
        return trigger

    @field_validator("keep")
    @classmethod
    def _absolute_keep(cls, keep: Clause) -> Clause:
        if keep.fraction is not None:
            raise wrong(
                "must not be a fraction, because the window is unknown", fix="SETTING: {messages: 6}", shows=False
            )
        return keep


UNKNOWN_MODEL = PolicySection(
    "unknown_model", UnknownModelSettings, "Conditions for models whose context window is unknown."
)


class PolicyFields(Section):
    """The settings that a policy and its overrides have in common, without the sections of features."""

    mode: Annotated[Literal["enforce", "shadow", "off"], BeforeValidator(off_for_false)] = "enforce"
    """enforce: compact. shadow: measure and report, change nothing. off: do neither."""
    allow_header: bool = True
    """Obey the request header `x-compaction: off | shadow`."""
    trigger: TriggerField = TRIGGER
    """When to compact."""
    keep: KeepField = KEEP
    """Minimum recent conversation to keep."""
    prepare: TriggerField = (Clause(fraction=PREPARE_FRACTION),)
    """When to start the summary in the background. Default: at fraction 0.75 if the trigger is a larger fraction, at
    15/17 of a smaller one, and never for other triggers."""
    reserve_output: ReserveField = None
    """Tokens, or {fraction: F} of the window, to reserve for an answer if the request doesn't set a maximum. Default:
    automatic."""
    output: Literal["clamp", "keep"] = "clamp"
    """How to handle an output (`max_tokens`) that doesn't fit next to the conversation. clamp: lower it. keep: compact
    the conversation until it fits."""
    shorten_last_user_message: bool = False
    """As a last resort, cut the middle of the last user message to make a request fit."""
    overflow_retries: Annotated[CountOrZero, Field(le=5)] = 2
    """How often to compact a request harder and retry it if the upstream rejects it as too long."""
    rate_limit_as_limit: bool = True
    """Compact and retry a request that alone exceeds a limit on tokens per minute. Waiting never helps such a
    request."""
    self_compacting: Literal["late", "usual"] = "late"
    """When to compact for clients that compact their own conversations (Claude Code, codex). late: only if the request
    wouldn't fit. usual: at the policy's trigger."""
    repair: bool = True
    """Repair damaged histories when the proxy compacts a request."""
    pinned: tuple[SearchedPattern, ...] = ()
    """Regular expressions. The proxy never changes or summarizes messages that contain a match."""

    def section(self, kind: type[S]) -> S:
        """Return a section by its class. Raises ``LookupError`` if the policy turns it off."""
        found = self.optional(kind)
        if found is None:
            raise LookupError(f"the policy has no section '{names()[kind]}'")
        return found

    def optional(self, kind: type[S]) -> S | None:
        """Return a section by its class; ``None`` if the policy turns it off."""
        found: Any = getattr(self, names()[kind])
        value: Any = found.value if isinstance(found, EngineSection) else found
        return None if value is None else cast(S, value)


class ModelOverride(PolicyFields):
    """Override settings of a policy for some models."""

    match: Text
    """The model in the request. *, ?, and [seq] work as in file names. Case-sensitive."""


class WrittenPolicy(PolicyFields):
    """A policy as written in the file. Omitted settings come from the policy it extends, or are the defaults."""

    extends: Name | None = None
    """The policy that provides the settings that this one omits."""
    models: tuple[ModelOverride, ...] = ()
    """Overrides for some models; the first match wins. Overrides of the extended policy come after its own."""


_APART: dict[str, Any] = dict.fromkeys(
    ("name", "models", "mode", "allow_header", "overflow_retries", "rate_limit_as_limit", "output"), True
)
"""The settings that don't affect checkpoints and summaries."""


@cache
def _apart() -> dict[str, Any]:
    found = ((section.name, section.apart) for section in sections() if section.apart)
    return {**_APART, **{name: True if apart is True else set(apart) for name, apart in found}}


class ForModels(Section):
    """The policy in force for models that a glob matches."""

    match: str
    """The glob, in the syntax of ``fnmatchcase``."""
    policy: SerializeAsAny[Policy]
    """The complete policy for these models."""


class Policy(PolicyFields):
    """A policy in force: complete, immutable, hashable. ``build`` makes one with the sections of all features."""

    name: str = "default"
    """The name in the file."""
    models: tuple[ForModels, ...] = ()
    """Policies that replace this one for some models; the first match wins."""

    @classmethod
    def build(cls, name: str, stated: Mapping[str, Any]) -> Self:
        """Return the complete policy from the settings that it and its parents state.

        Derive the omitted triggers and keeps of the stages, and an omitted ``prepare``.

        Raises ``pydantic.ValidationError``.
        """
        policy: Self = complete(cls).model_validate({**stated, "name": name})
        derived: dict[str, Any] = {}
        for stage in stages():
            section = getattr(policy, stage)
            if section is not None:
                own = {key: getattr(policy, key) for key in ("trigger", "keep") if key not in section.model_fields_set}
                derived[stage] = section.model_copy(update=own)
        if "prepare" not in policy.model_fields_set or not policy.trigger:
            derived["prepare"] = _prepare_before(policy.trigger)
        return policy.model_copy(update=derived)

    def for_model(self, name: str) -> Policy:
        """Return the policy for a model in a request. Case-sensitive."""
        return next((own.policy for own in self.models if fnmatchcase(name, own.match)), self)

    @property
    def named_models(self) -> list[str]:
        """Return the models that sections name, for example for summaries."""
        found = ((section, self.optional(section.kind)) for section in sections())
        return [name for section, value in found if value is not None for name in section.models(value) if name]

    def __hash__(self) -> int:
        return hash((self.name, self.mode, self.allow_header, self.fingerprint))

    @cached_property
    def unarchived(self) -> Policy:
        """Return this policy without an archive."""
        policy = self.model_copy(update={"archive": None})
        for name in ("fingerprint", "unarchived"):
            policy.__dict__.pop(name, None)  # the copy has the cached values of the original
        return policy

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of the settings that affect checkpoints and summaries."""
        fields = self.model_dump(mode="json", exclude=_apart())
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@cache
def complete(model: type[P]) -> type[P]:
    """Return a model of policies with the sections of all features."""
    return with_sections(model)


@cache
def stages() -> tuple[str, ...]:
    """Return the sections with their own `trigger` and `keep`. The policy's are the defaults."""
    return tuple(section.name for section in sections() if section.is_stage)


@cache
def written_policy() -> type[WrittenPolicy]:
    """Return the model of a policy in a file, with the sections of all features."""
    override: Any = complete(ModelOverride)
    return with_sections(WrittenPolicy, models=(tuple[override, ...], WrittenPolicy.model_fields["models"]))


def _prepare_before(trigger: Trigger) -> Trigger:
    """Return the default of ``prepare`` for a trigger.

    Fractions have a default, and the lowest one decides. Smaller triggers use the ratio 0.75 : 0.85, too. So does the
    price step: in this place it stands for fewer tokens.
    """
    least = lowest(trigger, "fraction")
    step = tuple(clause for clause in trigger if clause == Clause(price_step=True))
    if least is None:
        return step
    return (
        *step,
        Clause(fraction=PREPARE_FRACTION if least > PREPARE_FRACTION else round(least * 15 / 17, 4)),
    )
