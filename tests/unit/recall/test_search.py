"""Ranked search in passages."""

import contextlib
from collections.abc import Sequence

import pytest

from proxy.recall.search import Index, Match, Passage

TEXTS = [
    "the deployment failed because the port was taken",
    "def compute_total(items): return sum(items)  # in billing/total.py",
    "数据库的密码是向日葵",
    'quotes "inside" and operators AND OR NOT NEAR(',
    "the retries are 7, the timeout is 30",
]
PASSAGES = [Passage(number, "user", 0, text) for number, text in enumerate(TEXTS)]


def found(query: str, limit: int, *entries: Sequence[Passage]) -> list[Match]:
    with contextlib.closing(Index(entries)) as index:
        return index.search(query, limit)


def search(passages: Sequence[Passage], query: str, limit: int) -> list[Passage]:
    """Return the passages of all exchanges that are found, in order."""
    matches = found(query, limit, passages)
    return [
        passage
        for match in matches
        for passage in sorted({*match.passages, match.question or match.passages[0]}, key=lambda one: one.message)
    ]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("which port failed to deploy", 0),
        ("compute_total", 1),
        ("billing/total.py", 1),
        ("密码", 2),
        ('"inside" AND (', 3),
        ("retry timeout", 4),
    ],
)
def test_the_best_passage_comes_first(query: str, first: int) -> None:
    assert search(PASSAGES, query, 3)[0].message == first


@pytest.mark.parametrize("query", ["", "   ", '"""', "AND", "*", "zzz", "\0", "\ud800", "col:x", "-", "NEAR("])
def test_any_query_is_safe(query: str) -> None:
    assert len(search(PASSAGES, query, 2)) <= 2


def test_the_number_of_results_is_limited() -> None:
    assert len(search(PASSAGES * 10, "the", 5)) == 5


def chat(*texts: str) -> list[Passage]:
    """Return one passage for each message. The user begins, and roles alternate."""
    return [Passage(number, ("assistant", "user")[number % 2], 0, text) for number, text in enumerate(texts, 1)]


def test_a_question_and_its_answer_are_found_together() -> None:
    passages = chat(
        "Which cat food is good?", "Many brands are.", "And for Luna?", "The brand Purrfect suits her.", "Bye."
    )
    assert [passage.message for passage in search(passages, "Purrfect", 1)] == [3, 4]


def test_a_newer_value_comes_before_an_older_one() -> None:
    filler = ["The weather is fine.", "Indeed."] * 3
    passages = chat("My rent is 900 euros.", "I see.", *filler, "My rent is 950 euros by now.", "Noted.", *filler)
    matches = found("What is my rent in euros?", 5, passages)
    assert [(match.passages[0].message, match.rank) for match in matches] == [(9, 1), (1, 0)]


def test_a_newer_exchange_on_something_else_does_not_come_first() -> None:
    filler = ["The weather is fine.", "Indeed."] * 3
    passages = chat(
        "compute_total rounds down.", "I see.", *filler, "Which function rounds? It rounds down.", "None.", *filler
    )
    assert search(passages, "compute_total rounds", 5)[0].message == 1


def test_function_words_count_only_if_there_are_no_others() -> None:
    passages = chat("What could we do about it with you?", "Sure.", "The piano needs a tuner.", "Fine.")
    assert search(passages, "What about the piano that you need?", 1)[0].message == 3
    assert search(passages, "what about it", 1)[0].message == 1


def test_entries_are_apart() -> None:
    """Each of several shortened results is an entry of its own."""
    results = [[Passage(1, "tool", 9, f"error {name}")] for name in ("alpha", "beta", "gamma")]
    assert {match.entry for match in found("error", 5, *results)} == {0, 1, 2}


def test_a_question_that_does_not_match_is_known() -> None:
    passages = chat("And for Luna?", "The brand Purrfect suits her.", "Purrfect, thanks.", "Purrfect.")
    by_question = {match.passages[-1].message: match.question for match in found("Purrfect", 5, passages)}
    assert by_question[2] == passages[0]
    assert len(by_question) == 2
    assert [question for message, question in by_question.items() if message > 2] == [None]


def test_results_of_calls_belong_to_their_message() -> None:
    roles = ("user", "assistant", "tool", "assistant", "tool", "tool", "assistant")
    texts = ("find it", "one moment", "alpha", "again", "beta", "gamma", "done")
    passages = [Passage(number, role, 0, text) for number, (role, text) in enumerate(zip(roles, texts, strict=True), 1)]
    assert [passage.message for passage in search(passages, "alpha", 1)] == [1, 3]
    assert [passage.message for passage in search(passages, "gamma", 1)] == [6]
