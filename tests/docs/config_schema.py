"""The JSON Schema of the configuration, for editors. ``python -m tests.docs.reference`` writes it."""

import ast
import inspect
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from proxy.config.fields import KINDS, PRICE_STEP, Section
from proxy.config.settings import WrittenSettings

SCHEMA_FILE = Path(__file__).parents[2] / "proxy" / "config" / "schema.json"

LEVELS = 4
"""Sections inside sections. A section has the descriptions of those that were built before it."""

# A number or truth value may also come from the environment.
_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def schema_text() -> str:
    """Return the text of the published schema."""
    _describe(_subclasses(Section))
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **WrittenSettings.model_json_schema()}
    return json.dumps(_with_variables(schema), indent=2, ensure_ascii=False) + "\n"


def _describe(models: Sequence[type[BaseModel]]) -> None:
    """Give settings the docstrings below them. At each start of the proxy, pydantic would take 0.1 s for that."""
    for model in models:
        for name, field in model.model_fields.items():
            texts = (docstrings(base).get(name) for base in model.__mro__ if issubclass(base, Section))
            field.description = field.description or next(filter(None, texts), None)
    for _ in range(LEVELS):
        for model in models:
            model.model_rebuild(force=True)


def _subclasses(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [each for child in model.__subclasses__() for each in (child, *_subclasses(child))]


@cache
def docstrings(model: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, or the values of an enumeration.

    A class that was made by a function has none.
    """
    try:
        source = inspect.getsource(model)
    except OSError:
        return {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    return {
        target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign | ast.Assign)
        for target in (field.targets if isinstance(field, ast.Assign) else [field.target])
        if isinstance(target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _with_variables(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_variables(item) for item in node]
    if not isinstance(node, dict):
        return node
    changed = {key: _VALUES.get(key, _with_variables)(value) for key, value in node.items()}
    if changed.get("type") not in ("integer", "number", "boolean"):
        return changed
    outer = {key: changed.pop(key) for key in ("title", "description", "default") if key in changed}
    return {**outer, "anyOf": [changed, _VARIABLE]}


def _value(node: Any) -> Any:
    """Return a default as a file states it. A condition omits its unset parts."""
    if isinstance(node, list):
        return [_value(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _value(value) for key, value in node.items() if not (key in (*KINDS, PRICE_STEP) and value is None)}


# These keys contain values, not schemas.
_VALUES = {"default": _value, "enum": _value}
