"""Test the files that texts come from."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.compaction.identifiers import PIECE
from proxy.compaction.named_files import argument_text
from proxy.compaction.origins import parts, target
from proxy.compaction.summary_message import collect_names
from tests.kit.conversations import FORMAT, Message, assistant, call, result, turns


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


def test_the_letters_of_a_diff_are_no_folders() -> None:
    diff = "diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n+aName"
    assert parts("result", diff) == [("result", "src/a.py\nsrc/a.py\nsrc/a.py\n+aName", "src/a.py")]


def test_lines_without_a_file_belong_to_that_of_the_command() -> None:
    found = {part.file: part.text for part in parts("result", "aName\nb.py:1: bName", "a.py")}
    assert found == {"a.py": "aName", "b.py": "b.py  bName"}
    assert parts("result", "aName", "a.py") == [("result", "aName", "a.py")]


def belonging(*messages: Message) -> dict[str, str]:
    found = collect_names(turns(list(messages)), None, FORMAT)
    return {name: mention.file for name, mention in found.items() if mention.kind == "name"}


def test_results_belong_to_the_file_of_their_call() -> None:
    read, edit = call("a", "read_file", path="a.py"), call("b", "edit", path="b.py", edits=[{"new_text": "useTable"}])
    ran = call("c", "bash", command="pytest tests/test_c.py")
    assert belonging(
        assistant(None, read, edit, ran),
        result("a", "see z.py:1: loadTable"),
        result("b", "new_text set; saveTable"),
        result("c", "checkTable\nd.py:7: dropTable"),
    ) == {
        "useTable": "b.py", "loadTable": "a.py", "saveTable": "b.py",
        "checkTable": "tests/test_c.py", "dropTable": "d.py",
    }  # fmt: skip
