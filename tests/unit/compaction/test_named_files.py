"""The files that tool calls name, and what the calls did with them."""

import json
from typing import Any

import pytest

from proxy.compaction.named_files import WRITING_TOOLS, named_files, parsed

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
