"""Files that import each other must be read together, so few of them do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 3

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "proxy").rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere: in functions and for types, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            inner = [f"{node.module}.{one.name}" for one in node.names]
            yield from (name if name in MODULES else node.module for name in inner)


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += graph[one]
    return found


def test_circles_are_small() -> None:
    graph = {name: {*imported(path)} - {name} for name, path in MODULES.items()}
    reached = {name: reachable(name, graph) for name in graph}
    circles = {frozenset(other for other in found if name in reached[other]) for name, found in reached.items()}
    assert [sorted(circle) for circle in circles if len(circle) > MOST] == []
