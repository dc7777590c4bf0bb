"""Shorten old tool results.

The beginning, the end, and lines that report failures are kept. A note states how much was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from proxy.compaction.format import Format
from proxy.compaction.rules import ResultRules, Rules
from proxy.compaction.shorten import middle_cut, without_base64
from proxy.compaction.stages.stage import NO_LATER, kept_as
from proxy.compaction.triggers import Clause, Trigger
from proxy.compaction.turn import Turn

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


class _Results:
    """The stage with the rules of a policy, for one conversation."""

    name = NAME
    spares_newest_user = False

    def __init__(self, rules: ResultRules, body: Sequence[Turn], format: Format, *, archive: bool) -> None:
        self.trigger: Trigger = rules.trigger
        self.keep: Clause = rules.keep
        self._rules = rules
        self._body = body
        self._format = format
        self._archive = archive
        self._per_tool = dict(rules.per_tool)
        self._least = min([rules.max_tokens, *self._per_tool.values()])

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        facts = turn.facts
        if facts.kind != "result" or facts.text_tokens <= self._least:
            return None
        name = self._names.get(index, "")
        limit = self._per_tool.get(name, self._rules.max_tokens)
        if facts.text_tokens <= limit or name in self._rules.exclude:
            return None
        key = (NAME, (limit, self._archive))
        if key not in facts.forms:
            facts.forms[key] = self._reduced(turn, limit)
        return facts.forms[key]

    def later(self) -> dict[int, int]:
        return NO_LATER

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


def stage(rules: Rules, body: Sequence[Turn], format: Format) -> _Results | None:
    """Create the stage; return ``None`` if the policy disables it."""
    return None if rules.results is None else _Results(rules.results, body, format, archive=rules.archive)


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
