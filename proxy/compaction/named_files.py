"""Read the arguments of tool calls: the files that they name, and what the calls did with them.

Some results are rules of the project: files such as ``AGENTS.md``, and loaded skills. A result can quote anyone: a
fetched page, a dependency, a mail. So it has rules only if the client's own tool did nothing but read one such file of
the project, or load one skill. A call that only mentions such a file doesn't count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    access: Access = "written" if name in _WRITING else "file"
    if name in _READING or (name in _WRITING and fields.get("command") in _VIEWING_COMMANDS):
        access = "read"
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


RULE_MARKS = (b".md", b".MD", b"rules", b"kill")  # bytes of which every call that reads such a file has some

_RULES = re.compile(
    r"(?:.*/)?(?:(?:AGENTS?|CLAUDE|GEMINI|QWEN|CONTRIBUTING|CONVENTIONS|COPILOT|RULES|SKILL)(?:\.local|\.override)?\.md|"
    r"copilot-instructions\.md|[^/]{1,60}\.(?:instructions\.md|mdc)|\.(?:cursor|windsurf|cline|roo)rules|"
    r"\.(?:clinerules|(?:roo|kilocode|windsurf|continue)/rules)/[^/]{1,60}\.md)",
    re.IGNORECASE,
)
_SKILL_TOOL = re.compile(r"skill|(?:activate|invoke|load|read|use|view)_?skill|skill_(?:activate|load|read|use|view)")
_SKILL = re.compile(r"[\w:.-]{1,80}")
# Neither an address, a way upward, nor a member of an archive.
_PATH = re.compile(
    r"(?!//|(?:.*/)?\.\./|.*\.(?:7z|egg|t?gz|jar|rar|tar|whl|xz|zip)/)(?:[A-Za-z]:)?[\w./~@ ()\[\]+,-]{1,300}"
)
_ABSOLUTE = re.compile(r"/|~|[A-Za-z]:")
# Folders with other people's files, and those of the system.
_FOREIGN = re.compile(
    r"/(?:\.(?:cache|cargo|git|gradle|m2|npm|rustup|tox|venv|yarn)|3rdparty|_?vendor(?:s|ed)?|\w+_components|build|deps|"
    r"dist|downloads|externals?|node_modules|pods|(?:dist|site)-packages|submodules|target|te?mp|third[_-]?party|venv)/"
)
_SYSTEM = re.compile(r"(?:[a-z]:)?/(?:bin|dev|etc|lib|library|nix|proc|program files|sbin|sys|system|usr|windows)/")
# The user's own settings of an agent: rules in a hidden folder of the home folder, and skills anywhere below it.
_HOME = re.compile(
    r"(?:~|/root|(?:[a-z]:)?/(?:home|users)/[^/]+)/\.[\w-]+/(?:(?:[^/]+/)?[^/]+\Z|(?:[^/]+/){0,8}skills?/)"
)
# How clients state the project's folder: "Working directory: /srv/app", "<cwd>/srv/app</cwd>".
_KIND = r"(?:director(?:y|ies)|folders?|path|root)"
_ROOT = re.compile(
    rf"\b(?:cwd|workspaces?|(?:working|current|project|repo\w*)[ _-](?:in the )?(?:following )?{_KIND})"
    rf"(?:[ _](?:{_KIND}|is|with the following)){{0,3}}[\"'`]?(?: is\b| ?[:=>(])[\s\"'`(*-]{{0,8}}"
    r"(?=([^\n\"'`<>|)]{1,200}))((?:[/~]|[A-Za-z]:[/\\])[^\s\"'`<>|,;)]{1,200})",
    re.IGNORECASE,
)
# A command that does nothing but print one file.
_PRINTS = re.compile(
    r"(?:cat|bat|head|tail|less|more|nl|type|get-content|sed -n)"
    r"(?: -[\w-]{1,20}(?: \d{1,6})?| ['\"]?[\d,]{1,15}p['\"]?){0,4} (['\"]?)([^\s'\";&|<>$`\\(){}*?!#=]{1,200})\1",
    re.IGNORECASE,
)
_FOLDERS = ("cwd", "workdir", "working_directory", "dir_path", "directory")
# Other arguments in one word may name a repository or a host.
_HOW = ("encoding", "mode", "type", "shell", "sandbox_permissions", "command", "cmd", *_FOLDERS)
_ARGUMENTS = 2_000  # Characters of a call's arguments. Those of a call that only reads are shorter.


def project_folders(texts: Iterable[str]) -> list[str]:
    """Return the folders that a client states as the project's, in lower case. ``texts`` are its own."""
    found = (path for text in texts for match in _ROOT.finditer(text) for path in match.groups())
    return [folder for path in found if (folder := path.replace("\\", "/").casefold().rstrip("/. "))]


def rules_read(tool: str, arguments: str, folders: Sequence[str]) -> str | None:
    """Return the file of rules or the skill that a call reads; ``None`` if it may do anything else."""
    fields = parsed(arguments) if len(arguments) <= _ARGUMENTS else None
    if not isinstance(fields, dict):
        return None
    if _SKILL_TOOL.fullmatch(tool.lower()):
        name = next((value for value in fields.values() if isinstance(value, str)), "")
        return f"skill {name}" if _SKILL.fullmatch(name) else None
    path = _file_read(tool, fields)
    is_own = plain_name(tool) == tool.lower().replace("-", "_") or _ABSOLUTE.match(path)
    return path if is_own and _is_rules(path.replace("\\", "/").removeprefix("./"), folders) else None


def _is_rules(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is that of a file of rules in the project."""
    if not _RULES.fullmatch(path) or not _PATH.fullmatch(path):
        return False
    path = path.casefold()
    place = path.rpartition("/")[0] + "/"
    if _ABSOLUTE.match(path) and not _HOME.match(path):
        root = max((folder for folder in folders if place.startswith(f"{folder}/")), key=len, default="")
        above = len(place) > 1 and any(folder.startswith(place) for folder in folders)
        if not root and not above and (folders or _SYSTEM.match(path)):
            return False
        place = place[len(root) :]
    return _FOREIGN.search(f"/{place}") is None


def _file_read(tool: str, fields: Mapping[str, Any]) -> str:
    """Return the only file that a call reads; empty if it may do anything else."""
    files = dict.fromkeys(named_files(tool, fields))
    command = fields.get("command", fields.get("cmd"))
    if isinstance(command, list):
        command = command[2] if command[1:2] in (["-c"], ["-lc"]) and len(command) == 3 else " ".join(map(str, command))
    printed = _PRINTS.fullmatch(command.strip()) if isinstance(command, str) and not files else None
    paths = [printed[2]] if printed else [path for access, path in files if access == "read"]
    rest = [value for key, value in fields.items() if value and key not in _HOW and value not in paths]
    # Lists, numbers, and sentences don't name a place.
    named = any(isinstance(value, dict) or (isinstance(value, str) and len(value.split()) < 2) for value in rest)
    if named or len(paths) != 1 or len(files) > 1:
        return ""
    folder = next((f"{fields[key]}/" for key in _FOLDERS if fields.get(key)), "")
    return paths[0] if _ABSOLUTE.match(paths[0]) else folder + paths[0]
