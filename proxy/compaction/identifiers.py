"""Collect paths, URLs, and identifiers from texts.

Summaries tend to lose them, and agents need them to continue.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from proxy.compaction.format import TextCounter

Access = Literal["written", "read", "file"]
"""The use of a file by a call; ``file`` if its tool isn't known to read or write."""

WRITING_TOOLS = (
    "write_file",
    "edit_file",
    "write",
    "edit",
    "create_file",
    "multi_edit",
    "str_replace_editor",
    "str_replace_based_edit_tool",
    "apply_patch",
    "Write",
    "Edit",
    "MultiEdit",
    "NotebookEdit",
)
"""Tools of well-known agents whose arguments contain whole files."""

# Names as ``_plain`` returns them.
_WRITING = {name.lower() for name in WRITING_TOOLS} | {
    "append_file", "apply_diff", "create_new_file", "edit_existing_file", "edit_notebook", "fs_write",
    "insert_content", "insert_edit_into_file", "multi_replace_string_in_file", "replace", "replace_file_content",
    "replace_in_file", "replace_string_in_file", "search_replace", "str_replace", "write_to_file",
}  # fmt: skip
_READING = {
    "cat", "fs_read", "get_file_contents", "notebookread", "open", "open_file", "read", "read_file",
    "read_many_files", "read_multiple_files", "read_notebook", "read_text_file", "readfile", "view", "view_file",
}  # fmt: skip
_VIEWING_COMMANDS = ("view", "read")
"""Values of ``command`` with which a tool that can write only reads."""

_KEYS = (
    "path", "file_path", "filename", "file", "notebook_path", "filePath", "filepath", "target_file", "absolute_path",
    "TargetFile", "AbsolutePath",
)  # fmt: skip
_LISTS = ("paths", "files")

# A line in a patch of ``apply_patch``.
_PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.{1,300})$|^\*\*\* Move to: (.{1,300})$", re.MULTILINE)


def named_files(tool: str, arguments: str) -> Iterator[tuple[Access, str]]:
    """Yield the files in a call's arguments, with what the call did with them."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    fields: Mapping[str, Any] = parsed if isinstance(parsed, dict) else {}
    name = _plain(tool)
    access = _access(name, fields)
    if name == "apply_patch":
        patch = parsed if isinstance(parsed, str) else fields.get("input", fields.get("patch"))
        if isinstance(patch, str):
            yield from (("written", path) for found in _PATCHED.findall(patch) for path in found if path)
    for value in _values(fields):
        if isinstance(value, str) and 0 < len(value) <= 300 and "\n" not in value:
            yield access, value


def _plain(tool: str) -> str:
    """Return the name of a tool in lower case, without the name of its MCP server or namespace."""
    return tool.rsplit("__", 1)[-1].rsplit(".", 1)[-1].lower().replace("-", "_")


def _access(tool: str, fields: Mapping[str, Any]) -> Access:
    if tool in _READING or (tool in _WRITING and fields.get("command") in _VIEWING_COMMANDS):
        return "read"
    return "written" if tool in _WRITING else "file"


def _values(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield from (fields.get(key) for key in _KEYS)
    for listed in (fields.get(key) for key in _LISTS):
        for item in listed if isinstance(listed, list) else ():
            yield item.get("path") if isinstance(item, dict) else item


# A literal or a class anchors every alternative, and lengths are bounded, so matching takes linear time.
_ARTEFACT = re.compile(
    r"""
    (?P<url>https?://[^\s"'<>()\[\]{}\\`]{4,300})
  | (?P<path>(?<![\w/.~@+-])(?:~|\.{1,2})?/?[\w.@+-]{1,100}(?:/[\w.@+-]{1,100}){1,30})
  | (?P<ticket>(?<![\w-])[A-Z][A-Z0-9]{1,9}-\d{1,10}(?![\w-]))
  | (?P<code>(?<![\w-])(?=[A-Z0-9-]{5})(?=[A-Z0-9-]{0,19}[A-Z])(?=[A-Z0-9-]{0,19}\d)
      [A-Z0-9]{2,12}(?:-[A-Z0-9]{2,12}){0,3}(?![\w-]))
  | (?P<error>(?<![\w-])ERR_[A-Z0-9_]{2,40}(?!\w))
  | (?P<uuid>(?<![\w-])[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(?![\w-]))
  | (?P<hash>(?<!\w)(?=[0-9a-f]{0,11}\d)[0-9a-f]{12,64}(?!\w))
    """,
    re.VERBOSE,
)

_TRAILING = ".,;:!?"

# Kinds receive their share of the tokens in this order: rare ones that a model can't guess come first. Machine-made
# identifiers are so frequent that they come last.
KINDS: tuple[tuple[str, float], ...] = (
    ("ticket", 0.3),
    ("url", 0.3),
    ("written", 0.7),  # files that calls wrote
    ("read", 1.0),  # files that calls read
    ("file", 1.0),  # named in other tool calls
    ("code", 0.5),  # of bookings, orders, or parts: capitals and digits
    ("path", 1.0),
    ("uuid", 1.0),
    ("hash", 1.0),
    ("import", 1.0),  # paths of the form ../x
    ("error", 1.0),  # error codes, and names of standards
)

MARKS = {"written": " (written)", "read": " (read)"}
"""The kinds that the index lists first, each with its mark behind the folder."""

SMALL = 3
"""The most files of a folder that are listed with those of its parent."""

# Error codes and standards that look like tickets or codes, and rarely matter later.
_ERROR = re.compile(r"(?:(?:ERR|ERROR|HTTP|STATUS|UTF|ISO|SHA|RFC)-?|E|TS|CS)\d{1,5}$")

# A path without a file extension must be absolute or start with a dot. Otherwise "and/or" would match.
_FILE = re.compile(r"\.[A-Za-z]\w{0,9}$")


MOST = 2_000
"""Identifiers kept for each kind, newest first: far more than fit in any prompt."""

PIECE = 16_384
"""Characters per search. A search takes at most about 10 ms, and no other thread runs meanwhile."""

Artefacts = dict[str, list[str]]
"""Identifiers by kind, without repetitions. The most recently mentioned one is last."""


def identifiers(
    texts: Iterable[str], earlier: Artefacts | None = None, files: Iterable[tuple[Access, str]] = ()
) -> Artefacts:
    """Return the identifiers in texts, after those of ``earlier`` texts. ``files`` are from tool calls.

    A file that was both written and read counts as written.
    """
    seen = {kind: dict.fromkeys((earlier or {}).get(kind, ())) for kind, _ in KINDS}
    for piece in (piece for text in texts for piece in _pieces(text)):
        for match in _ARTEFACT.finditer(piece):
            kind = match.lastgroup or ""
            item = match.group().rstrip(_TRAILING)
            if kind == "path" and not (item.startswith(("/", "~", "./", "../")) or _FILE.search(item)):
                continue
            if kind == "path" and item.startswith("../"):
                kind = "import"
            elif kind in ("ticket", "code") and _ERROR.match(item):
                kind = "error"
            seen[kind].pop(item, None)
            seen[kind][item] = None
    for access, file in files:
        known = next((kind for kind in _ACCESSES if file in seen[kind]), access)
        kind = min(known, access, key=_ACCESSES.index)
        seen[known].pop(file, None)
        seen[kind][file] = None
    return {kind: list(items)[-MOST:] for kind, items in seen.items()}


def _pieces(text: str) -> Iterator[str]:
    """Split a text between words, so that no identifier is cut. Words longer than a piece are cut anyway."""
    start = 0
    while len(text) - start > PIECE:
        reach = start + PIECE
        end = max(text.rfind(" ", start + 1, reach), text.rfind("\n", start + 1, reach))
        if end < 0:
            end = reach
        yield text[start:end]
        start = end
    yield text[start:]


def unseen(found: Artefacts, text: str) -> Artefacts:
    """Return the identifiers that a text doesn't contain."""
    return {kind: [item for item in items if item not in text] for kind, items in found.items()}


def index(found: Artefacts, max_tokens: int, count: TextCounter) -> str:
    """List the newest identifiers that fit in ``max_tokens``, one line per folder or item.

    Files that calls wrote or read come first, each kind with its mark.
    """
    chosen: dict[str, list[str]] = {}
    left = max_tokens
    named = {file for kind in _ACCESSES for file in found.get(kind, ())}
    for kind, part in KINDS:
        items = found.get(kind, [])
        if kind in ("path", "import"):
            items = [item for item in items if item not in named]
        room = int(left * part)
        if kind == "written":
            # The rest of the room is for files that calls read, but only if there are that many.
            room = max(room, left - _cost(_files(found.get("read", []), left, count, MARKS["read"]), count))
        if kind in _FILES:
            chosen[kind] = _files(items, room, count, MARKS.get(kind, ""))
        else:
            chosen[kind] = _LISTINGS.get(kind, _single)(items, room, count)
        left -= _cost(chosen[kind], count)
    order = [*MARKS, *(kind for kind, _ in KINDS if kind not in MARKS)]
    return "\n".join(line for kind in order for line in chosen[kind])


def _single(items: Sequence[str], max_tokens: int, count: TextCounter) -> list[str]:
    kept: list[str] = []
    for item in reversed(items):
        line = f"- {item}"
        max_tokens -= count(line) + 1
        if max_tokens < 0:
            break
        kept.append(line)
    return kept[::-1]


def _joined(items: Sequence[str], max_tokens: int, count: TextCounter) -> list[str]:
    """List short items on one line."""
    kept: list[str] = []
    left = max_tokens - 3
    for item in reversed(items):
        left -= count(f", {item}")
        if left < 0:
            break
        kept.append(item)
    return [f"- {', '.join(kept[::-1])}"] if kept else []


def _files(paths: Sequence[str], max_tokens: int, count: TextCounter, mark: str) -> list[str]:
    """List files by folder, so that each folder is named once. ``mark`` is behind each folder."""
    newest_first = paths[::-1]
    lines: list[str] = []
    taken = 0
    while True:
        # A line has fewer tokens than the sum of its parts. The next round uses the difference.
        left = max_tokens - _cost(lines, count)
        before = taken
        folders = {_split(path)[0] for path in newest_first[:taken]}
        for path in newest_first[taken:]:
            folder, name = _split(path)
            left -= count(f" {name}") + (count(f"- {folder}/{mark}: ") + 1 if folder not in folders else 0)
            if left < 0:
                break
            folders.add(folder)
            taken += 1
        if taken == before:
            return lines
        lines = _by_folder(newest_first[:taken], mark)
        if _cost(lines, count) > max_tokens:
            # Sharing a line repeats the name of a folder with several files, which may take more.
            sizes = range(taken)
            fitting = bisect_right(
                sizes, max_tokens, key=lambda size: _cost(_by_folder(newest_first[:size], mark), count)
            )
            return _by_folder(newest_first[: fitting - 1], mark)


def _split(path: str) -> tuple[str, str]:
    """Return the folder and the name of a file. A name with spaces is quoted, because spaces separate names."""
    folder, separator, name = path.rpartition("/")
    return folder if separator else ".", f'"{name}"' if " " in name else name


def _cost(lines: Iterable[str], count: TextCounter) -> int:
    return sum(count(line) + 1 for line in lines)


def _by_folder(newest_first: Sequence[str], mark: str) -> list[str]:
    """Return a line per folder. Several small folders share the line of their parent."""
    sizes = Counter(_split(path)[0] for path in newest_first)
    small = Counter(folder.rpartition("/")[0] for folder, size in sizes.items() if size <= SMALL)
    shared = {parent for parent, folders in small.items() if parent and (parent in sizes or folders > 1)}
    lines: dict[str, list[str]] = {}
    for path in newest_first:
        folder, name = _split(path)
        parent, _, last = folder.rpartition("/")
        if sizes[folder] <= SMALL and parent in shared and folder not in shared:
            folder, name = parent, f"{last}/{name}"
        lines.setdefault(folder, []).append(name)
    return [f"- {folder}/{mark}: {' '.join(names[::-1])}" for folder, names in reversed(lines.items())]


_LISTINGS = {"code": _joined, "error": _joined}
_FILES = ("written", "read", "file", "path", "import")
_ACCESSES: tuple[Access, ...] = ("written", "read", "file")
