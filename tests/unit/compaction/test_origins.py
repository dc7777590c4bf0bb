"""Test the files that texts come from."""

from typing import Any

import pytest

from proxy.compaction.identifiers import PIECE
from proxy.compaction.named_files import argument_text
from proxy.compaction.summary_message import parts_by_file as parts
from proxy.compaction.summary_message import target


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
