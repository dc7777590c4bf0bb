"""What a team wants done to its conversations.

Names and meanings are those of LangChain's ``SummarizationMiddleware`` and of DeepAgents. Sizes are in tokens unless
a field says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

from proxy.compaction.conditions import Clause, Trigger
from proxy.config.fields import (
    Count,
    CountOrZero,
    KeepField,
    Name,
    Pattern,
    ReserveField,
    SearchedPattern,
    Seconds,
    Section,
    Text,
    TriggerField,
    wrong,
)

TRIGGER = (Clause(fraction=0.85),)
KEEP = Clause(fraction=0.10)
PREPARE_FRACTION = 0.75

WRITING_TOOLS = (
    "write_file",
    "edit_file",
    "write",
    "edit",
    "create_file",
    "multi_edit",
    "str_replace_editor",
    "str_replace_based_edit_tool",
    "apply_patch",
    "Write",
    "Edit",
    "MultiEdit",
    "NotebookEdit",
)
"""Tools of well-known agents whose arguments carry whole files."""

LISTING_TOOLS = ("ls", "glob", "grep", "write_todos")
"""Tools whose results DeepAgents never evicts."""


STAGES = ("duplicates", "truncate_args", "evict_results", "media")
"""The sections of a policy that have a trigger and a keep of their own, or else the policy's."""


class Summary(Section):
    """The call that makes a summary."""

    model: Text | None = None
    """The model that summarises, by a name that `models` routes. Left out: the model of the conversation itself."""
    fallback_model: Text | None = None
    """Tried once where the first one fails. Left out: none."""
    prompt: Text | None = None
    """The instruction to the model, with `{messages}` where the conversation goes. Left out: the built-in one."""
    trim_tokens_to_summarize: Count | None = None
    """Summarise only this many of the newest tokens. Left out: everything, in chunks that fit the model."""
    max_tokens: Count = 4000
    """The most that a summary may take."""
    timeout: Seconds = 45
    """Seconds that one model has for a summary, all its chunks together; then the fallback, then a digest."""
    role: Literal["user", "assistant", "system", "developer"] = "user"
    """The role of the message that stands for the summarised part."""
    redact_secrets: bool = False
    """Whether what looks like a key, a token or a password is blacked out in what the summary model reads."""
    redact: tuple[Pattern, ...] = ()
    """Further expressions to black out there."""

    @field_validator("prompt")
    @classmethod
    def _has_place_for_messages(cls, prompt: str | None) -> str | None:
        if prompt is not None and "{messages}" not in prompt:
            raise wrong(
                "must hold {messages}, the place of the conversation",
                fix="add a line {messages} to the prompt",
                shows=False,
            )
        return prompt


class Duplicates(Section):
    """Older exact copies of a tool result become a reference to the newest one."""

    trigger: TriggerField = TRIGGER
    """When. Left out: the policy's own trigger."""
    keep: KeepField = KEEP
    """How much recent conversation is spared. Left out: the policy's own keep."""
    min_length: Count = 200
    """Characters from which a result is looked at."""


class Media(Section):
    """Old images, audio and files become a label. The user's newest message keeps its own."""

    trigger: TriggerField = TRIGGER
    """When. Left out: the policy's own trigger."""
    keep: KeepField = KEEP
    """How much recent conversation is spared. Left out: the policy's own keep."""


class TruncateArgs(Section):
    """Long strings in the arguments of old tool calls are cut; the JSON keeps its shape."""

    trigger: TriggerField = TRIGGER
    """When. Left out: the policy's own trigger."""
    keep: KeepField = KEEP
    """How much recent conversation is spared. Left out: the policy's own keep."""
    max_length: Count = 2000
    """Characters from which a string is cut."""
    truncation_text: Text | None = None
    """What stands where text was cut; {characters} in it becomes their number, {id} where the whole is kept. Left out:
    a note that says so, and that it is no part of the value."""
    tools: tuple[Text, ...] = WRITING_TOOLS
    """The tools whose arguments are cut; "*" for all of them."""


class EvictResults(Section):
    """Large old tool results are replaced by their beginning and end."""

    trigger: TriggerField = TRIGGER
    """When. Left out: the policy's own trigger."""
    keep: KeepField = KEEP
    """How much recent conversation is spared. Left out: the policy's own keep."""
    max_tokens: Count = 2000
    """Tokens from which a result is shortened."""
    max_tokens_per_tool: Mapping[Text, Count] = Field(default_factory=dict)
    """The same for single tools, by name."""
    exclude: tuple[Text, ...] = LISTING_TOOLS
    """The tools whose results are never touched."""


class UserMessages(Section):
    """The user's own words, which stay verbatim beside a summary."""

    max_tokens: Count = 20_000
    """Newest first, after the first one."""
    keep_first: bool = True
    """Whether the user's first message stays, whatever came after it."""


class Index(Section):
    """The list of paths, URLs and ids that a summary replaces."""

    max_tokens: Count = 2000
    """The most that the list may take."""


class Archive(Section):
    """What is taken out of a conversation is kept whole, for whoever sent it."""

    days: Count = 30
    """How long."""


class UnknownModel(Section):
    """What applies where nobody knows the model's window, so that fractions mean nothing."""

    trigger: TriggerField = (Clause(tokens=170_000),)
    """When to compact; tokens or messages."""
    keep: KeepField = Clause(messages=6)
    """How much recent conversation stays; tokens or messages."""

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


def _off(value: object) -> object:
    """A plain ``off`` is YAML 1.1's false, and here can only be the mode of that name."""
    return "off" if value is False else value


class _PolicyFields(Section):
    mode: Annotated[Literal["enforce", "shadow", "off"], BeforeValidator(_off)] = "enforce"
    """enforce; shadow: measure and report, change nothing; off."""
    allow_header: bool = True
    """Whether the request header `x-compaction: off | shadow` is obeyed."""
    trigger: TriggerField = TRIGGER
    """When to compact."""
    keep: KeepField = KEEP
    """How much recent conversation stays at least."""
    prepare: TriggerField = (Clause(fraction=PREPARE_FRACTION),)
    """When to begin making the summary in the background. Left out: 0.75 where the trigger is a larger fraction,
    15/17 of a smaller one, and never for other triggers."""
    reserve_output: ReserveField = None
    """Room for the answer where a request names none: tokens, or {fraction: F} of the window. Left out: automatic."""
    output: Literal["clamp", "keep"] = "clamp"
    """What becomes of an output (`max_tokens`) that does not fit beside the conversation: clamp lowers it, keep has the
    conversation compacted until it fits."""
    shorten_last_user_message: bool = False
    """Whether, as the last resort, the middle of the last user message may be left out to make a request fit."""
    overflow_retries: Annotated[CountOrZero, Field(le=5)] = 2
    """How often a request that the upstream refuses as too long is compacted harder and sent again."""
    rate_limit_as_limit: bool = True
    """Whether to compact a request that alone exceeds a limit on tokens per minute, and send it again. Waiting never
    helps such a request."""
    repair: bool = True
    """Whether damaged histories are put right where a request is compacted."""
    pinned: tuple[SearchedPattern, ...] = ()
    """Messages in which one of these expressions is found are never changed nor summarised."""
    summary: Summary = Summary()
    """The call that makes a summary."""
    duplicates: Duplicates | None = Duplicates()
    """Copies of tool results; null to leave them alone."""
    truncate_args: TruncateArgs | None = TruncateArgs()
    """Arguments of old tool calls; null to leave them alone."""
    evict_results: EvictResults | None = EvictResults()
    """Old tool results; null to leave them alone."""
    media: Media | None = Media()
    """Old images, audio and files; null to leave them alone."""
    archive: Archive | None = Archive()
    """The originals of what is taken out; null to keep none."""
    user_messages: UserMessages = UserMessages()
    """The user's own words."""
    index: Index = Index()
    """Paths, URLs and ids."""
    unknown_model: UnknownModel = UnknownModel()
    """Where the model's window is unknown."""


class ModelOverride(_PolicyFields):
    """What is different for some models: any setting of a policy. The rest is as the policy has it."""

    match: Text
    """The model that a request names; *, ? and [seq] as in file names; case matters."""


class WrittenPolicy(_PolicyFields):
    """A policy as the file states it. What it leaves out comes from the policy it extends, or is the default."""

    extends: Name | None = None
    """The policy whose settings are taken where this one states none."""
    models: tuple[ModelOverride, ...] = ()
    """What is different for some models; the first match wins. Those of the policy it extends come after its own."""


_NOT_OF_SUMMARIES = {"name", "models", "mode", "allow_header", "overflow_retries", "rate_limit_as_limit", "output"}


class ForModels(Section):
    """What is in force in place of a policy, for the models that a glob matches."""

    match: str
    """The glob."""
    policy: Policy
    """The whole policy."""


class Policy(_PolicyFields):
    """A policy in force: complete, immutable, hashable."""

    name: str = "default"
    """The name in the file."""
    models: tuple[ForModels, ...] = ()
    """What is in force in its place for some models; the first match wins."""

    @classmethod
    def build(cls, name: str, stated: Mapping[str, Any]) -> Self:
        """The policy of all that was stated (by it and by its parents), completed with what follows from that.

        Raises ``pydantic.ValidationError``.
        """
        policy = cls.model_validate({**stated, "name": name})
        derived: dict[str, Any] = {}
        for stage in STAGES:
            section = getattr(policy, stage)
            if section is not None:
                own = {key: getattr(policy, key) for key in ("trigger", "keep") if key not in section.model_fields_set}
                derived[stage] = section.model_copy(update=own)
        if "prepare" not in policy.model_fields_set or not policy.trigger:
            derived["prepare"] = _prepare_before(policy.trigger)
        return policy.model_copy(update=derived)

    def for_model(self, name: str) -> Policy:
        """What is in force for a model, by the name that the request gives. Case matters."""
        return next((own.policy for own in self.models if fnmatchcase(name, own.match)), self)

    def __hash__(self) -> int:
        return hash((self.name, self.mode, self.allow_header, self.fingerprint))

    @cached_property
    def unarchived(self) -> Policy:
        """The same without an archive."""
        policy = self.model_copy(update={"archive": None})
        for name in ("fingerprint", "unarchived"):
            policy.__dict__.pop(name, None)  # a copy has what was made of the original
        return policy

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what affects checkpoints and summaries, a few fields apart."""
        fields = self.model_dump(mode="json", exclude=_NOT_OF_SUMMARIES)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _prepare_before(trigger: Trigger) -> Trigger:
    """When to prepare for a trigger, where the policy does not say.

    Only fractions have a default: the lowest one decides. 0.75 : 0.85 is also the ratio below smaller triggers.
    """
    fractions = [
        clause.fraction
        for clause in trigger
        if clause.fraction is not None and clause.tokens is None and clause.messages is None
    ]
    if not fractions:
        return ()
    lowest = min(fractions)
    if lowest > PREPARE_FRACTION:
        return (Clause(fraction=PREPARE_FRACTION),)
    return (Clause(fraction=round(lowest * 15 / 17, 4)),)
