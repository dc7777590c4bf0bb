"""Test which calls read rules of the project."""

import json
from typing import Any

import pytest

from proxy.compaction.named_files import RULE_MARKS, project_folders, rules_read

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
def test_the_time_is_linear_for_any_text(piece: str) -> None:
    assert len(project_folders([piece * (300_000 // len(piece))])) <= 150_000
