"""Texts with reminders at their ends."""

from __future__ import annotations

import pytest

from proxy.compaction.reminders import COUNTER, note_key, sparing, split_notes

A, B = "<system-reminder>\nRule A.\n</system-reminder>", "<system_reminder>Rule B.</system_reminder>"
CITING = "<system-reminder>\nTags such as <system-reminder> and </system-reminder> are a program's.\n</system-reminder>"
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


def test_elements_count_in_messages_of_the_user() -> None:
    where = "<environment_context>\n<cwd>/w</cwd>\n</environment_context>"
    assert split_notes(f"{CONTEXT}\n{where}\nGo on.", elements=True) == ([CONTEXT, where], "Go on.")
    assert split_notes("<task>Go on.</task>", elements=True) == ([], "<task>Go on.</task>")


def test_a_reminder_may_cite_its_own_tag() -> None:
    assert split_notes(f"{CITING}\nGo on.")[1] != ""
    assert split_notes("x" * 200_000 + A * 10_000)[1].startswith("x")


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


def test_the_newest_element_of_each_name_and_heading_counts() -> None:
    assert note_key(CONTEXT) == note_key(CONTEXT.replace("brief", "thorough"))
    assert note_key(CONTEXT) != note_key(CONTEXT.replace("/w", "/v"))


def test_a_shortened_result_keeps_the_reminders_at_its_end() -> None:
    assert sparing(lambda text: text[:4])(f"a long result\n\n{A}\n{B}") == f"a lo{A}\n{B}"
    assert sparing(lambda text: text[:4])(A) == A[:4]
    assert sparing(lambda text: text[:4])(f"a long result\n<system-reminder>{'x' * 9_000}</system-reminder>") == "a lo"
