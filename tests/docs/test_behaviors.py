"""docs/behaviors.md: a hundred behaviors, each with all of its tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "behaviors.md").read_text(encoding="utf-8")


def documented() -> dict[int, set[tuple[str, str]]]:
    """Return the tests of each behavior, as file and function, in the order of the document."""
    found: dict[int, set[tuple[str, str]]] = {}
    file = ""
    for line in DOCUMENT.splitlines():
        if named := re.fullmatch(r"Tests: `(tests/[\w/]+\.py)`", line):
            file = named[1]
        elif row := re.fullmatch(r"\| (\d+) \| (.+\.) \| (.+) \|", line):
            assert int(row[1]) not in found, f"{row[1]} is listed twice"
            found[int(row[1])] = {(file, test) for test in re.findall(r"`(\w+)`", row[3])}
    return found


def existing() -> dict[int, set[tuple[str, str]]]:
    """Return the tests of each behavior in the suite, as file and function."""
    found: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for path in (ROOT / "tests" / "product" / "behaviors").glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (numbered := re.match(r"test_(\d+)_", node.name)):
                found[int(numbered[1])].add((path.relative_to(ROOT).as_posix(), node.name))
    return found


def test_a_hundred_behaviors_are_listed_in_order() -> None:
    assert list(documented()) == list(range(1, 101))


def test_each_behavior_names_its_tests_and_no_other() -> None:
    assert documented() == existing()
