"""Turns pydantic's errors into messages: the setting, the problem, the value, and the text that fixes it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from proxy.config.faults import Issue, near, said
from proxy.config.suggestions import LITELLM, MISSING, UNKNOWN, number_for, quoted, section_for
from proxy.config.tree import Ambiguous, Node, Path, Scalar, find, got, reading, shown
from proxy.config.tree import Mapping as MappingNode

# Messages never show values below these names.
_SECRET = frozenset({"api_key", "headers", "key", "keys", "old_keys", "base_url", "url", "hash"})


def faults_of(error: ValidationError, root: MappingNode, model: type[BaseModel]) -> list[Issue]:
    """Return the errors in the order of the file."""
    details = error.errors(include_url=False, include_input=False)
    return sorted(_fault(dict(detail), root, model) for detail in details)


def dotted(path: Path) -> str:
    """Return a path as people write it: ``models[0].match``."""
    words = ""
    for part in path:
        words += f"[{part}]" if isinstance(part, int) else f".{shown(part)}"
    return words.removeprefix(".")


class _Case(NamedTuple):
    """An invalid value: its node, its setting's name, and whether a message may show it."""

    node: Node
    name: str
    public: bool
    context: dict[str, Any]
    nullable: bool

    @property
    def text(self) -> str | None:
        """Return the text of a scalar that a message may show."""
        return self.node.text if self.public and isinstance(self.node, Scalar) else None

    def line(self, value: str) -> str:
        """Return the corrected line of the file."""
        return f"{self.name}: {value}" if self.name else value


def _fault(detail: dict[str, Any], root: MappingNode, model: type[BaseModel]) -> Issue:
    kind, path, context = detail["type"], detail["loc"], detail.get("ctx", {})
    if kind == "refused":
        path = (*path, *context["path"])
    node, line, found = find(root, path)
    where = dotted(found)
    if kind == "extra_forbidden":
        return Issue(line, said("unknown setting", _unknown(path, model), where))
    if kind == "missing":
        name = str(path[-1])
        return Issue(line, said(f"'{name}' is missing", f"add {MISSING.get(name, name + ': …')}", where))
    public = _SECRET.isdisjoint(path) and not (isinstance(node, Scalar) and node.substituted)
    name = str(found[-1]) if found and not isinstance(found[-1], int) else ""
    case = _Case(node, name, public, context, _nullable(model, found))
    problem, fix = _WORDS.get(kind, _other(detail["msg"]))(case)
    shows = public and context.get("shows", found == path) and (isinstance(node, Scalar) or kind != "refused")
    shows = shows and not problem.startswith("is empty")
    return Issue(
        line, said(f"{problem} (got {got(node, read=kind == 'string_type')})" if shows else problem, fix, where)
    )


def _unknown(path: Path, model: type[BaseModel]) -> str:
    """Return the fix for an unknown setting."""
    special = UNKNOWN.get(dotted(path)) or LITELLM.get(str(path[-1]))
    return special or near(str(path[-1]), names_at(model, path[:-1]))


Words = Callable[[_Case], tuple[str, str]]


def _other(message: str) -> Words:
    return lambda case: (message, "correct the value")


def _refused(case: _Case) -> tuple[str, str]:
    fix: str = case.context["fix"] if case.public else case.context["example"]
    return case.context["problem"], fix.replace("SETTING", case.name) if case.name else fix.replace("SETTING: ", "")


def _text_wanted(case: _Case) -> tuple[str, str]:
    node = case.node
    if isinstance(node, Scalar) and node.value is None:
        return "is empty", "give a text, in quotes if it is null or ~, or remove the line"
    if isinstance(node, Scalar) and not case.public:
        return f"must be text, but YAML reads the value as {reading(node)}", "put it in quotes"
    return "must be text", case.line(f'"{shown(case.text)}"' if case.text else '"text"')


def _number_wanted(kind: str, *, whole: bool) -> Words:
    def words(case: _Case) -> tuple[str, str]:
        is_ambiguous = isinstance(case.node, Scalar) and isinstance(case.node.value, Ambiguous)
        known = None if case.text is None or is_ambiguous else number_for(case.text, whole=whole)
        return f"must be a {kind}", case.line(known) if known else f"write digits only, as in {case.line('45')}"

    return words


def _choice_wanted(case: _Case) -> tuple[str, str]:
    choices = [choice.strip("'") for choice in case.context["expected"].replace(" or ", ", ").split(", ")]
    hint = near(case.text, choices) if case.text else ""
    meant = next((choice for choice in choices if hint == f"did you mean '{choice}'?"), choices[0])
    return f"must be one of {', '.join(choices)}", case.line(quoted(meant))


def settings_wanted(node: Node, name: str, *, public: bool = True, nullable: bool = False) -> tuple[str, str]:
    """Return problem and fix for a value in place of a section. ``nullable``: ``null`` turns the section off."""
    if isinstance(node, Scalar) and node.value is None:
        return "is empty", "give its settings, or remove the line"
    if isinstance(node, Scalar) and node.value is False and nullable:
        return "must be a section", f"to turn it off, write {name}: null"
    if isinstance(node, Scalar) and node.value is True and nullable:
        return "must be a section", f"to use its defaults, write {name}: {{}}"
    text = node.text if public and isinstance(node, Scalar) and not node.substituted else None
    return "must be a section", section_for(name, text)


def _settings_wanted(case: _Case) -> tuple[str, str]:
    return settings_wanted(case.node, case.name, public=case.public, nullable=case.nullable)


def _list_wanted(case: _Case) -> tuple[str, str]:
    return "must be a list", case.line(f"[{quoted(shown(case.text))}]" if case.text else "[a, b]")


def _bound(problem: str, key: str, step: int = 0) -> Words:
    def words(case: _Case) -> tuple[str, str]:
        bound = case.context[key]
        return f"{problem} {bound:g}", case.line(f"{bound + step:g}")

    return words


_WORDS: Mapping[str, Words] = {
    "refused": _refused,
    "string_type": _text_wanted,
    "string_too_short": lambda case: ("is empty", "give a text, or remove the line"),
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_parsing_size", "int_from_float"), _number_wanted("whole number", whole=True)
    ),
    # Every setting that isn't a whole number is in seconds; fractions have errors of their own.
    **dict.fromkeys(
        ("float_type", "float_parsing", "finite_number"), _number_wanted("number of seconds", whole=False)
    ),
    **dict.fromkeys(("bool_type", "bool_parsing"), lambda case: ("must be true or false", case.line("true"))),
    "greater_than": _bound("must be over", "gt", 1),
    "greater_than_equal": _bound("must be at least", "ge"),
    "less_than_equal": _bound("must be at most", "le"),
    "literal_error": _choice_wanted,
    **dict.fromkeys(("model_type", "model_attributes_type", "mapping_type", "dict_type"), _settings_wanted),
    "tuple_type": _list_wanted,
}  # fmt: skip


def names_at(model: type[BaseModel], path: Iterable[str | int]) -> list[str]:
    """Return the settings of the section at a path. Empty if the path leads to no section."""
    here = _model_at(model, path)
    return [] if here is None else list(here.model_fields)


def _nullable(model: type[BaseModel], path: Path) -> bool:
    """Return whether ``null`` is a value of the setting at a path."""
    above = _model_at(model, path[:-1]) if path else None
    field = None if above is None else above.model_fields.get(str(path[-1]))
    return field is not None and types.NoneType in get_args(field.annotation)


def _model_at(model: type[BaseModel], path: Iterable[str | int]) -> type[BaseModel] | None:
    here: type[BaseModel] | None = model
    waiting = False  # whether the next part is a key or an index, and not a field
    for part in path:
        if waiting:
            waiting = False
            continue
        if here is None or part not in here.model_fields:
            return None
        here, waiting = _section(here.model_fields[str(part)].annotation)
    return None if waiting else here


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that an annotation holds, and whether it's in a mapping or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inside = [_section(argument)[0] for argument in get_args(annotation)]
    section = next((section for section in inside if section is not None), None)
    return section, get_origin(annotation) not in (Union, types.UnionType)
