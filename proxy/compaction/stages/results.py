"""Shorten old tool results.

The beginning, the end, and lines that report failures are kept. A note states how much was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

from proxy.compaction.format import Format
from proxy.compaction.shorten import middle_cut, without_base64
from proxy.compaction.stages.stage import Stage, StageRules, kept_as
from proxy.compaction.turn import Facts, Turn

NAME = "results"

# Share of the limit that a shortened result keeps.
KEPT_PART = 0.25

LEAST_TEXT = 32
"""Tokens of a user's or assistant's text that are kept even if the limit is smaller, so that it's never only a note."""

_MARKER = (
    "\n[The compaction proxy left out {lines} lines ({characters} characters, {tokens} tokens) of this old tool result "
    "here. This note is not part of the result.{kept}]\n"
)
_BASE64_NOTE = "[The compaction proxy left out {characters} characters of base64 here.{kept}]"


LISTING_TOOLS = ("ls", "glob", "grep", "write_todos")
"""Tools whose results DeepAgents never evicts."""


@dataclass(frozen=True, slots=True)
class ResultRules(StageRules):
    """Shorten large old tool results to their beginning and end."""

    NAME: ClassVar[str] = NAME
    SECTION: ClassVar[str] = "evict_results"
    ABOUT: ClassVar[str] = "Shorten old tool results; null turns this off."
    MAIN: ClassVar[str | None] = "max_tokens"

    max_tokens: Annotated[int, "Maximum tokens of a result."] = 2000
    max_tokens_per_tool: Annotated[Mapping[str, int], "Maximum tokens of a result for single tools, by name."] = field(
        default_factory=dict
    )
    exclude: Annotated[tuple[str, ...], "Tools whose results this stage doesn't change."] = LISTING_TOOLS

    @property
    def least(self) -> int:
        """Return the tokens up to which no result is shortened."""
        return min([self.max_tokens, *self.max_tokens_per_tool.values()])

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        return _Results(self, body, format, archive=archive)

    def is_costly(self, facts: Facts) -> bool:
        return facts.kind == "result" and facts.tokens > self.least


class _Results(Stage):
    """The stage with the rules of a policy, for one conversation."""

    name = NAME

    def __init__(self, rules: ResultRules, body: Sequence[Turn], format: Format, *, archive: bool) -> None:
        super().__init__(rules)
        self._rules = rules
        self._body = body
        self._format = format
        self._archive = archive
        self._least = rules.least

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        facts = turn.facts
        if facts.kind != "result" or facts.text_tokens <= self._least:
            return None
        name = self._names.get(index, "")
        limit = self._rules.max_tokens_per_tool.get(name, self._rules.max_tokens)
        if facts.text_tokens <= limit or name in self._rules.exclude:
            return None
        key = (NAME, (limit, self._archive))
        if key not in facts.forms:
            facts.forms[key] = self._reduced(turn, limit)
        return facts.forms[key]

    def _reduced(self, turn: Turn, limit: int) -> Turn | None:
        text = self._format.replaceable_text(turn.raw)
        if not text:
            return None
        kept = kept_as(turn, archive=self._archive)
        bare = without_base64(text, _BASE64_NOTE.replace("{kept}", kept))
        elided = turn.rewritten(self._format.with_text(turn.raw, bare), self._format) if bare != text else None
        if elided is not None and elided.facts.text_tokens <= limit:
            return elided
        marker = _MARKER.replace("{kept}", kept)
        return shortened(elided or turn, int(limit * KEPT_PART), self._format, marker) or elided

    @cached_property
    def _names(self) -> dict[int, str]:
        return _tool_names(self._body)


def shortened(turn: Turn, max_tokens: int, format: Format, marker: str) -> Turn | None:
    """Leave out the middle of a message's text. Return ``None`` if that saves nothing.

    ``max_tokens`` is the limit for the message without its media parts, which are kept and don't count.
    Both ends of a user's or assistant's text are kept (``LEAST_TEXT``), even if the message then exceeds the limit.
    """
    text = format.replaceable_text(turn.raw)
    if not text:
        return None
    frame = format.frame_tokens(turn.raw, turn.facts)
    # A text far over the limit isn't counted again. The tokens of its message are accurate enough.
    total = turn.facts.text_tokens - frame if len(text) > max_tokens * 16 else None
    cut = middle_cut(
        text,
        max_tokens - frame,
        format.inner_tokens(turn.facts),
        marker,
        total,
        notable=turn.facts.kind == "result",
        least=0 if turn.facts.kind == "result" else LEAST_TEXT,
    )
    return turn.rewritten(format.with_text(turn.raw, cut), format)


def _tool_names(body: Sequence[Turn]) -> dict[int, str]:
    """Return the tool name of each result, by index. If an id occurs again, the latest call counts."""
    names: dict[int, str] = {}
    latest: dict[str, str] = {}
    for index, turn in enumerate(body):
        latest.update({call.id: call.name for call in turn.facts.calls})
        if turn.facts.answers in latest:
            names[index] = latest[turn.facts.answers]
    return names
