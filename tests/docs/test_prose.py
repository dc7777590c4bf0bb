"""Documents, docstrings, and comments follow the rules of plain technical English that a machine can check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.prose import code_findings, findings, script_findings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md") if path.parent.name != "reference"),
]

MODULES = sorted(
    str(path.relative_to(ROOT))
    for folder in (
        "bench",
        "soak",
        "scripts",
        "tests/bench",
        "tests/docs",
        "tests/hostile",
        "tests/kit",
        "tests/product",
        "tests/soak",
        "tests/unit",
    )
    for path in (ROOT / folder).rglob("*.py")
)
SCRIPTS = [
    "Dockerfile",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "deploy").rglob("*") if path.suffix in (".conf", ".yaml")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_follows_the_writing_rules(document: str) -> None:
    assert findings((ROOT / document).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_and_comments_follow_the_writing_rules(module: str) -> None:
    assert code_findings((ROOT / module).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_comments_of_scripts_follow_the_writing_rules(script: str) -> None:
    assert script_findings((ROOT / script).read_text(encoding="utf-8")) == []


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


def test_the_check_finds_docstrings_and_comments_of_modules() -> None:
    source = (
        '"""Works where a key is set."""\n'
        'X = "where"  # where\n'
        '"""The key of the\nteam stands here."""\n'
        "# Not a rule: `where`.\n"
        "# anew\n"
    )
    assert [line.split(" ", 1)[0] for line in code_findings(source)] == ["'where'", "'stands'", "'where'", "'anew'"]


def test_the_check_finds_comments_of_scripts() -> None:
    assert [line[:7] for line in script_findings("#!/bin/where\necho where\n# It works\n# where\n")] == ["'where'"]
