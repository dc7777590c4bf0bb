"""Turns pydantic's errors into messages: the setting, the problem, the value, and the text that fixes it."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from proxy.config.document import Ambiguous, Issue, Node, Path, dotted, find, got, issue, near, reading, shown
from proxy.config.fields import Section, number_for, quoted
from proxy.constants import DOCUMENTATION

MIGRATING = f"{DOCUMENTATION}migrating/"

_FROM_LITELLM = f"this looks like a LiteLLM configuration; {MIGRATING} lists the settings that replace it"

LITELLM = dict.fromkeys(
    (
        "model_list",
        "litellm_settings",
        "litellm_params",
        "general_settings",
        "router_settings",
        "environment_variables",
        "master_key",
        "database_url",
        "callback_settings",
        "guardrails",
        "mcp_servers",
    ),
    _FROM_LITELLM,
)
"""Fixes by the name of a setting that only LiteLLM has."""

UNKNOWN = {
    "server.workers": "remove it, and set the number of workers with serve --workers N",
    "workers": "remove it, and set the number of workers with serve --workers N",
    "archive": f"remove it: the archive is in the store, and {MIGRATING} says how to copy its entries there",
    "otel.traces": "remove it: otel sends spans. Without spans, remove the section otel",
    "otel.metrics": "remove it: otel sends spans only. Let Prometheus, or a collector, read GET /metrics",
    "logging": "write log, with level, format, and requests, as in log: {level: info, format: json, requests: all}",
    "log_level": "write log: {level: info}. log.format and log.requests set the format and which requests to log",
    "auth.keys": 'list keys under a team: teams: {NAME: {keys: ["sha256:…"]}}',
    "api_key": 'set it at an upstream: upstreams: {main: {api_key: "${OPENAI_API_KEY}"}}',
    "base_url": 'set it at an upstream: upstreams: {main: {base_url: "https://api.openai.com/v1"}}',
}
"""Fixes by the path of a setting that exists elsewhere."""

MISSING = {
    "match": 'match: "*"',
    "upstream": "upstream: NAME, a name under upstreams",
    "hash": 'hash: "sha256:…", as printed by: compaction-proxy keys new --team NAME',
}
"""Lines to add, by the name of a setting that is required."""

# Messages never show values below these names.
_SECRET = frozenset({"api_key", "headers", "key", "keys", "old_keys", "base_url", "url", "hash"})


def issues_of(error: ValidationError, root: Node, model: type[BaseModel]) -> list[Issue]:
    details = error.errors(include_url=False, include_input=False)
    return sorted(_issue(dict(detail), root, model) for detail in details)


class _Invalid(NamedTuple):
    """An invalid value: its node, its setting's name, and whether a message may show it."""

    node: Node
    name: str
    is_public: bool

    @property
    def text(self) -> str:
        """Return the text of a scalar that a message may show, or an empty text."""
        return self.node.text if self.is_public else ""

    def line(self, value: str) -> str:
        return f"{self.name}: {value}" if self.name else value


def _issue(detail: dict[str, Any], root: Node, model: type[BaseModel]) -> Issue:
    kind, path, context = detail["type"], detail["loc"], detail.get("ctx", {})
    if kind == "refused":
        path = (*path, *context["path"])
    node, found = find(root, path)
    where = dotted(found)
    if kind == "extra_forbidden":
        return issue(node.line, "unknown setting", _unknown(path, model), where)
    if kind == "missing":
        name = str(path[-1])
        return issue(node.line, f"'{name}' is missing", f"add {MISSING.get(name, name + ': …')}", where)
    is_public = _SECRET.isdisjoint(path) and not node.substituted
    invalid = _Invalid(node, str(found[-1]) if found and not isinstance(found[-1], int) else "", is_public)
    if kind in _SECTION_WANTED:
        section = _section_at(model, found)
        problem, fix = section_wanted(
            node, invalid.name, section, is_public=is_public, nullable=_nullable(model, found)
        )
    else:
        problem, fix = _problem_and_fix(kind, invalid, context, detail["msg"])
    shows = is_public and context.get("shows", found == path) and (node.is_scalar or kind != "refused")
    if shows and not problem.startswith("is empty"):
        problem = f"{problem} (got {got(node, read=kind == 'string_type')})"
    return issue(node.line, problem, fix, where)


def _unknown(path: Path, model: type[BaseModel]) -> str:
    special = UNKNOWN.get(dotted(path)) or LITELLM.get(str(path[-1]))
    section = _section_at(model, path[:-1])
    return special or near(str(path[-1]), section.model_fields if section else ())


_SECTION_WANTED = {"model_type", "model_attributes_type", "mapping_type", "dict_type"}


def _problem_and_fix(kind: str, invalid: _Invalid, context: dict[str, Any], message: str) -> tuple[str, str]:
    match kind:
        case "refused":
            fix = context["fix"] if invalid.is_public else context["example"]
            return context["problem"], fix.replace("SETTING: ", invalid.line("")).replace("SETTING", invalid.name)
        case "string_type":
            return _text_wanted(invalid)
        case "string_too_short":
            return "is empty", "give a text, or remove the line"
        case "int_type" | "int_parsing" | "int_parsing_size" | "int_from_float":
            return "must be a whole number", _number_fix(invalid, whole=True)
        case "float_type" | "float_parsing" | "finite_number":
            # Prices are in US dollars, and all other settings in seconds; fractions have errors of their own.
            unit = "US dollars" if "cost" in invalid.name or invalid.name == "usd" else "seconds"
            return f"must be a number of {unit}", _number_fix(invalid, whole=False)
        case "bool_type" | "bool_parsing":
            return "must be true or false", invalid.line("true")
        case "greater_than":
            return f"must be over {context['gt']:g}", invalid.line(f"{context['gt'] + 1:g}")
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}", invalid.line(f"{context['ge']:g}")
        case "less_than_equal":
            return f"must be at most {context['le']:g}", invalid.line(f"{context['le']:g}")
        case "literal_error":
            return _choice_wanted(invalid, context["expected"])
        case "tuple_type":
            items = quoted(shown(invalid.text)) if invalid.text else "a, b"
            return "must be a list", invalid.line(f"[{items}]")
        case _:
            return message, "correct the value"


def _text_wanted(invalid: _Invalid) -> tuple[str, str]:
    node = invalid.node
    if node.value is None:
        return "is empty", "give a text, in quotes if it is null or ~, or remove the line"
    if node.is_scalar and not invalid.is_public:
        return f"must be text, but YAML reads the value as {reading(node)}", "put it in quotes"
    return "must be text", invalid.line(f'"{shown(invalid.text) or "text"}"')


def _number_fix(invalid: _Invalid, *, whole: bool) -> str:
    known = None if isinstance(invalid.node.value, Ambiguous) else number_for(invalid.text, whole=whole)
    return invalid.line(known) if known else f"write digits only, as in {invalid.line('45')}"


def _choice_wanted(invalid: _Invalid, expected: str) -> tuple[str, str]:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    hint = near(invalid.text, choices) if invalid.text else ""
    meant = next((choice for choice in choices if hint == f"did you mean '{choice}'?"), choices[0])
    return f"must be one of {', '.join(choices)}", invalid.line(quoted(meant))


def section_wanted(
    node: Node, name: str, section: type[BaseModel] | None = None, *, is_public: bool = True, nullable: bool = False
) -> tuple[str, str]:
    """Return problem and fix for a value in place of a section. ``nullable``: ``null`` turns the section off."""
    if node.value is None:
        return "is empty", "give its settings, or remove the line"
    if node.value is False and nullable:
        return "must be a section", f"to turn it off, write {name}: null"
    if node.value is True and nullable:
        return "must be a section", f"to use its defaults, write {name}: {{}}"
    main = section.main if section is not None and issubclass(section, Section) else None
    if main is None or not (text := node.text if is_public and not node.substituted else ""):
        return "must be a section", f"write its settings, as in {name or 'name'}: {{{main or 'setting'}: value}}"
    annotation = section.model_fields[main].annotation if section is not None else None
    if annotation is int or int in get_args(annotation):
        return "must be a section", f"write {name}: {{{main}: {number_for(text, whole=True) or 'N'}}}"
    return "must be a section", f"did you mean {name}: {{{main}: {quoted(shown(text))}}}?"


def _nullable(model: type[BaseModel], path: Path) -> bool:
    above = _section_at(model, path[:-1]) if path else None
    field = None if above is None else above.model_fields.get(str(path[-1]))
    return field is not None and types.NoneType in get_args(field.annotation)


def _section_at(model: type[BaseModel], path: Iterable[str | int]) -> type[BaseModel] | None:
    """Return the section at a path, or ``None`` if the path leads to another value."""
    here: type[BaseModel] | None = model
    is_key = False  # whether the next part is a key or an index, and not a field
    for part in path:
        if is_key:
            is_key = False
        elif here is None or part not in here.model_fields:
            return None
        else:
            here, is_key = _section(here.model_fields[str(part)].annotation)
    return None if is_key else here


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that an annotation holds, and whether it's in a mapping or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inside = (_section(argument)[0] for argument in get_args(annotation))
    section = next((section for section in inside if section is not None), None)
    return section, get_origin(annotation) not in (Union, types.UnionType)
