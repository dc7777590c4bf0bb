"""Find the files that texts come from: the target of a call, and the files of search results, errors, and diffs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from proxy.compaction.identifiers import Part, Source, argument_text, named_files, portable

_PATH = r"(?:[A-Za-z]:[\\/])?(?:[\w@.+~-]{1,100}[\\/]|[\\/]){0,30}[\w@.+-]{1,100}\.[A-Za-z]\w{0,7}"

# A line of a search, of a compiler, or of a test: the path, and the number of the line.
_LOCATED = re.compile(
    rf"\s{{0,8}}(?:-->\s|at\s|File \")?(?P<path>{_PATH})(?:[:-]\d{{1,7}}[:-]|:\d{{1,7}}$|\(\d{{1,7}},|\", line \d)"
)
_HEADING = re.compile(
    rf"(?:diff --git a/|\+\+\+ (?:b/)?|\*\*\* (?:Add|Update|Delete) File: )(?P<path>{_PATH})|(?P<alone>{_PATH}):?$"
)
_HINT = re.compile(
    r":\d+[:)]|-\d+-|\", line \d|\(\d+,\d+\)|^(?:diff --git |\+\+\+ |\*\*\* \w+ File: )|^\d+[:-]", re.MULTILINE
)
_NUMBERED = re.compile(r"\s{0,6}\d{1,7}[:-]")

HINTED = 4_000
"""Characters of a text in which a line names its file, or none does."""

LONGEST_COMMAND = 2_000
"""Characters of a command in which its file is searched."""

_WORDS = re.compile(rf"(?<![\w/.])(?:{_PATH})(?![\w/])")


def target(tool: str, arguments: Any) -> str:
    """Return the only file that a call reads, writes, or names; empty if there is none, or more than one."""
    files = {portable(file) for _, file in named_files(tool, arguments)}
    files = {file for file in files if _has_extension(file)}
    if not files:
        text = argument_text(list(arguments.values()) if isinstance(arguments, dict) else arguments)
        files = set(_WORDS.findall(text)) if len(text) <= LONGEST_COMMAND else set()
    return files.pop() if len(files) == 1 else ""


def _has_extension(file: str) -> bool:
    return "." in file.rpartition("/")[2].lstrip(".")


def parts(source: Source, text: str) -> list[Part]:
    """Return the parts of a text by the files that its lines name."""
    if _HINT.search(text, 0, HINTED) is None:
        return [Part(source, text)]
    lines: dict[str, list[str]] = {}
    for file, line in _by_line(text.split("\n")):
        lines.setdefault(file, []).append(line)
    return [Part(source, "\n".join(inside), file) for file, inside in lines.items()]


def _by_line(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    file = ""
    for number, line in enumerate(lines):
        located = _LOCATED.match(line)
        if located is not None:
            yield portable(located["path"]), line
            if line.lstrip().startswith(("-->", 'File "')):
                file = portable(located["path"])
            continue
        heading = _HEADING.match(line)
        if heading is not None:
            following = lines[number + 1] if number + 1 < len(lines) else ""
            if heading["path"] or _NUMBERED.match(following):
                file = portable(heading["path"] or heading["alone"])
        elif not line:
            file = ""
        yield file, line
