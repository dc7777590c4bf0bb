"""Find the files that tool calls read or wrote, by the names of tools and arguments that well-known agents use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Access = Literal["written", "read", "file"]
"""What a call did with a file; ``file`` if its tool isn't known to read or write."""

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
