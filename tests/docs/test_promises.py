"""docs/robustness.md: each promise with tests that are there, a figure, and what they were seen to fail without."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
NUMBERS = [f"R{n}" for n in range(1, 23)] + [f"S{n}" for n in range(1, 27)]


def rows() -> dict[str, list[str]]:
    """The cells of each promise by its number: promise, test, measured, seen to fail without."""
    found = {}
    for line in DOCUMENT.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"[RS]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands there twice"
            found[cells[0]] = cells[1:]
    return found


def named(text: str) -> Iterator[tuple[str, str | None]]:
    """The files of tests that a text names, each with a test in it or none; `::name` alone is in the file before."""
    file = None
    for path, test in re.findall(r"`(tests/[\w/.]*)?(?:::(\w+))?`", text):
        file = path or file
        if path or test:
            assert file is not None, f"in which file is {test}?"
            yield file, test or None


def test_every_promise_is_there() -> None:
    assert list(rows()) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_a_promise_is_whole(number: str) -> None:
    cells = rows()[number]
    assert len(cells) == 4
    assert all(cells), "promise, test, figure, and what was taken out"
    assert list(named(cells[1])), "no test is named"


@pytest.mark.parametrize(("file", "test"), sorted(set(named(DOCUMENT)), key=str))
def test_what_is_named_is_there(file: str, test: str | None) -> None:
    path = ROOT / file
    assert path.exists(), file
    if test is not None:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}
        assert test in functions, f"{file}::{test}"
