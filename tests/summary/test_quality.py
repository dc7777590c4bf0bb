"""Whether what a model wrote may stand for a conversation."""

from __future__ import annotations

import pytest

from proxy.summary.quality import SummaryRejected, Written, checked

from .conversation import words


def check(text: str, *, source: int = 100, most: int = 50, reason: str | None = "stop", refused: bool = False) -> str:
    return checked(Written(text, reason, refused), source_tokens=source, max_tokens=most, count=words)


def test_a_good_one_comes_back_trimmed() -> None:
    assert check("\n The build was fixed. \n") == "The build was fixed."


@pytest.mark.parametrize(
    "text",
    ["", "  \n\t ", "I'm sorry, but I can't help with that.", "I’m unable to do this.", "**I cannot assist** with it",
     "As an AI model I have no notes.", "Sorry, no."],
)  # fmt: skip
def test_nothing_and_refusals_are_rejected(text: str) -> None:
    with pytest.raises(SummaryRejected):
        check(text)


def test_long_notes_that_begin_with_a_users_apology_are_no_refusal() -> None:
    text = "I'm sorry was what the user said first. " + "Then the work went on. " * 20
    assert check(text, source=1000, most=500) == text.strip()


def test_what_was_broken_off_refused_or_no_smaller_than_its_source_is_rejected() -> None:
    with pytest.raises(SummaryRejected, match="broken off"):
        check("The build", reason="length")
    with pytest.raises(SummaryRejected, match="refused"):
        check("The build was fixed.", refused=True)
    assert check("word " * 49, source=50)
    with pytest.raises(SummaryRejected, match="no smaller"):
        check("word " * 50, source=50)


def test_what_is_over_the_cap_keeps_its_first_lines_whole() -> None:
    assert check("one two three\nfour five\nsix seven eight", most=7) == "one two three\nfour five"
    with pytest.raises(SummaryRejected, match="one line"):
        check("word " * 60, most=20)


def test_the_reason_never_quotes_the_text() -> None:
    with pytest.raises(SummaryRejected) as caught:
        check("I'm sorry about SECRET")
    assert "SECRET" not in str(caught.value)
