"""Find the results of reading a file that a later message made superfluous.

A later read of the same part repeats the content, and a later write makes it outdated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.named_files import handles_files, named_files, parsed
from proxy.compaction.turn import ITEM_BYTES, FileUse, Turn

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
    yield from (FileUse(_same(path), writes=True) for access, path in files if access == "written")
    reads = [path for access, path in files if access == "read"]
    if len(reads) == 1 and (span := _span(fields)) is not None:
        (start, end), rest = span
        yield FileUse(_same(reads[0]), start=start, end=end, form=_form([tool, rest]))


def _same(path: str) -> str:
    return path.removeprefix("./")


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
