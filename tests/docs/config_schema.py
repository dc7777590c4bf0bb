"""The JSON Schema of the configuration, for editors. ``python -m tests.docs.config_schema`` regenerates it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proxy.config.fields import KINDS, PRICE_STEP
from proxy.config.settings import written_settings

SCHEMA_FILE = Path(__file__).parents[2] / "proxy" / "config" / "schema.json"

# A number or truth value may also come from the environment.
_VARIABLE = {"type": "string", "pattern": r"\$\{"}


def schema_text() -> str:
    """Return the text of the published schema."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **written_settings().model_json_schema()}
    return json.dumps(_with_variables(schema), indent=2, ensure_ascii=False) + "\n"


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


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
