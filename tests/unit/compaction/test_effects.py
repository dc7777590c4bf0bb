"""Texts with reminders at their ends."""

import pytest

from proxy.compaction.effects import COUNTER, note_key, split_notes

A, B = "<system-reminder>\nRule A.\n</system-reminder>", "<system_reminder>Rule B.</system_reminder>"
CONTEXT = "# AGENTS.md instructions for /w\n\n<INSTRUCTIONS>\nBe brief.\n</INSTRUCTIONS>"


@pytest.mark.parametrize(
    ("text", "notes", "rest"),
    [
        ("Go on.", [], "Go on."),
        (f"{A}\n\n{B}", [A, B], ""),
        (f"{A}\nGo on.\n\n{B}\n", [A, B], "Go on."),
        (f"The tag {A}", [], f"The tag {A}"),
        (f"{A} Go on.", [A], "Go on."),
        ("<system-reminder>open", [], "<system-reminder>open"),
        ("open</system-reminder>", [], "open</system-reminder>"),
        (CONTEXT, [], CONTEXT),
    ],
)
def test_reminders_at_both_ends_are_split_off(text: str, notes: list[str], rest: str) -> None:
    assert split_notes(text) == (notes, rest)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Today's date is 2026-11-28.", "Today's date is 2026-11-29.", True),
        ("12% of the context is left.", "11% of the context is left.", True),
        ("Rule A.", "Rule  A.", True),
        ("Rule A.", "Rule B.", False),
        ("Read src/v1/a.py first.", "Read src/v2/a.py first.", False),
        ("Tools:\nA\nB 1", "Tools:\nA\nB 2", False),
    ],
)
def test_equal_reminders_have_one_key(one: str, other: str, same: bool) -> None:
    keys = [note_key(f"<system-reminder>\n{text}\n</system-reminder>") for text in (one, other)]
    assert (keys[0] == keys[1]) is same


@pytest.mark.parametrize("text", ["<total_tokens>149000 tokens left</total_tokens>", "Token usage: 12345/200000"])
def test_a_line_that_counts_is_a_counter(text: str) -> None:
    assert note_key(f"<system-reminder>{text}</system-reminder>").startswith(COUNTER)
