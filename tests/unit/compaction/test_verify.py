"""Test the check for calls and results."""

from typing import Any

import pytest

from proxy.compaction.turn import faults
from tests.kit.conversations import assistant, call, result, turns, user

LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], 0),
        ([user("go"), assistant("done")], 0),
        ([assistant(None, call("a"), call("b")), result("b", ""), result("a", "")], 0),
        ([assistant(None, call("a")), result("a", ""), assistant(None, call("a")), result("a", "")], 0),
        ([assistant(None, call("ls", "ls")), result("ls", "")], 0),
        ([LEGACY, {"role": "function", "name": "f", "content": ""}], 0),
        ([assistant(None, call("a"))], 1),
        ([assistant(None, call("a"), call("b")), result("a", ""), user("go")], 1),
        ([result("a", "")], 1),
        ([assistant(None, call("a")), result("a", ""), result("a", "")], 1),
        ([assistant(None, call("a")), user("go"), result("a", "")], 2),
        ([LEGACY, user("go")], 1),
        ([{"role": "function", "name": "f", "content": ""}], 1),
        ([assistant(None, call("a")), {"role": "tool", "content": "no id"}], 2),
    ],
)
def test_each_loose_end_counts(messages: list[Any], found: int) -> None:
    assert faults([turn.facts for turn in turns(messages)]) == found
