"""Replace repeated tool results, and reads of files that were read again or changed afterwards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from proxy.compaction import keeps
from proxy.compaction.effects import split_notes
from proxy.compaction.format import Format
from proxy.compaction.identifiers import SourceText, collect, ranking
from proxy.compaction.named_files import handles_files, named_files, parsed
from proxy.compaction.shorten import listed_names
from proxy.compaction.stages.stage import Stage, StageRules, kept_as, repeated_reminders
from proxy.compaction.turn import ITEM_BYTES, FileUse, Turn

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
        later, reads = self._superseded
        if index not in later:
            return None
        read = reads.get(index)
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
        return self._superseded[0]

    def _note(self, turn: Turn, read: Superseded, kept: str) -> str:
        note = _NOTES[read.event].replace("{kept}", kept).replace("{file}", read.path)
        if read.event == "read":
            return note
        text = self._format.text(turn.raw)
        names = ranking(collect([[SourceText("result", text)]]))
        most = min(int(len(text) * keeps.READ_NAMES_PART), keeps.READ_NAMES_CHARACTERS)
        listed = listed_names(names, most, text, note)
        return f"{note}\n{listed}".rstrip("\n")

    @cached_property
    def _repeated(self) -> set[int]:
        return repeated_reminders(self._body)

    @cached_property
    def _superseded(self) -> tuple[dict[int, int], dict[int, Superseded]]:
        """Return the message that makes each copy or read superfluous, and the reads among them.

        A read is among them if it was repeated or outdated before its next copy.
        """
        newest: dict[bytes, int] = {}
        copies: dict[int, int] = {}
        facts, least = [turn.facts for turn in self._body], self._rules.min_length
        for index, one in enumerate(facts):
            if one.kind != "result" or one.length < least:
                continue
            if one.said in newest:
                copies[newest[one.said]] = index
            newest[one.said] = index
        if not self._rules.reads:
            return copies, {}
        reads = {
            index: read
            for index, read in superseded_reads(self._body, self._format).items()
            if facts[index].length >= least and not facts[index].media and read.later < copies.get(index, len(facts))
        }
        return copies | {index: read.later for index, read in reads.items()}, reads


Event = Literal["read", "written"]

# Ways to state a part of a file: the keys of its start and its end, or of its start and its number of lines.
_ENDS = (
    ("start_line", "end_line"), ("startLine", "endLine"), ("StartLine", "EndLine"), ("line_start", "line_end"),
    ("start_line_one_indexed", "end_line_one_indexed_inclusive"),
)  # fmt: skip
_COUNTS = (("offset", "limit"), ("offset", "length"))
_RANGE = "view_range"

# Most tools stop after this many lines if a call states no end.
USUAL_LINES = 2_000

_EXPLANATIONS = ("description", "explanation", "reason", "toolSummary", "toolAction")
_FAILURE = re.compile(
    r"\b(?:error|failed|failure|not found|no such|no match\w*|denied|rejected|refused|invalid|unable|cannot|can't|"
    r"could not|couldn't|doesn't want|interrupted|aborted|cancell?ed|not unique|no result)\b|Error\b|^$",
    re.IGNORECASE,
)
_FAILURE_CHARACTERS = 200

_form = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True, slots=True)
class Superseded:
    """A read whose content a message at ``later`` repeated or made outdated."""

    later: int
    event: Event
    path: str


def superseded_reads(body: Sequence[Turn], format: Format) -> dict[int, Superseded]:
    """Return the first event that made each read superfluous, by the index of its result."""
    found: dict[int, Superseded] = {}
    calls: dict[str, tuple[FileUse, ...]] = {}
    standing: dict[str, dict[int, FileUse]] = {}
    for index, turn in enumerate(body):
        calls.update(uses_of(turn, format))
        if turn.facts.kind != "result" or turn.facts.answers not in calls:
            continue
        for use in calls[turn.facts.answers]:
            reads = standing.setdefault(use.path, {})
            if use.writes:
                gone = [] if _failed(turn, format) else list(reads)
            else:
                least = turn.facts.length / keeps.READ_AGAIN_PART
                gone = [i for i, read in reads.items() if covers(use, read) and body[i].facts.length <= least]
            for place in gone:
                del reads[place]
                found[place] = Superseded(index, "written" if use.writes else "read", use.path)
            if not use.writes:
                reads[index] = use
    return found


def uses_of(turn: Turn, format: Format) -> tuple[tuple[str, tuple[FileUse, ...]], ...]:
    """Return the ids of calls that read or write files, each with its files. Cached in the facts."""
    facts = turn.facts
    if not facts.calls:
        return ()
    if facts.uses is None:
        facts.uses = ()
        if any(handles_files(call.name) for call in facts.calls):
            pairs = zip(facts.calls, format.arguments(turn.raw), strict=False)
            facts.uses = tuple(
                (call.id, tuple(_uses(tool, text))) for call, (tool, text) in pairs if handles_files(tool)
            )
            facts.forms.account.charge(2 * ITEM_BYTES * sum([len(files) for _, files in facts.uses]))
    return facts.uses


def _uses(tool: str, arguments: str) -> Iterator[FileUse]:
    """Yield the files that a call writes, or the single file that it reads if its arguments are understood."""
    fields = parsed(arguments)
    files = list(dict.fromkeys(named_files(tool, fields)))
    yield from (FileUse(path.removeprefix("./"), writes=True) for access, path in files if access == "written")
    reads = [path for access, path in files if access == "read"]
    if len(reads) == 1 and (span := _span(fields)) is not None:
        (start, end), rest = span
        yield FileUse(reads[0].removeprefix("./"), start=start, end=end, form=_form([tool, rest]))


def _span(fields: Any) -> tuple[tuple[float, float], dict[str, Any]] | None:
    """Return the lines that a call reads, and its other arguments; ``None`` if the part isn't understood.

    A call that states nothing reads from minus infinity to infinity.
    """
    if not isinstance(fields, Mapping):
        return None
    rest = {key: value for key, value in fields.items() if value is not None and key not in _EXPLANATIONS}
    listed = rest.pop(_RANGE, None)
    if listed is not None:
        if not (isinstance(listed, list) and len(listed) == 2 and all(map(_is_line, listed))):
            return None
        return (listed[0], math.inf if listed[1] < 0 else listed[1] + 1), rest
    for first, last in _ENDS:
        if first in rest or last in rest:
            start, end = rest.pop(first, -math.inf), rest.pop(last, math.inf)
            return ((start, end + 1), rest) if _is_line(start) and _is_line(end) else None
    for first, number in _COUNTS:
        if first in rest or number in rest:
            start, count = rest.pop(first, -math.inf), rest.pop(number, math.inf)
            if not (_is_line(start) and _is_line(count)):
                return None
            # A start that isn't stated is line 0 or 1.
            return (start, max(start, 0) + count), rest
    return (-math.inf, math.inf), rest


def _is_line(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def covers(later: FileUse, earlier: FileUse) -> bool:
    """Return whether a read certainly has all lines of an earlier one."""
    if later.form != earlier.form or later.start > earlier.start:
        return False
    if later.end < math.inf:
        return earlier.end <= later.end
    # Without an end, a tool stops at some line.
    return earlier.start == later.start or earlier.end <= max(later.start, 0) + USUAL_LINES


def _failed(turn: Turn, format: Format) -> bool:
    """Return whether a result seems to report a failure. Cached in the facts."""
    if turn.facts.failed is None:
        start = format.text(turn.raw)[:_FAILURE_CHARACTERS].lstrip().partition("\n")[0]
        turn.facts.failed = _FAILURE.search(start) is not None
    return turn.facts.failed
