"""Test searches in linear time."""

from __future__ import annotations

import time

import pytest

from proxy.compaction.rules import NotSearchable, search_for, whole


def test_a_pattern_matches_anywhere_in_a_text() -> None:
    search = search_for(r"TICKET-\d+")
    assert search("see TICKET-12, please")
    assert not search("see TICKET-, please")


@pytest.mark.parametrize("pattern", ["(?=a)", r"(a)\1", "a++b(", "("])
def test_an_unsupported_pattern_is_rejected(pattern: str) -> None:
    with pytest.raises(NotSearchable):
        search_for(pattern)


def test_nested_repetitions_take_linear_time() -> None:
    search = search_for("(a+)+$")
    before = time.process_time()
    assert not search("a" * 100_000 + "b")
    assert time.process_time() - before < 5


def test_lone_surrogates_are_replaced_and_pairs_are_joined() -> None:
    assert whole("plain ünicode") == "plain ünicode"
    assert whole("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"
    assert whole("\ud83d\ude00") == "\N{GRINNING FACE}"
