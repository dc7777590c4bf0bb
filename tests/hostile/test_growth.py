"""Every expression of the package takes linear time on texts made from the expression itself."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import proxy
from tests.kit.steps import Counted, TooMany, sized, texts

BOUNDED = {
    "proxy.compaction.stages.lossless._TOKEN": "reads valid JSON, in which each string ends",
    "proxy.config.patterns._INEXACT": "an operator's expression has 1,000 characters at most",
    "proxy.dialects.answers._END": "matched at a few places of an answer's end",
}
"""Expressions that only read short texts or the operator's, with the reason."""

SIZES = (160, 640)
MOST_GROWTH = 8
"""Four times the text takes 4 times the steps in linear time, and 16 times in quadratic time."""

MOST_STEPS = 200_000
"""Steps on the shorter text. An expression that takes exponential time takes more."""

METHODS = {"match", "fullmatch", "search", "finditer", "findall", "sub", "subn", "split"}


@functools.cache
def expressions() -> dict[str, re.Pattern[Any]]:
    """Return the compiled expressions in the package's modules and classes, by their places."""
    found: dict[int, tuple[str, re.Pattern[Any]]] = {}

    def visit(value: Any, place: str, depth: int = 0) -> None:
        if isinstance(value, re.Pattern):
            found.setdefault(id(value), (place, value))
        elif isinstance(value, dict) and depth < 4:
            visit(list(value.values()), place, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset) and depth < 4:
            for number, one in enumerate(value):
                visit(one, f"{place}[{number}]", depth + 1)
        elif hasattr(type(value), "__dataclass_fields__") and depth < 4:
            for name in value.__dataclass_fields__:
                visit(getattr(value, name, None), f"{place}.{name}", depth + 1)
        elif isinstance(value, type) and value.__module__.startswith("proxy") and depth < 2:
            for name, one in list(vars(value).items()):
                visit(one, f"{place}.{name}", depth + 1)

    for module in pkgutil.walk_packages(proxy.__path__, "proxy."):
        if ".demo" not in module.name and not module.name.endswith("__main__"):
            for name, value in list(vars(importlib.import_module(module.name)).items()):
                visit(value, f"{module.name}.{name}")
    for module_name, parts in modules():
        for node in ast.walk(parts):
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), method), [ast.Constant(str() as pattern), *_]):
                    if method in METHODS and ".demo" not in module_name:
                        found.setdefault(id(node), (f"{module_name}:{node.lineno}", re.compile(pattern)))
    return dict(found.values())


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the names and trees of the package's modules."""
    root = Path(proxy.__file__).parent
    for path in root.rglob("*.py"):
        yield (
            ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"),
            ast.parse(path.read_bytes()),
        )


def owner(module: str, of: ast.expr) -> str:
    """Return a name for the value on which a method is called. Private names belong to a module, others to a folder."""
    if isinstance(of, ast.Name):
        return f"{module}.{of.id}" if of.id.startswith("_") else of.id
    return f"{'.'.join(module.split('.')[:2])}:{of.attr}" if isinstance(of, ast.Attribute) else ""


@functools.cache
def uses() -> dict[str, set[str]]:
    """Return the methods with which the package uses expressions. One that gets a place may begin anywhere."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, parts in modules():
        placed = {
            node.func
            for node in ast.walk(parts)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("match", "fullmatch")
            and len(node.args) > 1
        }
        for node in ast.walk(parts):
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                alone = node.attr in ("match", "fullmatch") and node not in placed
                found[owner(module, node.value)].add(node.attr if alone else "search")
    return found


def methods(place: str) -> set[str]:
    """Return how the package uses an expression. One that it passes on may be used in any way."""
    module, _, name = re.sub(r"(\[\d+\])+$", "", place).rpartition(".")
    keys = (place, name) if name.isupper() or name.startswith("_") else ()
    keys = (*keys, f"{'.'.join(module.split('.')[:2])}:{name}")
    return set().union(*(uses().get(key, ()) for key in keys)) or {"search", "fullmatch"}


def slow(expression: re.Pattern[Any], how: set[str]) -> list[tuple[str, tuple[str, str, str]]]:
    """Return the methods and texts with which an expression takes more than linear time."""
    counted, found = Counted(expression), []
    for method in how:
        for text in texts(expression):
            try:
                steps = counted.count(method, sized(text, SIZES[0]), MOST_STEPS)
                counted.count(method, sized(text, SIZES[1]), MOST_GROWTH * steps + 1000)
            except TooMany:
                found.append((method, text))
    return found


@pytest.fixture(autouse=True)
def deep() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("place", sorted(expressions()))
def test_an_expression_takes_linear_time(place: str) -> None:
    found = slow(expressions()[place], methods(place))
    assert bool(found) == (place in BOUNDED), found


PLANTED = [
    r"\s+$",
    r'"(?:[^"\\]|\\.)*"',
    r"name=\r\n(?:[^\r\n]+\r\n)*\r\n",
    r"\S*/\S*",
    r"\w+\d",
    r"a.*b",
    r"<(\w+)>[^<]*>x(?=.*end)",
    r"(?<=\d)\d*,",
    r"\d++(?:,\d{3})*+ of",
    r"x.{0,1000}y",
    r"(?:a+)+b",
    r"[+](?>\w+)!|\w+@",
]


@pytest.mark.parametrize("pattern", PLANTED)
def test_a_slow_expression_is_found(pattern: str) -> None:
    assert slow(re.compile(pattern), {"search"})


@pytest.mark.parametrize("pattern", [r"gpt-\d+.*-mini.*", r"\s*x\s*\Z\s*y|a*a*b", r"(?=A.*\nB.*\nC)", r"(?:a|aa)*b"])
def test_an_expression_that_is_slow_from_one_place_is_found(pattern: str) -> None:
    assert slow(re.compile(pattern, re.DOTALL), {"match"})


def test_the_counted_matcher_finds_the_same_as_re() -> None:
    for place, expression in expressions().items():
        counted = Counted(expression, exact=True)
        for text in texts(expression):
            whole = sized(text, 40)
            raw: Any = whole.encode("latin-1") if isinstance(expression.pattern, bytes) else whole
            assert counted.run("search", whole) == [found.span() for found in expression.finditer(raw)], (place, whole)
