"""The section `policies`: how the proxy compacts conversations, and what a policy inherits from others.

Names and meanings come from LangChain's ``SummarizationMiddleware`` and of DeepAgents. Sizes are in tokens unless a
field says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, field_validator

from proxy.compaction.named_files import WRITING_TOOLS
from proxy.compaction.settings import KEEP, TRIGGER, Clause, Trigger
from proxy.compaction.stages import NAMES
from proxy.compaction.stages.evict_results import LISTING_TOOLS
from proxy.config.document import Issue, Issues, Node, empty, find, issue, line_of, near, plain
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
    off_for_false,
    wrong,
)


class ResponsesSettings(Section):
    """Settings for `/v1/responses`."""

    state: Annotated[Literal["recover", "compact", "off"], BeforeValidator(off_for_false)] = "recover"
    """When the upstream compacts a history that it keeps (`previous_response_id`). recover: after an overflow. compact:
    also when the conversation reaches the trigger. off: never."""


class SummarySettings(Section):
    """The call to the summary model."""

    main: ClassVar[str | None] = "model"

    method: Literal["transcript", "continue"] = "transcript"
    """transcript: send the messages as text. continue: send the conversation's own model its last prompt and a request
    for notes."""
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
    """Seconds that a request waits for one model, all chunks together. Then the fallback, then a digest. The last
    model's call continues in the background."""
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

    @property
    def redacts(self) -> bool:
        return self.redact_secrets or bool(self.redact)

    @property
    def models(self) -> list[str]:
        return [name for name in (self.model, self.fallback_model) if name]


class StageSettings(Section):
    """The settings that all stages have."""

    trigger: TriggerField = TRIGGER
    """When this stage runs. Default: the policy's trigger."""
    keep: KeepField = KEEP
    """How much recent conversation this stage doesn't change. Default: the policy's keep."""


class DuplicateSettings(StageSettings):
    """Replace older exact copies of a tool result, and older reads of a file that was read again or changed."""

    main: ClassVar[str | None] = "min_length"

    min_length: Count = 200
    """Minimum characters of a result to replace."""
    reads: bool = True
    """Replace results of reading a file once a later call read or changed it."""


class ArgumentSettings(StageSettings):
    """Cut long strings in the arguments of old tool calls. The JSON keeps its structure."""

    main: ClassVar[str | None] = "max_length"

    max_length: Count = 2000
    """Maximum characters of a string."""
    truncation_text: Text | None = None
    """The note that replaces the cut text. {characters} becomes the number of characters, {id} the archive's id of the
    original. Default: a note that says that it isn't part of the value."""
    tools: tuple[Text, ...] = WRITING_TOOLS
    """The tools whose arguments may be cut; "*" for all tools."""
    max_replaced: Count = 400
    """Maximum characters of the text that an edit replaced."""


class ResultSettings(StageSettings):
    """Shorten large old tool results to their beginning and end."""

    main: ClassVar[str | None] = "max_tokens"

    max_tokens: Count = 2000
    """Maximum tokens of a result."""
    max_tokens_per_tool: Mapping[Text, Count] = Field(default_factory=dict)
    """Maximum tokens of a result for single tools, by name."""
    exclude: tuple[Text, ...] = LISTING_TOOLS
    """Tools whose results stay whole at any age."""
    lossless: bool = True
    """Also remove colors, indentation of JSON, numbers of lines, and repeated paths."""


class MediaSettings(StageSettings):
    """Replace old images, audio, and files with labels. The user's newest message doesn't change."""


class ArchiveSettings(Section):
    """Store the originals of removed content, for the caller who sent them."""

    main: ClassVar[str | None] = "days"

    days: Days = 30
    """Days to store the originals, at most 36,500."""


class RecallSettings(Section):
    """Let the model read archived messages through a tool that the client never sees."""

    tool: Annotated[Literal["off", "auto"], BeforeValidator(off_for_false)] = "off"
    """off: no tool. auto: add the tool to compacted requests whose model may choose among tools."""
    max_rounds: Annotated[Count, Field(le=10)] = 3
    """How often the model may read archived messages during one response."""
    max_tokens: Count = 4000
    """Maximum tokens of what one call returns, and at most a tenth of the input budget."""


class UserMessageSettings(Section):
    """The user's earlier messages, which stay verbatim next to a summary."""

    main: ClassVar[str | None] = "max_tokens"

    max_tokens: Count = 20_000
    """Maximum tokens of these messages: the first, then the newest."""
    keep_first: bool = True
    """Always keep the user's first message."""


class IndexSettings(Section):
    """The list of paths, URLs, and names from the summarized messages."""

    main: ClassVar[str | None] = "max_tokens"

    max_tokens: Count = 4000
    """Maximum tokens of the list."""


class UnknownModelSettings(Section):
    """Conditions for models whose context window is unknown. They stand for the policy's fractions."""

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


PREPARE_FRACTION = 0.75


class PolicyFields(Section):
    """The settings that a policy and its overrides have in common."""

    mode: Annotated[Literal["enforce", "shadow", "off"], BeforeValidator(off_for_false)] = "enforce"
    """enforce: compact. shadow: measure and report, change nothing. off: do neither."""
    allow_header: bool = True
    """Obey the request header `x-compaction: off` or `shadow`. It can only reduce what the policy does."""
    trigger: TriggerField = TRIGGER
    """When to compact. The proxy also compacts at 95 % of the budget, unless this is null."""
    keep: KeepField = KEEP
    """Minimum recent conversation to keep, in whole groups. It's less if more would leave no room to grow."""
    prepare: TriggerField = (Clause(fraction=PREPARE_FRACTION),)
    """When to start the summary in the background. Default: at fraction 0.75 if the trigger is a larger fraction, at
    15/17 of a smaller one, and never for other triggers."""
    reserve_output: ReserveField = None
    """Tokens, or {fraction: F} of the window, to reserve for an answer if the request doesn't set a maximum. Default:
    1/32 of the window, at least 512 tokens (less in windows under 4,096), at most max_output_tokens."""
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
    """When the proxy compacts, repair results without a call, calls without a result, and repeated ids."""
    keep_newest: tuple[Text, ...] = ()
    """Further tools whose newest call is kept word for word, as the newest plan of an agent is."""
    pinned: tuple[SearchedPattern, ...] = ()
    """Regular expressions. The proxy never changes or summarizes messages that contain a match."""
    responses: ResponsesSettings = ResponsesSettings()
    """Settings for `/v1/responses`."""
    summary: SummarySettings = SummarySettings()
    """The call to the summary model."""
    duplicates: DuplicateSettings | None = DuplicateSettings()
    """Replace copies of tool results, and outdated reads of files; null turns this off."""
    truncate_args: ArgumentSettings | None = ArgumentSettings()
    """Cut arguments of old tool calls; null turns this off."""
    evict_results: ResultSettings | None = ResultSettings()
    """Shorten old tool results; null turns this off."""
    media: MediaSettings | None = MediaSettings()
    """Replace old images, audio, and files; null turns this off."""
    archive: ArchiveSettings | None = ArchiveSettings()
    """Store the originals of removed content; null turns this off."""
    recall: RecallSettings = RecallSettings()
    """Let the model read archived messages."""
    user_messages: UserMessageSettings = UserMessageSettings()
    """The user's earlier messages, which stay verbatim next to a summary."""
    index: IndexSettings = IndexSettings()
    """The list of paths, URLs, and names from the summarized messages."""
    unknown_model: UnknownModelSettings = UnknownModelSettings()
    """Conditions for models whose context window is unknown."""


_SECTIONS = frozenset(name for name, one in PolicyFields.model_fields.items() if isinstance(one.default, Section))
"""The names of the sections."""


class ModelOverride(PolicyFields):
    """Override settings of a policy for some models: all except `extends` and `models`."""

    match: Text
    """The model in the request. *, ?, and [seq] work as in file names. Case-sensitive."""


class WrittenPolicy(PolicyFields):
    """A policy as written in the file. Omitted settings come from the policy it extends, or are the defaults."""

    extends: Name | None = None
    """The policy that provides the settings that this one omits."""
    models: tuple[ModelOverride, ...] = ()
    """Overrides for some models; the first match wins. Overrides of the extended policy come after its own."""


_APART: dict[str, Any] = {
    **dict.fromkeys(("name", "models", "mode", "allow_header", "overflow_retries", "rate_limit_as_limit"), True),
    "output": True,
    "responses": True,
    "recall": True,
    "summary": {"method"},
}
"""The settings that don't affect checkpoints and summaries."""


class ForModels(Section):
    """The policy in force for models that a glob matches."""

    match: str
    """The glob, in the syntax of ``fnmatchcase``."""
    policy: Policy
    """The complete policy for these models."""


class Policy(PolicyFields):
    """A policy in force: complete, immutable, hashable. ``build`` makes one."""

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
        for stage in NAMES:
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
        policy = self.model_copy(update={"archive": None})
        for name in ("fingerprint", "unarchived"):
            policy.__dict__.pop(name, None)  # the copy has the cached values of the original
        return policy

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of the settings that affect checkpoints and summaries."""
        fields = self.model_dump(mode="json", exclude=_APART)
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


def effective(root: Node, written: Mapping[str, WrittenPolicy]) -> dict[str, Policy]:
    """Return every policy in force, ``default`` first. Raises ``Issues`` for unknown or circular parents."""
    issues = [*_unknown_parents(root, written), *_circles(root, written)]
    if issues:
        raise Issues(issues)
    return {name: _policy(name, stated(root, name, written)) for name in dict.fromkeys(["default", *written])}


def stated(root: Node, name: str, written: Mapping[str, WrittenPolicy]) -> Node:
    """Return the settings of a policy and its parents, as nodes with their lines."""
    if name not in written:
        return empty(root.line)
    own, parent = root.settings["policies"].settings[name], written[name].extends
    if parent is None:
        return own
    above = stated(root, parent, written)
    merged = _merged(above, own, _SECTIONS)
    if "models" in above.settings and "models" in own.settings:
        models = own.settings["models"]
        merged.settings["models"] = replace(models, value=[*models.items, *above.settings["models"].items])
    return merged


def overrides(policy: Node) -> list[tuple[str, Node]]:
    """Return the globs of a policy's overrides, each with all settings for these models, as nodes."""
    base, deep = _without(policy, "models"), _SECTIONS
    entries = policy.settings.get("models", empty(0)).items
    return [(str(entry.settings["match"].value), _merged(base, _without(entry, "match"), deep)) for entry in entries]


def _policy(name: str, stated: Node) -> Policy:
    policy = _built(name, stated)
    own = tuple(ForModels(match=match, policy=_built(name, values)) for match, values in overrides(stated))
    return policy.model_copy(update={"models": own}) if own else policy


def _built(name: str, stated: Node) -> Policy:
    return Policy.build(
        name, {key: plain(node) for key, node in _without(stated, "extends", "models").settings.items()}
    )


def _without(node: Node, *keys: str) -> Node:
    return replace(node, value={key: value for key, value in node.settings.items() if key not in keys})


def _merged(base: Node, over: Node, deep: Collection[str]) -> Node:
    """Return the settings of ``over`` added to those of ``base``. The sections in ``deep`` are merged likewise."""
    merged = dict(base.settings)
    for key, node in over.settings.items():
        known = merged.get(key)
        is_section = known is not None and isinstance(known.value, dict) and isinstance(node.value, dict)
        merged[key] = _merged(known, node, ()) if known and is_section and key in deep else node
    return replace(over, value=merged)


def _unknown_parents(root: Node, written: Mapping[str, WrittenPolicy]) -> list[Issue]:
    known = {"default", *written}
    return [
        _issue(root, name, f"there is no policy '{policy.extends}'", near(policy.extends, known))
        for name, policy in written.items()
        if policy.extends is not None and policy.extends not in known
    ]


def _circles(root: Node, written: Mapping[str, WrittenPolicy]) -> list[Issue]:
    issues = []
    seen: set[str] = set()
    for name in written:
        chain: list[str] = []
        current: str | None = name
        while current is not None and current in written and current not in seen:
            seen.add(current)
            chain.append(current)
            current = written[current].extends
        if current is not None and current in chain:
            circle = " → ".join([*chain[chain.index(current) :], current])
            issues.append(_issue(root, current, f"goes in a circle ({circle})", "remove one extends"))
    return issues


def _issue(root: Node, name: str, problem: str, fix: str) -> Issue:
    return issue(line_of(root, ("policies", name, "extends")), problem, fix, f"policies.{name}.extends")


Row = tuple[str, str, str]


def effective_values(policy: Policy, values: Node, place: Callable[[int], str]) -> Iterator[Row]:
    """Return each setting of a policy, its value, and its source: a file and line, or another setting.

    ``values`` contains the settings in the files. ``place`` returns the file and line of a line number.
    """
    for name, value in policy.model_dump(mode="json", exclude={"name", "models"}).items():
        is_section = isinstance(value, dict) and isinstance(getattr(policy, name), Section)
        paths = {(name, key): inner for key, inner in value.items()} if is_section else {(name,): value}
        for path, inner in paths.items():
            yield ".".join(path), _text(inner), _origin(path, values, policy, place)


def _origin(path: tuple[str, ...], values: Node, policy: Policy, place: Callable[[int], str]) -> str:
    node, found = find(values, path)
    if path == ("prepare",) and (found != path or not policy.trigger):
        return "follows from trigger" if "trigger" in values.settings else "default"
    if found == path:
        return place(node.line)
    if path[0] in NAMES and path[-1] in ("trigger", "keep") and path[-1] in values.settings:
        return f"follows from {path[-1]}"
    return "default"


def _text(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()
