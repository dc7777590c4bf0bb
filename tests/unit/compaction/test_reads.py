"""Test which reads of files a later message makes superfluous."""

from typing import Any

import pytest

from proxy.compaction.stages.duplicates import Superseded, superseded_reads
from tests.kit.conversations import FORMAT, assistant, call, result, turns

TEXT = "line of a file\n" * 40


def found(*exchanges: tuple[str, dict[str, Any], str]) -> dict[int, Superseded]:
    """Return the superseded reads of calls with their results. The result of call ``n`` is message ``2n + 1``."""
    messages = []
    for number, (tool, arguments, text) in enumerate(exchanges):
        messages += [assistant(None, call(f"c{number}", tool, **arguments)), result(f"c{number}", text)]
    return superseded_reads(turns(messages), FORMAT)


def read(path: str = "a.py", text: str = TEXT, tool: str = "read_file", **arguments: Any) -> tuple[str, Any, str]:
    return tool, {"path": path, **arguments}, text


def write(path: str = "a.py", text: str = "ok", tool: str = "edit_file") -> tuple[str, Any, str]:
    return tool, {"path": path, "content": "x"}, text


def test_a_read_counts_until_the_file_is_read_again_or_written() -> None:
    assert found(read(), read("b.py"), read(), write("./a.py"), write()) == {
        1: Superseded(5, "read", "a.py"),
        5: Superseded(7, "written", "a.py"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "Error: old_string not found",
        "The tool use was rejected",
        "",
        "No match in a.py",
        "Could not find the exact text",
    ],
)
def test_a_change_that_failed_outdates_nothing(text: str) -> None:
    assert found(read(), write(text=text)) == {}


def test_a_name_that_resembles_an_error_is_no_failure() -> None:
    assert 1 in found(read("errors.py"), write("errors.py", "The file errors.py has been updated."))


def test_a_call_without_a_result_outdates_nothing() -> None:
    body = turns(
        [assistant(None, call("a", "read", path="x")), result("a", TEXT), assistant(None, call("b", "edit", path="x"))]
    )
    assert superseded_reads(body, FORMAT) == {}


@pytest.mark.parametrize(
    ("earlier", "later", "covered"),
    [
        ({}, {}, True),
        ({"offset": 10, "limit": 5}, {"offset": 10, "limit": 5}, True),
        ({"offset": 10, "limit": 5}, {"offset": 1, "limit": 14}, True),
        ({"offset": 10, "limit": 5}, {"offset": 1, "limit": 13}, False),
        ({"offset": 10, "limit": 5}, {}, True),
        ({"offset": 5000, "limit": 5}, {}, False),
        ({"offset": 10}, {"offset": 10}, True),
        ({"offset": 10}, {}, False),
        ({"limit": 50}, {"limit": 60}, True),
        ({"limit": 60}, {"limit": 50}, False),
        ({"start_line": 3, "end_line": 9}, {"start_line": 1, "end_line": 9}, True),
        ({"startLine": 3, "endLine": 9}, {"startLine": 3, "endLine": 9}, True),
        ({"view_range": [3, 9]}, {"view_range": [1, 20]}, True),
        ({"view_range": [3, 9]}, {"view_range": [4, 20]}, False),
        ({"view_range": [3, -1]}, {"view_range": [3, -1]}, True),
        ({"offset": "10", "limit": 5}, {"offset": "10", "limit": 5}, False),
        ({"pages": "1-2"}, {"pages": "3-4"}, False),
        ({"pages": "1-2"}, {"pages": "1-2"}, True),
    ],
)
def test_lines_are_compared(earlier: dict[str, Any], later: dict[str, Any], covered: bool) -> None:
    assert (1 in found(read(**earlier), read(**later))) is covered


def test_other_tools_and_unknown_shapes_are_left() -> None:
    assert found(read(tool="search"), read(tool="search")) == {}
    assert found(read(), read(tool="view_file")) == {}
    several = ("read_many_files", {"paths": ["a.py", "b.py"]}, TEXT)
    assert found(several, several, write()) == {}
    assert found(("bash", {"command": "cat a.py"}, TEXT), write()) == {}


def test_a_patch_and_a_view_are_recognized() -> None:
    patch = {"input": "*** Begin Patch\n*** Update File: a.py\n@@\n-x\n+y\n*** End Patch"}
    assert 1 in found(read(), ("apply_patch", patch, "Done!"))
    view = ("str_replace_based_edit_tool", {"command": "view", "path": "a.py"}, TEXT)
    change = ("str_replace_based_edit_tool", {"command": "str_replace", "path": "a.py", "old_str": "x"}, "Edited.")
    assert found(view, view, change) == {1: Superseded(3, "read", "a.py"), 3: Superseded(5, "written", "a.py")}
    assert found(view, ("mcp__files__write_file", {"path": "a.py", "content": "x"}, "ok"))[1].event == "written"
