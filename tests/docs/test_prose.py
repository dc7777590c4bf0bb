"""The documents follow the rules of plain technical English that a machine can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.prose import findings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
]


def text_of(document: str) -> str:
    """Return the text of a document; of the changelog only the unreleased section."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)[1] if document == "CHANGELOG.md" else text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_follows_the_writing_rules(document: str) -> None:
    assert findings(text_of(document)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("It works where a key is set.", "'where' in"),
        ("Keys stand beside\nthe name.", "'stand' in"),
        ("What is kept is stored.", "a clause begins with a question word"),
        ("This is no error.", "'is no' in"),
        ("| setting | It has as many\n", None),
        ("- " + "word " * 26 + "\n", "over 25 words"),
        ("| " + "word " * 26 + "| a |\n", "over 25 words"),
        ("`where` is a word of SQL.\n\n    where x\n\n```sh\nwhere\n```\n", None),
        ("![where](a.svg) Read [the list](where.md). What does it do?\n", None),
        ("# What it does\n\nThere is no such model. The stand-in answers.\n", None),
    ],
)
def test_the_check_finds_each_kind_and_skips_code(text: str, problem: str | None) -> None:
    found = findings(text)
    assert [line.startswith(problem) for line in found] == [True] if problem else found == []
