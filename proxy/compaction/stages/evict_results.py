"""Shorten old tool results.

First, a result gets a form that loses nothing: each can be undone, except for colors. A form applies only if the
original has no line that looks like its notes. If that is still too long, the beginning, the end, and lines that report
failures are kept. A note states how much was left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from proxy.compaction import keeps
from proxy.compaction.directives import rule_lines
from proxy.compaction.format import Format
from proxy.compaction.identifiers import SourceText, collect, is_program, ranking
from proxy.compaction.named_files import handles_files
from proxy.compaction.pieces import SEARCHED
from proxy.compaction.shorten import middle_cut, notable_lines, without_base64
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
        """The tool name of each result, by index. If an id occurs again, the latest call counts."""
        names: dict[int, str] = {}
        latest: dict[str, str] = {}
        for index, turn in enumerate(self._body):
            for call in turn.facts.calls:
                latest[call.id] = call.name
            if turn.facts.answers in latest:
                names[index] = latest[turn.facts.answers]
        return names


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
    found = collect([[SourceText("result", "\n".join(texts))]]) if is_result else {}
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


MOST_CHARACTERS = 1_000_000  # longer texts stay as they are

MOST_TOKENS = 200_000
"""A JSON text with more tokens stays as it is, because reading them would take over a tenth of a second."""

# Colors and a hidden cursor. Other escapes move the cursor, so they stay.
_COLORS = re.compile(r"\x1b\[(?:[\d;:]*m|\?25[hl])")
# These erase nothing in a line without carriage returns.
_IDLE = re.compile(r"^(?:\x1b\[[0-2]?K)+|\x1b\[0?K")

_NOTE = "[The compaction proxy left out "  # the beginning of the notes in place of numbers

_NUMBERS = "[The compaction proxy left out the numbers of the next {count} lines. The first one is {first}]"
_NUMBERS_LINE = re.compile(
    r"\A\[The compaction proxy left out the numbers of the next (\d+) lines\. The first one is (.*)\]"
)
_NUMBERED = re.compile(r"( *)(\d{1,7})(→|\t|\| ?)")
_NUMBER_SIGNS = "→\t|"
_FEWEST_NUMBERED = 8

_GROUPS = "[The compaction proxy wrote the path of search results once, above the lines of a file.]"
_FOUND = re.compile(r"([^:\n]{4,300}):(\d{1,7}):")
_PLACE = re.compile(r":\d{1,7}:")
_LONGEST_PLACE = 9
_GROUPED = re.compile(r" (\d{1,7})([:-])")
_FEWEST_FOUND = 2

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+|\s+', re.DOTALL)
_SPACE = " \t\n\r"
_DEEPEST = 200
_LINED = 1  # the depth up to which each value of a JSON text keeps a line of its own


def lossless(text: str) -> str:
    """Return a shorter form of a text; the text itself if there is none."""
    if len(text) > MOST_CHARACTERS:
        return text
    text = without_colors(text)
    if (compact := compact_json(text)) is not None:
        return compact
    return grouped(without_numbers(text))


def without_colors(text: str) -> str:
    """Remove colors, and escapes that erase nothing."""
    return "\n".join(map(_without_colors, text.split("\n"))) if "\x1b" in text else text


def _without_colors(line: str) -> str:
    line = _COLORS.sub("", line)
    return line if "\r" in line.removesuffix("\r") else _IDLE.sub("", line)


def compact_json(text: str) -> str | None:
    """Return a JSON text without white space between tokens; ``None`` if the text isn't JSON or has no such space.

    The tokens stay as they are. The values of the outermost array or object keep a line of their own.
    """
    start = text[:200].lstrip(_SPACE)[:1]
    if start not in ("{", "[") or ("\n" not in text and ": " not in text and ", " not in text):
        return None
    if not _is_json(text):  # in such a text, a search for the end of each string could take quadratic time
        return None
    parts: list[str] = []
    depth = 0
    for count, match in enumerate(_TOKEN.finditer(text)):
        if count > MOST_TOKENS:
            return None
        token = match.group()
        if token.isspace():
            if token.strip(_SPACE):
                return None
            if "\n" in token and depth <= _LINED and parts:
                parts.append("\n")
            continue
        depth += (token in ("{", "[")) - (token in ("}", "]"))
        if depth > _DEEPEST:
            return None
        parts.append(token)
    compact = "".join(parts).rstrip("\n")
    return compact if len(compact) < len(text) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def without_numbers(text: str) -> str:
    """Remove the numbers before consecutive lines. A note before them has the first one."""
    if not any(map(text.__contains__, _NUMBER_SIGNS)):
        return text  # this check takes much less time than the search in each line
    lines = text.split("\n")
    if len(lines) < _FEWEST_NUMBERED or not any(map(_NUMBERED.match, lines)) or _has_note(text, lines, _NUMBERS_LINE):
        return text
    made: list[str] = []
    place = 0
    while place < len(lines):
        match = _NUMBERED.match(lines[place])
        end = place + 1
        if match is not None:
            form, first = _numbers(match)
            while end < len(lines) and lines[end].startswith(form % (first + end - place)):
                end += 1
            if end - place >= _FEWEST_NUMBERED:
                made.append(_NUMBERS.format(count=end - place, first=match.group()))
                made += [line[len(form % n) :] for n, line in enumerate(lines[place:end], first)]
                place = end
                continue
        made += lines[place:end]
        place = end
    return "\n".join(made)


def _numbers(first: re.Match[str]) -> tuple[str, int]:
    """Return the form of the numbers of lines, and the first one."""
    spaces, digits, sign = first.groups()
    if digits[0] == "0":
        return f"{spaces}%0{len(digits)}d{sign}", int(digits)
    return f"%{len(spaces) + len(digits)}d{sign}", int(digits)


def _has_note(text: str, lines: Sequence[str], note: re.Pattern[str]) -> bool:
    """Return whether a line of a text looks like a note."""
    return _NOTE in text and any(map(note.fullmatch, lines))


def grouped(text: str) -> str:
    """Write the path of search results (``path:line:text``) once for all results of a file that follow each other."""
    if not any(_PLACE.search(text, at, at + SEARCHED + _LONGEST_PLACE) for at in range(0, len(text), SEARCHED)):
        return text
    lines = text.split("\n")
    if len(lines) < _FEWEST_FOUND or _GROUPS in lines:
        return text
    if (text.startswith(" ") or "\n " in text) and any(map(_GROUPED.match, lines)):
        return text
    made = [_GROUPS]
    place = 0
    for path, start, end in _runs(lines):
        made += lines[place:start]
        made.append(f"{path}:")
        made += [f" {line[len(path) + 1 :]}" for line in lines[start:end]]
        place = end
    return "\n".join([*made, *lines[place:]]) if place else text


def _runs(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each run of results of one file: its path, its start, and its end."""
    taken = place = 0
    while place < len(lines):
        match = _FOUND.match(lines[place])
        path = "" if match is None else match[1]
        if not ("/" in path or "." in path) or not any(map(str.isalpha, path)):
            place += 1
            continue
        start, end = place, place + 1
        while start > taken and _is_found(lines[start - 1], path):
            start -= 1
        while end < len(lines) and _is_found(lines[end], path):
            end += 1
        if end - start >= _FEWEST_FOUND:
            yield path, start, end
            taken = end
        place = end


def _is_found(line: str, path: str) -> bool:
    """Return whether a line is a result in a file, or a line around one (``path-line-text``)."""
    if not line.startswith(path):
        return False
    rest = line[len(path) :]
    match = _GROUPED.match(f" {rest[1:]}")
    return match is not None and rest[0] == match[2]
