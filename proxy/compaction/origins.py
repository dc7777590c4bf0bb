"""Find the files that texts come from: the target of a call, and the files of search results, errors, and diffs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from proxy.compaction.format import Format
from proxy.compaction.identifiers import PIECE, Part, Source
from proxy.compaction.named_files import Access, argument_text, handles_files, named_files, parameters, parsed, portable
from proxy.compaction.pieces import pause, pieces
from proxy.compaction.turn import Turn

_PATH = r"(?:[A-Za-z]:[\\/])?(?:[\w@.+~-]{1,100}+[\\/]|[\\/]){0,30}[\w@.+-]{1,100}\.[A-Za-z]\w{0,7}"

# A line of a search, of a compiler, or of a test: the path, and the number of the line.
_LOCATED = re.compile(
    rf"\s{{0,8}}(?P<heads>-->\s|File \")?(?:at\s)?(?P<path>{_PATH})"
    r"(?:[:-]\d{1,7}[:-]|:\d{1,7}$|\(\d{1,7},|\", line \d{1,7})"
)
_HEADING = re.compile(
    rf"(?:diff --git a/|\+\+\+ (?:b/)?|--- (?:a/)?|\*\*\* (?:Add|Update|Delete) File: )(?P<path>{_PATH})"
    rf"|(?P<alone>{_PATH}):?$"
)
_HINT = re.compile(
    r":\d+[:)]|-\d+-|\", line \d|\(\d+,\d+\)|^(?:diff --git |\+\+\+ |\*\*\* \w+ File: )|^\d+[:-]", re.MULTILINE
)
_LINE_END = re.compile(r"(?=\n)")
_NUMBERED = re.compile(r"\s{0,6}\d{1,7}[:-]")

HINTED = 4_000  # characters of a text in which a line names its file, or none does
LONGEST_COMMAND = 2_000  # characters of a command in which its file is searched

_WORDS = re.compile(rf"(?<![\w/.])(?:{_PATH})(?![\w/])")
# A message or a script in a command names files that the command doesn't handle.
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")


class Origins:
    """The texts of a conversation's messages, with their files.

    ``files`` are those that calls named, with the positions of their messages. ``parameters`` are those of the calls.
    """

    def __init__(self, format: Format) -> None:
        """Take the format of the messages."""
        self.files: list[tuple[Access, str, int]] = []
        self.parameters: set[str] = set()
        self._format = format
        # By the id of a call: its file, and whether its result is the file's content.
        self._targets: dict[str | None, tuple[str, bool]] = {}

    def parts(self, position: int, turn: Turn) -> list[Part]:
        """Return the parts of a message."""
        text = self._format.text(turn.raw)
        if turn.facts.kind == "result":
            file, is_content = self._targets.get(turn.facts.answers, ("", False))
            return [Part("result", text, file)] if is_content else parts("result", text, file)
        called = self._format.arguments(turn.raw) if turn.facts.calls else []
        found, targets = [Part("said", text)], []
        for tool, arguments in called:
            pause()
            value = parsed(arguments)
            inside = argument_text(value)
            file = target(tool, value, inside)
            targets.append((file, file != "" and handles_files(tool)))
            self.parameters |= parameters(value)
            self.files += [(access, path, position) for access, path in named_files(tool, value)]
            found += [Part("call", inside, file)] if file else parts("call", inside)
        if len(called) == len(turn.facts.calls):  # the arguments of a provider's own tools are among them
            self._targets |= zip([call.id for call in turn.facts.calls], targets, strict=True)
        return found


def target(tool: str, arguments: Any, text: str) -> str:
    """Return the only file that a call reads, writes, or names; empty if there is none, or more than one.

    ``text`` has all strings of the arguments.
    """
    files = {portable(file) for _, file in named_files(tool, arguments)}
    files = {file for file in files if "." in file.rpartition("/")[2].lstrip(".")}
    if not files and len(text) <= LONGEST_COMMAND:
        files = {portable(file) for file in _WORDS.findall(_QUOTED.sub(_without_prose, text))}
    return files.pop() if len(files) == 1 else ""


def _without_prose(quoted: re.Match[str]) -> str:
    return "" if " " in quoted[0] else quoted[0]


def parts(source: Source, text: str, file: str = "") -> list[Part]:
    """Return the parts of a text by the files that its lines name. Lines that name none belong to ``file``."""
    if _HINT.search(text, 0, HINTED) is None:
        return [Part(source, text, file)]
    lines: dict[str, list[str]] = {}
    for found, line in _by_line(text):
        lines.setdefault(found or file, []).append(line)
    return [Part(source, "\n".join(inside), found) for found, inside in lines.items()]


def _by_line(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line with its file. Numbers of lines, which would become a part of words, are left out."""
    file = ""
    for line, following in pairwise(chain(_lines(text), ("",))):
        located = _LOCATED.match(line)
        if located is not None:
            path = portable(located["path"])
            yield path, f"{path} {line[located.end() :]}"
            if located["heads"]:
                file = path
            continue
        heading = _HEADING.match(line)
        if heading is not None:
            if heading["path"] or _NUMBERED.match(following):
                line = file = portable(heading["path"] or heading["alone"])
        elif not line:
            file = ""
        yield file, line


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text. Splitting a long one at once would block other threads."""
    for number, piece in enumerate(pieces(text, _LINE_END, PIECE)):
        yield from piece.split("\n")[number > 0 :]
