"""What pydantic found, in words for the person who writes the file: where, what, and what to do."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from proxy.config.faults import Fault, near
from proxy.config.tree import Ambiguous, Node, Path, Scalar, find, quote_it, reading, shown
from proxy.config.tree import Mapping as MappingNode

# Values below these names are never shown.
_SECRET = frozenset({"api_key", "headers", "key", "keys", "old_keys", "base_url", "url"})


def faults_of(error: ValidationError, root: MappingNode, model: type[BaseModel]) -> list[Fault]:
    """The faults, in the order of the file."""
    details = error.errors(include_url=False, include_input=False)
    return sorted(_fault(dict(detail), root, model) for detail in details)


def dotted(path: Path) -> str:
    """A path as people write it: ``models[0].match``."""
    words = ""
    for part in path:
        words += f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
    return words.removeprefix(".")


def _fault(detail: dict[str, Any], root: MappingNode, model: type[BaseModel]) -> Fault:
    kind, path, context = detail["type"], detail["loc"], detail.get("ctx", {})
    if kind == "refused":
        path = (*path, *context["path"])
    node, line, found = find(root, path)
    where = f"{dotted(found)}: " if found else ""
    if kind == "extra_forbidden":
        return Fault(line, f"{where}no such setting; {near(str(path[-1]), names_at(model, path[:-1]))}")
    if kind == "missing":
        return Fault(line, f"{where}'{path[-1]}' is missing: add it")
    words = _WORDS.get(kind)
    secret = not _SECRET.isdisjoint(path)
    return Fault(line, where + (words(node, secret, context) if words else detail["msg"]))


Words = Callable[[Node, bool, dict[str, Any]], str]


def _text_wanted(node: Node, secret: bool, context: dict[str, Any]) -> str:
    if isinstance(node, Scalar):
        return quote_it(node, secret=secret)
    return "must be text, not a list or mapping"


def _number_wanted(what: str) -> Words:
    def words(node: Node, secret: bool, context: dict[str, Any]) -> str:
        if isinstance(node, Scalar) and isinstance(node.value, Ambiguous) and not secret:
            return f"'{shown(node.text)}' is read as {reading(node)}: write a plain {what}"
        return f"must be a {what}"

    return words


def _choice_wanted(node: Node, secret: bool, context: dict[str, Any]) -> str:
    choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
    words = f"must be one of {', '.join(choices)}"
    if isinstance(node, Scalar) and isinstance(node.value, str) and not node.substituted and not secret:
        hint = near(node.value, choices)
        return f"{words}, not '{shown(node.value)}'" + (f"; {hint}" if hint.startswith("did") else "")
    return words


def _settings_wanted(node: Node, secret: bool, context: dict[str, Any]) -> str:
    if isinstance(node, Scalar) and node.value is None:
        return "is empty: give its settings, or remove the line"
    return "must be settings, as 'name: value'"


def _said(template: str) -> Words:
    return lambda node, secret, context: template.format_map(context)


_WORDS: Mapping[str, Words] = {
    "refused": _said("{words}"),
    "string_type": _text_wanted,
    "string_too_short": _said("is empty: give a text, or leave the setting out"),
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_parsing_size", "int_from_float"), _number_wanted("whole number")
    ),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), _number_wanted("number")),
    **dict.fromkeys(("bool_type", "bool_parsing"), _said("must be true or false")),
    "greater_than": _said("must be over {gt:g}"),
    "greater_than_equal": _said("must be {ge:g} or more"),
    "less_than_equal": _said("must be {le:g} or less"),
    "literal_error": _choice_wanted,
    **dict.fromkeys(("model_type", "model_attributes_type", "mapping_type", "dict_type"), _settings_wanted),
    "tuple_type": _said("must be a list, such as [a, b]"),
}  # fmt: skip


def names_at(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """The settings that may stand at a path; none where the path leads to no section."""
    here: type[BaseModel] | None = model
    waiting = False  # whether the next part is a key or an index, and not a field
    for part in path:
        if waiting:
            waiting = False
            continue
        if here is None or part not in here.model_fields:
            return []
        annotation = here.model_fields[str(part)].annotation
        here, waiting = _section(annotation)
    return [] if here is None or waiting else list(here.model_fields)


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that an annotation holds, and whether in a mapping or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inside = [_section(argument)[0] for argument in get_args(annotation)]
    section = next((section for section in inside if section is not None), None)
    return section, get_origin(annotation) not in (Union, types.UnionType)
