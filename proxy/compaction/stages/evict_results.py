"""Shorten old tool results.

First, a result gets a form that loses nothing. If that is still too long, the beginning, the end, and lines that report
failures are kept. A note states how much was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from proxy.compaction import keeps
from proxy.compaction.directives import rule_lines
from proxy.compaction.format import Format
from proxy.compaction.identifiers import Part, collect, is_program, ranking
from proxy.compaction.named_files import handles_files
from proxy.compaction.shorten import middle_cut, notable_lines, without_base64
from proxy.compaction.stages.lossless import lossless
from proxy.compaction.stages.stage import Stage, StageRules, kept_as, repeated_reminders
from proxy.compaction.turn import ITEM_BYTES, Facts, Turn

NAME = "evict_results"

_MARKER = (
    "\n[The compaction proxy left out {lines} lines ({characters} characters, {tokens} tokens) of this old tool result "
    "here. This note is not part of the result.{kept}]\n"
)
_BASE64_NOTE = "[The compaction proxy left out {characters} characters of base64 here.{kept}]"

NAMES = 100  # names of a shortened result that are remembered, the likeliest ones
LISTING_TOOLS = ("ls", "glob", "grep", "write_todos")  # tools whose results DeepAgents never evicts


@dataclass(frozen=True, slots=True)
class ResultRules(StageRules):
    """Shorten large old tool results to their beginning and end."""

    SECTION: ClassVar[str] = NAME

    max_tokens: int = 2000
    max_tokens_per_tool: Mapping[str, int] = field(default_factory=dict)
    exclude: tuple[str, ...] = LISTING_TOOLS
    lossless: bool = True

    @property
    def least(self) -> int:
        """Return the tokens up to which no result is changed."""
        least = min([self.max_tokens, *self.max_tokens_per_tool.values()])
        return min(least, keeps.LEAST_LOSSLESS) if self.lossless else least

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
        if name in self._rules.exclude or (facts.text_tokens <= limit and not self._rules.lossless):
            return None
        is_content = handles_files(name)
        repeats = index in self._repeated
        key = (NAME, (limit, self._archive, self._rules.lossless, is_content, repeats))
        if key not in facts.forms:
            facts.forms[key] = self._reduced(turn, limit, is_content=is_content, repeats=repeats)
        return facts.forms[key]

    def _reduced(self, turn: Turn, limit: int, *, is_content: bool, repeats: bool) -> Turn | None:
        reduced: Turn | None = None
        if self._rules.lossless:
            reduced = _changed(turn, lossless, self._format)
        if (reduced or turn).facts.text_tokens <= limit:
            return reduced
        kept = kept_as(turn, archive=self._archive)
        note = _BASE64_NOTE.replace("{kept}", kept)
        reduced = _changed(reduced or turn, lambda text: without_base64(text, note), self._format) or reduced
        if (reduced or turn).facts.text_tokens <= limit:
            return reduced
        marker = _MARKER.replace("{kept}", kept)
        most = int(limit * keeps.RESULT_PART)
        reminders = self._spared(turn) if repeats else ""
        most += self._format.text_tokens(reminders)
        cut = shortened(reduced or turn, most, self._format, marker, is_content=is_content)
        if cut is not None and reminders and len(texts := self._format.texts(cut.raw)) == 1:
            return cut.rewritten(self._format.with_result(cut.raw, texts[0]), self._format)
        return cut or reduced

    def _spared(self, turn: Turn) -> str:
        """Return the reminders that shortening leaves at the end of a result with one text; empty for other results."""
        texts, whole = self._format.texts(turn.raw), self._format.text(turn.raw)
        only = len(texts) == 1 and not turn.facts.media and whole.startswith(texts[0])
        return whole[len(texts[0]) :] if only else ""

    @cached_property
    def _repeated(self) -> set[int]:
        return repeated_reminders(self._body)

    @cached_property
    def _names(self) -> dict[int, str]:
        return _tool_names(self._body)


def _changed(turn: Turn, change: Callable[[str], str], format: Format) -> Turn | None:
    """Return a unit with each of its texts changed; ``None`` if that makes it no shorter."""
    texts = format.texts(turn.raw)
    new = list(map(change, texts))
    return None if new == texts else turn.rewritten(format.with_texts(turn.raw, new), format)


def shortened(turn: Turn, max_tokens: int, format: Format, marker: str, *, is_content: bool = False) -> Turn | None:
    """Leave out the middle of a unit's texts. Return ``None`` if that saves nothing.

    ``max_tokens`` is the limit for the message without its media parts, which are kept and don't count. Several texts
    shrink to one common size. Both ends of a user's or assistant's text are kept (``keeps.LEAST_TEXT``), even if the
    message then exceeds the limit. ``is_content``: the result is the content of a file. If that's a program,
    its lines report no failures.
    """
    texts = format.texts(turn.raw)
    if not texts:
        return None
    frame = format.frame_tokens(turn.raw, turn.facts)
    length, tokens = sum(map(len, texts)), turn.facts.text_tokens - frame
    room = max_tokens - frame
    is_result = turn.facts.kind == "result"
    is_source = is_content and any(map(is_program, texts))
    notable = notable_lines if is_result and not is_source else rule_lines if turn.facts.kind == "user" else None
    # The tokens of several texts follow from their lengths.
    sizes = [tokens * len(text) // length for text in texts]
    most = room if len(texts) == 1 else common_level(sizes, room)
    found = collect([[Part("result", "\n".join(texts))]]) if is_result else {}
    names = ranking(found)
    if not turn.facts.names:  # otherwise this is a shorter form, with fewer names
        account = turn.facts.forms.account
        account.names = {name: found[name] for name in names[:NAMES]}
        account.charge(ITEM_BYTES * len(account.names))
    cut = [
        text
        if len(texts) > 1 and size <= most
        else middle_cut(
            text,
            most,
            format.inner_tokens(turn.facts),
            marker,
            # A text far over the limit isn't counted again. The tokens of its message are accurate enough.
            size if len(text) > (max_tokens if len(texts) == 1 else most) * 16 else None,
            notable=notable,
            least=0 if is_result else keeps.LEAST_TEXT,
            names=names,
            names_part=keeps.PROGRAM_NAMES_PART if is_source else keeps.NAMES_PART,
        )
        for text, size in zip(texts, sizes, strict=True)
    ]
    return turn.rewritten(format.with_texts(turn.raw, cut), format)


def common_level(sizes: Sequence[int], most: int) -> int:
    """Return the size to which the largest sizes must shrink, so that all have ``most`` together."""
    for number, size in enumerate(sorted(sizes)):
        share = max(0, most) // (len(sizes) - number)
        if size > share:
            return share
        most -= size
    return max(sizes, default=0)


def _tool_names(body: Sequence[Turn]) -> dict[int, str]:
    """Return the tool name of each result, by index. If an id occurs again, the latest call counts."""
    names: dict[int, str] = {}
    latest: dict[str, str] = {}
    for index, turn in enumerate(body):
        for call in turn.facts.calls:
            latest[call.id] = call.name
        if turn.facts.answers in latest:
            names[index] = latest[turn.facts.answers]
    return names
