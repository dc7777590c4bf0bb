"""Sums of usage, and bodies with further values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.hidden_rounds import add_usage, decoded, longer, with_tool, without_tool


def test_a_usage_is_the_sum_of_its_numbers() -> None:
    total: dict[str, Any] = {"in": 1, "details": {"cached": 2, "tier": "x"}, "tier": "flex", "late": None, "flag": True}
    add_usage(
        total, {"in": 2, "details": {"cached": 3, "audio": 1}, "tier": None, "late": 4, "flag": False, "new": None}
    )
    details = {"cached": 5, "tier": "x", "audio": 1}
    assert total == {"in": 3, "details": details, "tier": "flex", "late": 4, "flag": False, "new": None}


@pytest.mark.parametrize("before", ["[]", " [ ] ", "[1]", "[1 , 2 ] "])
def test_a_longer_list(before: str) -> None:
    assert json.loads(bytes(longer(before.encode(), [b"3", b'"x"']))) == [*json.loads(before), 3, "x"]


def test_a_tool_comes_last_and_can_be_removed() -> None:
    raw = b'{"tools": [ {"name": "a"} ] , "x": 1}'
    sent = with_tool(raw, b'{"name":"b"}')
    assert json.loads(sent) == {"tools": [{"name": "a"}, {"name": "b"}], "x": 1}
    assert json.loads(without_tool(sent)) == json.loads(raw)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff", b'{"a": "\xff"}', b"[" * 100_000])
def test_other_data_is_no_object(data: bytes) -> None:
    assert decoded(data) is None
