"""The sections of a policy. Those of the engine have the fields of its rules, with checks and descriptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from proxy.compaction.named_files import WRITING_TOOLS
from proxy.compaction.settings import KEEP, TRIGGER, Clause, Trigger
from proxy.compaction.stages.evict_results import LISTING_TOOLS
from proxy.config.fields import (
    Count,
    Days,
    KeepField,
    Seconds,
    Section,
    Text,
    TriggerField,
    off_for_false,
    wrong,
)
from proxy.config.patterns import Pattern


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
        """Return whether the summary model gets less than the whole text."""
        return self.redact_secrets or bool(self.redact)

    @property
    def models(self) -> list[str]:
        """Return the models that the section names."""
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
