"""Test which messages a policy pins."""

import pytest

from proxy.compaction.rules import NotSearchable, Pins
from tests.kit.conversations import FORMAT, assistant, call, result, turns, user

BODY = turns([user("KEEP this"), assistant(None, call("a", "read_file", path="src/KEEP.py")), result("a", "other")])


def test_without_patterns_no_message_is_pinned() -> None:
    assert Pins().among(BODY, FORMAT) == frozenset()
    assert not Pins().holds(BODY[0], FORMAT)


def test_a_lone_surrogate_is_searched_too() -> None:
    assert Pins(("KEEP",)).holds(turns([user("\ud800 KEEP")])[0], FORMAT)


def test_an_unsupported_expression_is_rejected() -> None:
    with pytest.raises(NotSearchable):
        Pins((r"(a)\1",))
