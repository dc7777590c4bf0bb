"""Read the arguments of tool calls: the files that they name, and what the calls did with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec

from proxy.constants import UNDECODABLE

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

# Names as ``plain_name`` returns them.
_WRITING = {name.lower() for name in WRITING_TOOLS} | {
    "append_file", "apply_diff", "create_new_file", "edit_existing_file", "edit_notebook", "fs_write",
    "insert_content", "insert_edit_into_file", "multi_replace_string_in_file", "replace", "replace_file_content",
    "replace_in_file", "replace_string_in_file", "search_replace", "str_replace", "write_to_file",
}  # fmt: skip
_READING = {
    "cat", "fs_read", "get_file_contents", "notebookread", "open", "open_file", "read", "read_file",
    "read_many_files", "read_multiple_files", "read_notebook", "read_text_file", "readfile", "view", "view_file",
}  # fmt: skip
_VIEWING_COMMANDS = ("view", "read")  # values of `command` with which a tool that can write only reads

_KEYS = (
    "path", "file_path", "filename", "file", "notebook_path", "filePath", "filepath", "target_file", "absolute_path",
    "TargetFile", "AbsolutePath",
)  # fmt: skip
_LISTS = ("paths", "files")

# A line in a patch of ``apply_patch``.
_PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.{1,300})$|^\*\*\* Move to: (.{1,300})$", re.MULTILINE)


def decoded(arguments: str, **options: Any) -> Any:
    """Return the value of a call's arguments. ``options`` are those of ``json.loads``.

    Raises ``ValueError`` or ``RecursionError`` if they aren't JSON.
    """
    try:
        return msgspec.json.decode(arguments)  # a fifth of the time
    except (*UNDECODABLE, UnicodeEncodeError):
        return json.loads(arguments, **options)


def parsed(arguments: str) -> Any:
    """Return the value of a call's arguments; the arguments themselves if they aren't JSON."""
    try:
        return decoded(arguments)
    except (ValueError, RecursionError):
        return arguments


def named_files(tool: str, arguments: Any) -> Iterator[tuple[Access, str]]:
    """Yield the files in the ``parsed`` arguments of a call, with what the call did with them."""
    fields: Mapping[str, Any] = arguments if isinstance(arguments, dict) else {}
    name = plain_name(tool)
    access = _access(name, fields)
    if name == "apply_patch":
        patch = arguments if isinstance(arguments, str) else fields.get("input", fields.get("patch"))
        if isinstance(patch, str):
            yield from (("written", path) for found in _PATCHED.findall(patch) for path in found if path)
    for value in _values(fields):
        if isinstance(value, str) and 0 < len(value) <= 300 and "\n" not in value:
            yield access, value


def handles_files(tool: str) -> bool:
    """Return whether a tool is known to read or write files."""
    name = plain_name(tool)
    return name in _READING or name in _WRITING


@lru_cache(1_000)
def plain_name(tool: str) -> str:
    """Return the name of a tool in lower case, without the name of its MCP server or namespace."""
    return tool.rsplit("__", 1)[-1].rsplit(".", 1)[-1].lower().replace("-", "_")


def _access(tool: str, fields: Mapping[str, Any]) -> Access:
    if tool in _READING or (tool in _WRITING and fields.get("command") in _VIEWING_COMMANDS):
        return "read"
    return "written" if tool in _WRITING else "file"


def _values(fields: Mapping[str, Any]) -> Iterator[Any]:
    yield from (fields[key] for key in _KEYS if key in fields)
    for listed in (fields[key] for key in _LISTS if key in fields):
        for item in listed if isinstance(listed, list) else ():
            yield item.get("path") if isinstance(item, dict) else item


def argument_text(arguments: Any) -> str:
    """Return the strings in the ``parsed`` arguments of a call."""
    strings: list[str] = []
    waiting = [arguments]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            strings += value
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)
        elif value is not None and not isinstance(value, bool):
            strings.append(str(value))
    return "\n".join(strings)


def parameters(arguments: Any) -> set[str]:
    """Return the names of the parameters in the ``parsed`` arguments of a call, and of those in its lists."""
    if not isinstance(arguments, dict):
        return set()
    listed = (item for value in arguments.values() if isinstance(value, list) for item in value)
    return set(arguments).union(*(item for item in listed if isinstance(item, dict)))


def portable(text: str, *, in_prose: bool = False) -> str:
    """Return a text with the paths of Windows in the form ``C$/folder/file``, which is one word.

    ``in_prose`` keeps only the last part of a path with spaces, because spaces separate words.
    """

    def changed(match: re.Match[str]) -> str:
        path = f"{match[1]}$/{_SEPARATOR.sub('/', match[2])}"
        return path.rpartition("/")[2] if in_prose and " " in path else path

    return _WINDOWS.sub(changed, text)


def native(path: str, separator: str = "\\") -> str:
    """Return a path of Windows in its own form. Other names stay as they are."""
    if path[1:3] != "$/" or not path[0].isalpha():
        return path
    return f"{path[0]}:{separator}{path[3:].replace('/', separator)}"


# Backslashes are doubled in JSON. Folders may have spaces.
_WINDOWS = re.compile(
    r"\b([A-Za-z]):[\\/]{1,2}((?:[\w.@+~-]{1,100}(?:(?: [\w.@+~-]{1,60}){0,4}\\|/)[\\/]?){0,30}[\w.@+-]{0,100})"
)
_SEPARATOR = re.compile(r"[\\/]{1,2}")
