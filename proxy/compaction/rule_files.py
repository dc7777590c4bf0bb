"""Recognize results that are rules of the project: files such as ``AGENTS.md``, and loaded skills.

A result can quote anyone: a fetched page, a dependency, a mail. So it has rules only if the client's own tool did
nothing but read one such file of the project, or load one skill. A call that only mentions such a file doesn't count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxy.compaction.named_files import named_files, parsed, plain_name

MARKS = (b".md", b".MD", b"rules", b"kill")  # bytes of which every call that reads such a file has some

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
