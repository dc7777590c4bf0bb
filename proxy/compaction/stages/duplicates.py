"""Replace repeated tool results, and reads of files that were read again or changed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.identifiers import Part, collect, ranking
from proxy.compaction.reminders import split_notes
from proxy.compaction.shorten import listed_names
from proxy.compaction.stages.reads import Superseded, superseded_reads
from proxy.compaction.stages.stage import Stage, StageRules, kept_as, repeated_reminders
from proxy.compaction.turn import Turn

NAME = "duplicates"

_REFERENCE = (
    "[The compaction proxy left out this result, because a later call in this conversation returned an identical "
    "result.{kept} This note is not part of the result.]"
)
_NOTES = {
    "read": (
        "[The compaction proxy left out this result, because a later call in this conversation read {file} again."
        "{kept} This note is not part of the result.]"
    ),
    "written": (
        "[The compaction proxy left out this content of {file}, because a later call in this conversation changed the "
        "file.{kept} This note is not part of the result.]"
    ),
}


@dataclass(frozen=True, slots=True)
class DuplicateRules(StageRules):
    """Replace older exact copies of a tool result, and older reads of a file that was read again or changed."""

    SECTION: ClassVar[str] = NAME

    min_length: int = 200
    reads: bool = True

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        return _Duplicates(self, body, format, archive=archive)


class _Duplicates(Stage):
    """The stage with the rules of a policy."""

    name = NAME

    def __init__(self, rules: DuplicateRules, body: Sequence[Turn], format: Format, *, archive: bool) -> None:
        super().__init__(rules)
        self._rules = rules
        self._body = body
        self._format = format
        self._archive = archive

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        if index not in self._next:
            return None
        read = self._reads.get(index)
        forms = turn.facts.forms
        repeats = index in self._repeated
        key = (NAME, (self._archive, repeats, None if read is None else (read.event, read.path)))
        if key not in forms:
            kept = kept_as(turn, archive=self._archive)
            note = _REFERENCE.replace("{kept}", kept) if read is None else self._note(turn, read, kept)
            # The copy's own reminders may go as repetitions of these.
            reminders = () if repeats else split_notes(self._format.text(turn.raw))[0]
            text = "\n".join([note, *reminders])
            forms[key] = turn.rewritten(self._format.with_result(turn.raw, text), self._format)
        return forms[key]

    def later(self) -> dict[int, int]:
        return self._next

    def _note(self, turn: Turn, read: Superseded, kept: str) -> str:
        note = _NOTES[read.event].replace("{kept}", kept).replace("{file}", read.path)
        if read.event == "read":
            return note
        text = self._format.text(turn.raw)
        names = ranking(collect([[Part("result", text)]]))
        most = min(int(len(text) * keeps.READ_NAMES_PART), keeps.READ_NAMES_CHARACTERS)
        listed = listed_names(names, most, text, note)
        return f"{note}\n{listed}".rstrip("\n")

    @cached_property
    def _repeated(self) -> set[int]:
        return repeated_reminders(self._body)

    @cached_property
    def _next(self) -> dict[int, int]:
        copies = self._next_copies
        return copies | {index: read.later for index, read in self._reads.items()}

    @cached_property
    def _reads(self) -> dict[int, Superseded]:
        """Return the reads that were repeated or outdated before their next copy."""
        if not self._rules.reads:
            return {}
        copies, facts = self._next_copies, [turn.facts for turn in self._body]
        return {
            index: read
            for index, read in superseded_reads(self._body, self._format).items()
            if facts[index].length >= self._rules.min_length
            and not facts[index].media
            and read.later < copies.get(index, len(facts))
        }

    @cached_property
    def _next_copies(self) -> dict[int, int]:
        newest: dict[bytes, int] = {}
        copies: dict[int, int] = {}
        for index, turn in enumerate(self._body):
            facts = turn.facts
            if facts.kind != "result" or facts.length < self._rules.min_length:
                continue
            if facts.said in newest:
                copies[newest[facts.said]] = index
            newest[facts.said] = index
        return copies
