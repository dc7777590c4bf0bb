"""LiteLLM's provider names, read from its source because importing it takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_ENUM = "LlmProviders"


@cache
def litellm_providers() -> frozenset[str]:
    """Return the names. Raises ``RuntimeError`` if LiteLLM doesn't define them in the expected place."""
    found = importlib.util.find_spec("litellm")
    folders = [] if found is None else found.submodule_search_locations or []
    for folder in folders:
        source = (Path(folder) / "types" / "utils.py").read_text(encoding="utf-8")
        names = frozenset(_values(ast.parse(source)))
        if names:
            return names
    raise RuntimeError("Cannot find the list of providers in LiteLLM. Fix: install the version in requirements.lock")


def _values(module: ast.Module) -> list[str]:
    """Return the values of the enumeration."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == _ENUM]
    members = [node.value for found in classes for node in found.body if isinstance(node, ast.Assign)]
    return [node.value for node in members if isinstance(node, ast.Constant) and isinstance(node.value, str)]
