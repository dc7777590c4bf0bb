"""Old tool results: beginning and end stay, with a line that says what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from proxy.compaction.message import RESULT_ROLES, Form, MessageCounter, Turn, decode, replace_text, replaceable_text
from proxy.compaction.rules import ResultRules
from proxy.compaction.shorten import middle_cut

NAME = "results"

# An old result keeps this part of the size from which results are shortened.
KEPT_PART = 0.25

MARKER = (
    "\n[The compaction proxy left out {lines} lines here ({tokens} tokens) of an old tool result; "
    "this line is not part of the result.]\n"
)


class _Results:
    """The stage under one policy's rules, for one conversation: names of tools are looked up by call."""

    def __init__(self, rules: ResultRules, body: Sequence[Turn]) -> None:
        self._rules = rules
        self._key = (NAME, rules.max_tokens)
        self._body = body

    def __call__(self, body: Sequence[Turn], index: int, count: MessageCounter) -> Form | None:
        turn = body[index]
        facts = turn.facts
        if facts.role not in RESULT_ROLES or facts.tokens <= self._rules.max_tokens:
            return None
        if self._rules.exclude and self._names.get(index) in self._rules.exclude:
            return None
        if self._key not in facts.forms:
            facts.forms[self._key] = shortened(turn, int(self._rules.max_tokens * KEPT_PART), count, MARKER)
        return facts.forms[self._key]

    @cached_property
    def _names(self) -> dict[int, str]:
        return _tool_names(self._body)


def stage(rules: ResultRules, body: Sequence[Turn]) -> _Results:
    """The stage's ``reduce`` under these rules."""
    return _Results(rules, body)


def shortened(turn: Turn, max_tokens: int, count: MessageCounter, marker: str) -> Form | None:
    """The message with the middle of its text left out, ``max_tokens`` at most; ``None`` if that gains nothing."""
    message = decode(turn.raw)
    text = replaceable_text(message)
    if not text:
        return None
    empty = replace_text(turn.raw, "")
    frame = count(decode(empty))
    # A text far longer than what may stay is not counted again: by its message it is known well enough.
    total = turn.facts.tokens - frame if len(text) > max_tokens * 16 else None
    bare = count({"content": ""})
    cut = middle_cut(text, max_tokens - frame, lambda piece: count({"content": piece}) - bare, marker, total)
    raw = replace_text(turn.raw, cut)
    tokens = count(decode(raw))
    return Form(raw, tokens) if tokens < turn.facts.tokens else None


def _tool_names(body: Sequence[Turn]) -> dict[int, str]:
    """The name of the tool that each tool message is a result of, by index; ids are matched to the latest call."""
    names: dict[int, str] = {}
    latest: dict[str, str] = {}
    for index, turn in enumerate(body):
        latest.update({call.id: call.name for call in turn.facts.calls})
        if turn.facts.answers in latest:
            names[index] = latest[turn.facts.answers]
    return names
