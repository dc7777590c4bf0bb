"""Render tools as providers put them into the prompt, and list the tokens that their frames add.

OpenAI puts TypeScript declarations of the tools into the prompt instead of their JSON. Their form isn't published. It
was derived from reported usage by github.com/hmarr/openai-chat-tokens and
github.com/pamelafox/openai-messages-token-helper, and gives OpenAI's own counts for the example in the cookbook "How to
count tokens with tiktoken" (105 and 101). For nested objects it is up to three tokens over. Keywords that those
sources don't cover (patterns, bounds, defaults, definitions) are added as comments, so that the count is rather too
high than too low. Other providers put the JSON itself into the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.tokens.text import dump

# Tokens around the declarations, if a request has any.
DECLARATIONS = 9
# Functions are in a system message. An existing system message shares its frame with them.
SHARED_SYSTEM = -4

# Tokens around the tools, by ``Profile.tools``. Anthropic's page on tool use states 346 for its prompt. The frame
# in a template for open models has some tens of tokens.
PROMPT: Mapping[str, int] = {"json": 40, "claude": 346}

# Tokens of tool_choice (none 1, a named tool 7 and its name) and of the older function_call (none 1, named 4 and its
# name), all measured by the sources above.
CHOICE_NONE = 1
CHOICE_TOOL = 7
CHOICE_FUNCTION = 4

# The header above a response format's schema, and the marks around its name.
RESPONSE_FORMAT = 15

# JSON Schema keywords that the declaration expresses or omits.
_EXPRESSED = frozenset(
    {
        *("type", "properties", "required", "items", "prefixItems", "enum", "const", "description", "nullable"),
        *("anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "additionalProperties"),
        *("title", "strict", "$schema", "$id"),
    }
)
_TYPES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}
# Clients can nest schemas without limit. Deeper ones count as JSON.
_DEEPEST = 40


def functions(body: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Return the request's functions, from ``tools`` and the older ``functions``, and all other tools."""
    found: list[Mapping[str, Any]] = []
    others: list[Any] = []
    for tool in _listed(body.get("tools")):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            found.append(function)
        else:
            others.append(tool)
    for function in _listed(body.get("functions")):
        (found if isinstance(function, Mapping) else others).append(function)
    return found, others


def present(tools: object) -> list[Any]:
    """Return the tools that a prompt has from the start. Those with ``defer_loading`` come when a model finds them."""
    return [_without_deferred(tool) for tool in _listed(tools) if not is_deferred(tool)]


def is_deferred(tool: object) -> bool:
    """Return whether a tool is loaded later."""
    return isinstance(tool, Mapping) and tool.get("defer_loading") is True


def _without_deferred(tool: Any) -> Any:
    inside = tool.get("tools") if isinstance(tool, Mapping) else None
    if not isinstance(inside, list) or not any(map(is_deferred, inside)):
        return tool
    return {**tool, "tools": present(inside)}


def _listed(value: object) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def typescript(functions: list[Mapping[str, Any]]) -> str:
    """Return the declarations of ``functions`` as OpenAI puts them into the prompt."""
    lines = ["namespace functions {", ""]
    for function in functions:
        lines.extend(_comment(function.get("description"), ""))
        lines.extend(_declaration(function))
        lines.append("")
    lines.append("} // namespace functions")
    return "\n".join(lines)


def _declaration(function: Mapping[str, Any]) -> Iterator[str]:
    name, parameters = dump(function.get("name", "")), function.get("parameters")
    if not isinstance(parameters, Mapping):
        yield f"type {name} = () => any;" if not parameters else f"type {name} = {dump(parameters)};"
        return
    for definitions in (parameters.get("$defs"), parameters.get("definitions")):
        if isinstance(definitions, Mapping):
            for defined, schema in definitions.items():
                yield f"type {defined} = {_type(schema, 0, 0)};"
    properties = parameters.get("properties")
    others = [key for key in ("anyOf", "oneOf", "allOf", "$ref", "items", "enum") if key in parameters]
    if others:
        yield f"type {name} = (_: {_type(parameters, 0, 0)}) => any;"
    elif isinstance(properties, Mapping) and properties:
        yield f"type {name} = (_: {{"
        yield from _properties(parameters, 0, 0)
        yield "}) => any;"
    else:
        yield f"type {name} = () => any;"


def _properties(schema: Mapping[str, Any], indent: int, depth: int) -> Iterator[str]:
    pad = " " * indent
    required = schema.get("required")
    needed = {item for item in required if isinstance(item, str)} if isinstance(required, list) else set()
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        if isinstance(inner, Mapping):
            yield from _comment(inner.get("description"), pad)
            for key in inner:
                if key not in _EXPRESSED:
                    yield from _comment(f"{key}: {dump(inner[key])}", pad)
        mark = "" if name in needed else "?"
        yield f"{pad}{name}{mark}: {_type(inner, indent, depth + 1)},"


def _type(schema: Any, indent: int, depth: int) -> str:
    """Return a schema as a TypeScript type."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return dump(schema)
    if "enum" in schema or "const" in schema:
        return _values(schema)
    for key, sign in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
        if isinstance(schema.get(key), list):
            return sign.join(_variant(inner, indent, depth) for inner in schema[key]) or "any"
    if "$ref" in schema:
        return dump(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type")
    if isinstance(kind, list):
        # Each kind once, because nested lists of kinds would grow with every level.
        kinds = dict.fromkeys(dump(inner) for inner in kind)
        return " | ".join(_type({**schema, "type": inner}, indent, depth + 1) for inner in kinds) or "any"
    if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
        return _array(schema, indent, depth)
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, indent, depth)
    return _TYPES.get(kind, "any") if isinstance(kind, str) else "any"


def _variant(schema: Any, indent: int, depth: int) -> str:
    """Return one of several types, with its description as a comment before it."""
    text = _type(schema, indent, depth + 1)
    description = schema.get("description") if isinstance(schema, Mapping) else None
    return f"// {dump(description)}\n{text}" if description else text


def _values(schema: Mapping[str, Any]) -> str:
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        return dump(values)
    return " | ".join(f'"{value}"' if isinstance(value, str) else dump(value) for value in values)


def _array(schema: Mapping[str, Any], indent: int, depth: int) -> str:
    items = schema.get("items", schema.get("prefixItems"))
    if isinstance(items, list):
        return "[" + ", ".join(_type(item, indent, depth + 1) for item in items) + "]"
    if not isinstance(items, Mapping):
        return "any[]"
    return f"{_variant(items, indent, depth)}[]"


def _object(schema: Mapping[str, Any], indent: int, depth: int) -> str:
    lines = list(_properties(schema, indent + 2, depth))
    extra = schema.get("additionalProperties")
    if isinstance(extra, Mapping):
        lines.append(f"[key: string]: {_type(extra, indent + 2, depth + 1)},")
    return "\n".join(["{", *lines, "}"]) if lines else "object"


def _comment(text: object, pad: str) -> Iterator[str]:
    if text:
        yield f"{pad}// {dump(text)}"
