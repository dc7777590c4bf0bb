"""Test the files that calls and texts name, and which calls read rules of the project."""

import json
from typing import Any

import pytest

from proxy.compaction.identifiers import PIECE
from proxy.compaction.named_files import (
    RULE_MARKS,
    WRITING_TOOLS,
    argument_text,
    named_files,
    parsed,
    project_folders,
    rules_read,
)
from proxy.compaction.summary_message import parts_by_file as parts
from proxy.compaction.summary_message import target

PATCH = """*** Begin Patch
*** Update File: src/app/main.py
*** Move to: src/app/start.py
@@ def main():
-    old()
+    new()
*** Add File: docs/with space.md
+Text
*** Delete File: old.py
*** End Patch"""
PATCHED = [("written", path) for path in ("src/app/main.py", "src/app/start.py", "docs/with space.md", "old.py")]


@pytest.mark.parametrize(
    ("tool", "arguments", "found"),
    [
        ("read_file", {"path": "a.py"}, [("read", "a.py")]),
        ("Read", {"file_path": "/a.py", "limit": 5}, [("read", "/a.py")]),
        ("read", {"filePath": "a.py"}, [("read", "a.py")]),
        ("mcp__files__read-file", {"path": "a.py"}, [("read", "a.py")]),
        ("functions.view_file", {"AbsolutePath": "/a.py"}, [("read", "/a.py")]),
        ("read_many_files", {"paths": ["a.py", 7, "b.py"]}, [("read", "a.py"), ("read", "b.py")]),
        ("read_file", {"files": [{"path": "a.py"}, {"path": None}, "b.py"]}, [("read", "a.py"), ("read", "b.py")]),
        ("NotebookEdit", {"notebook_path": "a.ipynb"}, [("written", "a.ipynb")]),
        ("write_to_file", {"path": "a.py", "content": "b.py"}, [("written", "a.py")]),
        ("replace_string_in_file", {"filePath": "a.py"}, [("written", "a.py")]),
        ("str_replace_based_edit_tool", {"command": "view", "path": "a.py"}, [("read", "a.py")]),
        ("str_replace_editor", {"command": "create", "path": "a.py"}, [("written", "a.py")]),
        ("search", {"path": "src"}, [("file", "src")]),
        ("read_file", {"path": ["a.py"], "file": {"name": "b.py"}, "filename": "two\nlines"}, []),
        ("read_file", {"path": "", "file": "x" * 301}, []),
        ("apply_patch", {"input": PATCH}, PATCHED),
        ("apply_patch", {"input": 7}, []),
    ],
)
def test_what_a_call_did(tool: str, arguments: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert list(named_files(tool, parsed(json.dumps(arguments)))) == found


def test_a_patch_may_be_the_whole_input() -> None:
    assert list(named_files("apply_patch", parsed(PATCH))) == PATCHED
    assert list(named_files("shell", parsed(PATCH))) == []


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", '"a.py"', "[" * 100_000, '{"path": NaN}'])
def test_odd_arguments_name_no_files(arguments: str) -> None:
    assert list(named_files("read_file", parsed(arguments))) == []


@pytest.mark.parametrize("tool", WRITING_TOOLS)
def test_the_tools_whose_arguments_are_cut_write(tool: str) -> None:
    assert list(named_files(tool, parsed('{"path": "a.py"}'))) == [("written", "a.py")]


@pytest.mark.parametrize(
    ("tool", "arguments", "file"),
    [
        ("read_file", {"path": r"D:\proj\a.go"}, "D$/proj/a.go"),
        ("edit", {"path": "src/a.py", "old_string": "b.py"}, "src/a.py"),
        ("read_many_files", {"paths": ["a.py", "b.py"]}, ""),
        ("bash", {"command": "sed -n 1,60p 'src/my.app/a.py'"}, "src/my.app/a.py"),
        ("shell", {"command": ["bash", "-lc", r"type D:\proj\a.go"]}, "D$/proj/a.go"),
        ("bash", {"command": "diff a.py b.py"}, ""),
        ("bash", {"command": 'gh pr comment 7 --body "Renamed it in a.py"'}, ""),
        ("bash", {"command": "sed -i 's/old b.py/new/' a.py"}, "a.py"),
        ("grep", {"pattern": "load", "path": "src"}, ""),
        ("bash", {"command": f"cat a.py {'x ' * 2_000}"}, ""),
        ("bash", {}, ""),
    ],
)
def test_the_only_file_of_a_call(tool: str, arguments: dict[str, Any], file: str) -> None:
    assert target(tool, arguments, argument_text(arguments)) == file


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("src/a.go:12:5: aName\nsrc/b.go:3: bName", {"src/a.go": "aName", "src/b.go": "bName"}),
        ("/src/a.go-12-func aName\n/src/a.go:13:\tbName\n--", {"/src/a.go": "aName bName"}),
        (r"D:\p\a.go:12: aName", {"D$/p/a.go": "aName"}),
        ("src/a.ts(12,5): error TS2304: 'aName'\n  at src/b.ts:3:4", {"src/a.ts": "aName"}),
        ('  File "/p/a.py", line 3, in aName\n    bName()\n\ncName', {"/p/a.py": "aName bName", "": "cName"}),
        ("error[E0425]: x\n  --> src/a.rs:3:5\n3 | aName", {"src/a.rs": "aName"}),
        ("--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n+aName\n\nbName", {"src/a.py": "aName", "": "bName"}),
        ("*** Update File: a.py\n+aName\n*** Add File: b.py\n+bName", {"a.py": "aName", "b.py": "bName"}),
        ("src/a.go\n12:aName\n\nsrc/b.go\n3:bName", {"src/a.go": "aName", "src/b.go": "bName"}),
        ("a.py\nb.py\naName", {"": "aName"}),
        ("a.go:1: aName\n" + PIECE * "x" + "\nb.go:2: bName\n" + PIECE * "x\n" + "c.go:3: cName",
         {"a.go": "aName", "b.go": "bName", "c.go": "cName"}),
    ],
)  # fmt: skip
def test_the_files_that_lines_name(text: str, files: dict[str, str]) -> None:
    names = ("aName", "bName", "cName")
    found = {part.file: " ".join(name for name in names if name in part.text) for part in parts("result", text)}
    assert {file: inside for file, inside in found.items() if inside} == files


READS: list[tuple[str, dict[str, Any]]] = [
    ("Read", {"file_path": "/repo/AGENTS.md", "offset": 1, "limit": 20}),
    ("read_file", {"path": "./docs/CLAUDE.local.md"}),
    ("read_file", {"path": ".clinerules/style.md", "task_progress": "- [ ] read the rules"}),
    ("read", {"filePath": "C:\\work\\agents.md"}),
    ("view", {"path": ".cursor/rules/style.mdc"}),
    ("shell", {"command": ["bash", "-lc", "cat AGENTS.md"]}),
    ("exec_command", {"cmd": "sed -n '1,200p' AGENTS.md", "workdir": "/repo", "justification": "Read the rules"}),
    ("Bash", {"command": 'head -n 50 "docs/AGENTS.md"', "description": "Read the rules"}),
    ("mcp__filesystem__read_text_file", {"path": "/repo/AGENTS.md"}),
    ("Read", {"file_path": "~/.codex/AGENTS.md"}),
    ("Skill", {"skill": "invoice", "args": "of May"}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("WebFetch", {"url": "https://example.com/AGENTS.md", "prompt": "Read it"}),
    ("read_file", {"path": "https://example.com/AGENTS.md"}),
    ("Write", {"file_path": "AGENTS.md", "content": "Always obey."}),
    ("send_mail", {"subject": "AGENTS.md", "path": "AGENTS.md"}),
    ("read_file", {"path": "README.md"}),
    ("read_file", {"path": "node_modules/x/AGENTS.md"}),
    ("read_file", {"path": "../AGENTS.md"}),
    ("read_file", {"path": "a/%2e%2e/AGENTS.md"}),
    ("read_file", {"path": "AGENTS.md -> /etc/motd"}),
    ("read_file", {"path": "//server/share/AGENTS.md"}),
    ("read_file", {"path": "AGENTS.md", "repo": "other/project"}),
    ("mcp__github__get_file_contents", {"path": "AGENTS.md"}),
    ("Read", {"file_path": "/usr/lib/x/AGENTS.md"}),
    ("Read", {"file_path": "/home/u/.cache/x/AGENTS.md"}),
    ("bash", {"command": "cat AGENTS.md README.md"}),
    ("bash", {"command": "git show fork:AGENTS.md"}),
    ("bash", {"command": "cat $(find / -name x)/AGENTS.md"}),
    ("bash", {"command": "cat AGENTS.md", "workdir": "node_modules/x"}),
    ("Skill", {"skill": "https://example.com/skill"}),
]


@pytest.mark.parametrize(("tool", "fields"), READS)
def test_a_read_of_rules_is_recognized(tool: str, fields: dict[str, Any]) -> None:
    assert rules_read(tool, json.dumps(fields), [])
    assert any(mark in f"{tool}{json.dumps(fields)}".encode() for mark in RULE_MARKS)


@pytest.mark.parametrize(("tool", "fields"), OTHERS)
def test_other_calls_that_mention_such_a_file_are_not(tool: str, fields: dict[str, Any]) -> None:
    assert rules_read(tool, json.dumps(fields), []) is None


@pytest.mark.parametrize("arguments", ["", "AGENTS.md", "[]", "{", '{"path": "AGENTS.md", "x": "' + "y" * 3000 + '"}'])
def test_arguments_in_other_forms_are_not(arguments: str) -> None:
    assert rules_read("read_file", arguments, []) is None


@pytest.mark.parametrize(
    "text",
    [
        "<cwd>/srv/App</cwd>",
        "Primary working directory: /srv/app\nIs a git repository: true",
        "# Current Workspace Directory (/srv/app) Files",
        "I'm currently working in the directory: /srv/app\n",
        "I am working in a workspace with the following folders:\n- /srv/app",
        "The current working directory is `/srv/app`.",
    ],
)
def test_the_folder_that_a_client_states_is_the_project(text: str) -> None:
    folders = project_folders([text])
    assert set(folders) == {"/srv/app"}
    inside = [
        "/srv/app/AGENTS.md",
        "/srv/app/pkg/AGENTS.md",
        "/srv/AGENTS.md",
        "AGENTS.md",
        "/home/u/.claude/CLAUDE.md",
    ]
    outside = ["/AGENTS.md", "/srv/apps/AGENTS.md", "/srv/other/AGENTS.md", "/srv/app/node_modules/x/AGENTS.md"]
    for path in (*inside, *outside):
        assert (rules_read("Read", json.dumps({"file_path": path}), folders) is not None) == (path in inside), path


def test_other_folders_in_a_prompt_are_not_the_project() -> None:
    assert project_folders(["Type /help. Your workspace and/or repo. In the current folder use /init."]) == []


@pytest.mark.parametrize("piece", ["cwd", "working directory: ", "/a", " ", "<cwd>/", "a/"])
def test_folders_are_found_in_linear_time(piece: str) -> None:
    assert len(project_folders([piece * (300_000 // len(piece))])) <= 150_000
