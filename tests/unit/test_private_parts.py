"""One module for each dependency may use its private parts, because an update may change them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED = {
    "proxy.server.http_protocol": {"uvicorn"},
    "proxy.tokens.text": {"encoding._core_bpe"},  # tiktoken's
    "proxy.upstream.connections": {"aiohttp"},
}
"""The modules that use private parts of a dependency, one for each dependency."""

_PRIVATE = re.compile(r"_[a-z]\w*")


_PYTHONS = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
"""Names that Python's own classes have."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py") and "demo" not in path.parts:
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def foreign(module: str) -> bool:
    return module.partition(".")[0] not in (*sys.stdlib_module_names, "proxy", "builtins")


def own_names() -> set[str]:
    """Return the private names that the proxy defines."""
    found: set[str] = set()
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


def names_in(code: CodeType) -> set[str]:
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def private_names(kind: type) -> set[str]:
    """Return the private names that the functions of a class use or define."""
    functions = [one for one in vars(kind).values() if inspect.isfunction(one) and one.__module__ == kind.__module__]
    used = set(vars(kind)).union(*(names_in(one.__code__) for one in functions))
    return {name for name in used - _PYTHONS if _PRIVATE.fullmatch(name)}


def inherited(module: str) -> Iterator[str]:
    """Yield the dependencies whose private parts a class of a module takes from its bases."""
    for kind in vars(importlib.import_module(module)).values():
        if not inspect.isclass(kind) or kind.__module__ != module:
            continue
        for base in kind.__mro__[1:]:
            if foreign(base.__module__) and private_names(kind) & private_names(base):
                yield base.__module__.partition(".")[0]


def accessed(path: Path, known: set[str]) -> Iterator[str]:
    """Yield private attributes of other objects that the proxy doesn't define."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not _PRIVATE.fullmatch(node.attr):
            continue
        if node.attr not in known and ast.unparse(node.value) != "self":
            yield ast.unparse(node)


@pytest.mark.long
def test_them() -> None:
    known = own_names()
    found = {}
    for name, path in modules():
        if parts := {*inherited(name), *accessed(path, known)}:
            found[name] = parts
    assert found == ALLOWED


def test_their_dependencies_have_an_upper_bound() -> None:
    """An update may change private parts. The test of each module then says which part has changed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for several in project["optional-dependencies"].values() for one in several]
    bounded = {re.split(r"[\[<>=!~]", one)[0] for one in (*project["dependencies"], *extras) if "<" in one}
    assert bounded >= {"aiohttp", "litellm", "opentelemetry-sdk", "tiktoken", "uvicorn"}
