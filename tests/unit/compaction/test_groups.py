"""Test groups of messages."""

from __future__ import annotations

from proxy.compaction.turn import group_starts, head_length
from tests.kit.conversations import assistant, call, result, system, turns, user


def test_a_group_is_a_message_with_all_results_behind_it() -> None:
    body = turns(
        [
            user("go"),
            assistant(None, call("a"), call("b")),
            result("b", "2"),
            result("a", "1"),
            system("be careful"),
            assistant("done"),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
            {"role": "function", "name": "f", "content": "x"},
        ]
    )
    assert group_starts(body) == [0, 1, 4, 5, 6]


def test_results_without_a_call_belong_to_what_is_before_them() -> None:
    assert group_starts(turns([result("a", "x"), result("b", "x"), user("go"), result("c", "x")])) == [0, 2]
    assert group_starts([]) == []


def test_the_head_is_the_leading_system_and_developer_messages() -> None:
    head = [system("a"), {"role": "developer", "content": "b"}]
    assert head_length(turns([*head, user("go"), system("later")])) == 2
    assert head_length(turns(head)) == 2
    assert head_length(turns([user("go")])) == 0
    assert head_length([]) == 0
