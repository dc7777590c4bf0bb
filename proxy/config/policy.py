"""The section `policies`: how the proxy compacts conversations.

Names and meanings come from LangChain's ``SummarizationMiddleware`` and of DeepAgents. Sizes are in tokens unless a
field says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

from proxy.compaction.named_files import WRITING_TOOLS
from proxy.compaction.triggers import Clause, Trigger
from proxy.config.fields import (
    Count,
    CountOrZero,
    Days,
    KeepField,
    Name,
    Pattern,
    ReserveField,
    SearchedPattern,
    Seconds,
    Section,
    Text,
    TriggerField,
    lowest,
    wrong,
)

TRIGGER = (Clause(fraction=0.85),)
KEEP = Clause(fraction=0.10)
PREPARE_FRACTION = 0.75

LISTING_TOOLS = ("ls", "glob", "grep", "write_todos")
"""Tools whose results DeepAgents never evicts."""


STAGES = ("duplicates", "truncate_args", "evict_results", "media")
"""The sections of a policy with their own `trigger` and `keep`. The policy's are the defaults."""


class Summary(Section):
    """The call to the summary model."""

    method: Literal["transcript", "continue", "auto"] = "transcript"
    """transcript: send the messages as text. continue: send the conversation's own model its last prompt and a request
    for notes. auto: continue if the prompt cache serves the conversation."""
    native: bool = False
    """Ask the conversation's own provider to compact, if it can. The other settings apply if it doesn't."""
    model: Text | None = None
    """The model that writes summaries: a name that `models` routes. Default: the conversation's own model."""
    fallback_model: Text | None = None
    """The model to try once if the first one fails. Default: none."""
    prompt: Text | None = None
    """The instruction to the model. The conversation replaces `{messages}`. Default: the built-in instruction."""
    trim_tokens_to_summarize: Count | None = None
    """Summarize only this many of the newest tokens. Default: everything, in chunks that fit the model."""
    max_tokens: Count = 4000
    """Maximum tokens of a summary."""
    timeout: Seconds = 45
    """Seconds that one model has for a summary, all chunks together. Then the fallback, then a digest."""
    role: Literal["user", "assistant", "system", "developer"] = "user"
    """The role of the message that contains the summary."""
    redact_secrets: bool = False
    """Remove keys, tokens, and passwords from the text that the summary model receives."""
    redact: tuple[Pattern, ...] = ()
    """Regular expressions for more text to remove."""

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


class _Stage(Section):
    trigger: TriggerField = TRIGGER
    """When this stage runs. Default: the policy's trigger."""
    keep: KeepField = KEEP
    """How much recent conversation this stage doesn't change. Default: the policy's keep."""


class Duplicates(_Stage):
    """Replace older exact copies of a tool result with a reference to the newest one."""

    min_length: Count = 200
    """Minimum characters of a result to compare."""


class Media(_Stage):
    """Replace old images, audio, and files with labels. The user's newest message doesn't change."""


class TruncateArgs(_Stage):
    """Cut long strings in the arguments of old tool calls. The JSON keeps its structure."""

    max_length: Count = 2000
    """Maximum characters of a string."""
    truncation_text: Text | None = None
    """The note that replaces the cut text. {characters} becomes the number of characters, {id} the archive's id of the
    original. Default: a note that says that it isn't part of the value."""
    tools: tuple[Text, ...] = WRITING_TOOLS
    """The tools whose arguments may be cut; "*" for all tools."""


class EvictResults(_Stage):
    """Shorten large old tool results to their beginning and end."""

    max_tokens: Count = 2000
    """Maximum tokens of a result."""
    max_tokens_per_tool: Mapping[Text, Count] = Field(default_factory=dict)
    """Maximum tokens of a result for single tools, by name."""
    exclude: tuple[Text, ...] = LISTING_TOOLS
    """Tools whose results this stage doesn't change."""


class UserMessages(Section):
    """The user's earlier messages, which stay verbatim next to a summary."""

    max_tokens: Count = 20_000
    """Maximum tokens of these messages: the first one, then the newest."""
    keep_first: bool = True
    """Always keep the user's first message."""


class Index(Section):
    """The list of paths, URLs, and ids from the summarized messages."""

    max_tokens: Count = 2000
    """Maximum tokens of the list."""


class Archive(Section):
    """Store the originals of removed content, for the caller who sent them."""

    days: Days = 30
    """Days to store the originals, at most 36,500."""


def _off(value: object) -> object:
    """Return "off" for false, because YAML 1.1 reads a plain ``off`` as false."""
    return "off" if value is False else value


class Recall(Section):
    """Let the model read archived messages through a tool that the client never sees."""

    tool: Annotated[Literal["off", "auto"], BeforeValidator(_off)] = "off"
    """off: no tool. auto: add the tool to compacted requests whose model may choose among tools."""
    max_rounds: Annotated[Count, Field(le=10)] = 3
    """How often the model may read archived messages during one response."""
    max_tokens: Count = 4000
    """Maximum tokens of what one call returns."""


class Responses(Section):
    """Settings for `/v1/responses`."""

    state: Annotated[Literal["recover", "compact", "off"], BeforeValidator(_off)] = "recover"
    """When the upstream compacts a history that it keeps (`previous_response_id`). recover: after an overflow. compact:
    also when the conversation reaches the trigger. off: never."""


class UnknownModel(Section):
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


class _PolicyFields(Section):
    mode: Annotated[Literal["enforce", "shadow", "off"], BeforeValidator(_off)] = "enforce"
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
    responses: Responses = Responses()
    """Settings for `/v1/responses`."""
    repair: bool = True
    """Repair damaged histories when the proxy compacts a request."""
    pinned: tuple[SearchedPattern, ...] = ()
    """Regular expressions. The proxy never changes or summarizes messages that contain a match."""
    summary: Summary = Summary()
    """The call to the summary model."""
    duplicates: Duplicates | None = Duplicates()
    """Replace copies of tool results; null turns this off."""
    truncate_args: TruncateArgs | None = TruncateArgs()
    """Cut arguments of old tool calls; null turns this off."""
    evict_results: EvictResults | None = EvictResults()
    """Shorten old tool results; null turns this off."""
    media: Media | None = Media()
    """Replace old images, audio, and files; null turns this off."""
    archive: Archive | None = Archive()
    """Store the originals of removed content; null turns this off."""
    recall: Recall = Recall()
    """Let the model read archived messages."""
    user_messages: UserMessages = UserMessages()
    """The user's earlier messages, which stay verbatim next to a summary."""
    index: Index = Index()
    """The list of paths, URLs, and ids from the summarized messages."""
    unknown_model: UnknownModel = UnknownModel()
    """Conditions for models whose context window is unknown."""


class ModelOverride(_PolicyFields):
    """Override settings of a policy for some models."""

    match: Text
    """The model in the request. *, ?, and [seq] work as in file names. Case-sensitive."""


class WrittenPolicy(_PolicyFields):
    """A policy as written in the file. Omitted settings come from the policy it extends, or are the defaults."""

    extends: Name | None = None
    """The policy that provides the settings that this one omits."""
    models: tuple[ModelOverride, ...] = ()
    """Overrides for some models; the first match wins. Overrides of the extended policy come after its own."""


_NOT_OF_SUMMARIES: dict[str, Any] = dict.fromkeys(
    (
        "name",
        "models",
        "mode",
        "allow_header",
        "overflow_retries",
        "rate_limit_as_limit",
        "output",
        "recall",
        "responses",
    ),
    True,
)
_NOT_OF_SUMMARIES["summary"] = {"method", "native"}


class ForModels(Section):
    """The policy in force for models that a glob matches."""

    match: str
    """The glob, in the syntax of ``fnmatchcase``."""
    policy: Policy
    """The complete policy for these models."""


class Policy(_PolicyFields):
    """A policy in force: complete, immutable, hashable."""

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
        """Return the policy for a model in a request. Case-sensitive."""
        return next((own.policy for own in self.models if fnmatchcase(name, own.match)), self)

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
        fields = self.model_dump(mode="json", exclude=_NOT_OF_SUMMARIES)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


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
