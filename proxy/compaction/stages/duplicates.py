"""Replace repeated tool results: of identical results, only the newest is kept in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from proxy.compaction.format import Format
from proxy.compaction.stages.stage import Stage, StageRules, kept_as
from proxy.compaction.turn import Turn

NAME = "duplicates"

_REFERENCE = (
    "[The compaction proxy left out this result, because a later call in this conversation returned an identical "
    "result.{kept} This note is not part of the result.]"
)


@dataclass(frozen=True, slots=True)
class DuplicateRules(StageRules):
    """Replace older exact copies of a tool result with a reference to the newest one."""

    NAME: ClassVar[str] = NAME
    SECTION: ClassVar[str] = "duplicates"
    ABOUT: ClassVar[str] = "Replace copies of tool results; null turns this off."
    MAIN: ClassVar[str | None] = "min_length"

    min_length: Annotated[int, "Minimum characters of a result to compare."] = 200

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        return _Duplicates(self, body, format, archive=archive)


class _Duplicates(Stage):
    """The stage with the rules of a policy."""

    name = NAME

    def __init__(self, rules: DuplicateRules, body: Sequence[Turn], format: Format, *, archive: bool) -> None:
        super().__init__(rules)
        self._min_length = rules.min_length
        self._body = body
        self._format = format
        self._archive = archive

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        if index not in self._next_copies:
            return None
        forms = turn.facts.forms
        key = (NAME, self._archive)
        if key not in forms:
            text = _REFERENCE.replace("{kept}", kept_as(turn, archive=self._archive))
            forms[key] = turn.rewritten(self._format.with_result(turn.raw, text), self._format)
        return forms[key]

    def later(self) -> dict[int, int]:
        """Return the next copy of each result that has one."""
        return self._next_copies

    @cached_property
    def _next_copies(self) -> dict[int, int]:
        newest: dict[bytes, int] = {}
        copies: dict[int, int] = {}
        for index, turn in enumerate(self._body):
            facts = turn.facts
            if facts.kind != "result" or facts.length < self._min_length:
                continue
            if facts.said in newest:
                copies[newest[facts.said]] = index
            newest[facts.said] = index
        return copies
