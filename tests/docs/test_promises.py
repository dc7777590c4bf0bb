"""docs/promises.md: each promise names tests that exist, and no behavior is left out."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)[1:]
BEHAVIORS = "tests/product/behaviors"


def named(section: str) -> list[tuple[str, str]]:
    """Return the tests that a section names, as file and function. Without a function, all of the file's are meant."""
    (home,) = re.findall(r"^Tests: `(.+)`$", section, re.MULTILINE)
    tests = re.findall(r"`(?:(tests/[\w/]+\.py)(?:::)?)?(test_\w+)?`", section.partition("\n- ")[2])
    return [(path or home, test) for path, test in tests if path or test]


def functions(path: Path) -> set[str]:
    """Return the names of the functions in a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, kinds)}


NAMED = sorted({test for section in SECTIONS for test in named(section)})


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_each_promise_names_a_test(section: str) -> None:
    promises = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    assert promises
    assert [promise for promise in promises if not re.search(r"`(?:tests/[\w/]+\.py(?:::)?|test_)\w*`", promise)] == []


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_each_named_test_exists(file: str, test: str) -> None:
    assert (ROOT / file).exists()
    assert not test or test in functions(ROOT / file)


def test_each_behavior_is_promised() -> None:
    existing = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / BEHAVIORS).glob("test_*.py")
        for name in functions(path)
        if re.match(r"test_\d+_", name)
    }
    assert {(file, test) for file, test in NAMED if file.startswith(BEHAVIORS)} == existing
