"""Ranked search in passages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from proxy.recall.search import Index, Passage

TEXTS = [
    "the deployment failed because the port was taken",
    "def compute_total(items): return sum(items)  # in billing/total.py",
    "数据库的密码是向日葵",
    'quotes "inside" and operators AND OR NOT NEAR(',
    "the retries are 7, the timeout is 30",
]
PASSAGES = [Passage(number, "user", 0, text) for number, text in enumerate(TEXTS)]


def search(passages: Sequence[Passage], query: str, limit: int) -> list[Passage]:
    with contextlib.closing(Index(passages)) as index:
        return index.search(query, limit)


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
