"""Test the digest, which is made without a model."""

from __future__ import annotations

import pytest

from proxy.summary.extract import extract
from tests.kit.summary_conversation import FORMAT, calling, turn, words

STEPS = [
    turn("user", "fix it"),
    calling("read_file", '{"path": "a.py"}', "I look at it."),
    turn("tool", "line one\nline   two\n" + "word " * 100, tool_call_id="a"),
    turn("assistant", "Found it."),
]


def test_what_the_assistant_did_is_extracted_in_order_and_the_users_words_are_not() -> None:
    text = extract(STEPS, None, 1000, FORMAT)
    lines = text.split("\n")
    assert "without a model" in lines[0]
    assert lines[1:3] == ["- I look at it.", '- called read_file({"path": "a.py"})']
    assert lines[3].startswith("  → line one line two word")
    assert len(lines[3]) < 130
    assert lines[4] == "- Found it."
    assert "fix it" not in text


def test_the_newest_steps_are_chosen() -> None:
    many = [turn("assistant", f"step {n}") for n in range(100)]
    text = extract(many, None, 60, FORMAT)
    assert text.endswith("- step 98\n- step 99")
    assert "step 5\n" not in text


@pytest.mark.parametrize("most", [30, 60, 200, 1000])
def test_it_holds_its_cap_with_earlier_notes_at_half(most: int) -> None:
    text = extract(STEPS * 50, "earlier notes " * 500, most, FORMAT)
    assert words(text) <= most
    assert "earlier notes" in text or most == 30
    assert "- Found it." in text or most == 30


def test_short_earlier_notes_stay_whole() -> None:
    assert "\nThe user wants a fix.\n" in extract(STEPS, "The user wants a fix.", 500, FORMAT)
