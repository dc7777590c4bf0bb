"""The kinds of value that settings are made of, each with its own checks and its part of the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError
from typing_extensions import TypeAliasType

from proxy.compaction.conditions import Clause, Trigger
from proxy.compaction.searching import search_for
from proxy.config.faults import near
from proxy.config.patterns import endless, unclear, unsearchable
from proxy.config.tree import Ambiguous


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys, and without values in its errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def wrong(message: str, *path: str | int) -> PydanticCustomError:
    """A value that is refused. ``path`` leads from the field to the part that is wrong, for the line."""
    # The message goes in as a value: in a template its braces would be read.
    return PydanticCustomError("refused", "{words}", {"words": message, "path": path})


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise wrong("must be a number, not true or false")
    return value


Count = Annotated[int, Field(gt=0), BeforeValidator(_no_truth_value)]
"""A positive whole number."""

CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(_no_truth_value)]
"""A whole number, zero or more."""

Seconds = Annotated[float, Field(gt=0), BeforeValidator(_no_truth_value)]
"""A span of time, over zero."""

Grace = Annotated[float, Field(ge=0), BeforeValidator(_no_truth_value)]
"""A span of time in seconds, which may be zero."""

Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(_no_truth_value)]
"""A TCP port; 0 lets the system choose a free one."""

Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty."""

_MOST_PATTERN = 1_000
_EVERYTHING = "matches the empty text, and so everything: write a narrower expression"


def _expression(value: object) -> str:
    """A regular expression, as text: what holds it stays comparable and printable."""
    if not isinstance(value, str) or not value or len(value) > _MOST_PATTERN:
        raise wrong(f"must be a regular expression: text of 1 to {_MOST_PATTERN} characters")
    try:
        why = unclear(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong(f"is no regular expression: {error}") from error
    if why is not None:
        raise wrong(why)
    return value


def _pattern(value: object) -> str:
    pattern = _expression(value)
    if re.search(pattern, "") is not None:
        raise wrong(_EVERYTHING)
    if (why := endless(pattern)) is not None:
        raise wrong(why)
    return pattern


def _searched(value: object) -> str:
    pattern = _expression(value)
    if (why := unsearchable(pattern)) is not None:
        raise wrong(why)
    if search_for(pattern)(""):
        raise wrong(_EVERYTHING)
    return pattern


_PATTERN_SCHEMA = {"type": "string", "minLength": 1, "maxLength": _MOST_PATTERN}

Pattern = Annotated[str, PlainValidator(_pattern), WithJsonSchema(_PATTERN_SCHEMA)]
"""A regular expression in Python's syntax, searched for anywhere in a text."""

SearchedPattern = Annotated[str, PlainValidator(_searched), WithJsonSchema(_PATTERN_SCHEMA)]
"""The same without what needs going back, so that no text can make a search for it slow."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise PydanticKnownError("string_type")
    if NAME.fullmatch(value):
        return value
    raise wrong("a name has 1 to 64 letters, digits, '.', '_' or '-', and begins with a letter or digit")


# Names of policies and teams appear in response headers and metrics, hence the narrow alphabet.
Name = Annotated[str, PlainValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"})]
"""The name of an upstream, a policy or a team."""

_HOST = r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])"
_ORIGIN = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*)://({_HOST})(?::([0-9]{{1,5}}))?")
_DEFAULT_PORTS = {("http", "80"), ("https", "443")}


def _origin(value: object) -> str:
    """Return an origin as browsers send it: in lower case, without the scheme's default port."""
    match = _ORIGIN.fullmatch(value) if isinstance(value, str) else None
    if value == "*":
        return "*"
    if match is None:
        raise wrong("must be an origin: scheme, host, and port, without a path. Fix: https://app.example, or '*'")
    scheme, host, port = match[1].lower(), match[2].lower(), match[3]
    return f"{scheme}://{host}" + (f":{port}" if port and (scheme, port) not in _DEFAULT_PORTS else "")


Origin = Annotated[
    str,
    PlainValidator(_origin),
    WithJsonSchema({"type": "string", "pattern": rf"^(\*|[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(:[0-9]{{1,5}})?)$"}),
]
"""The origin of web pages, or ``*`` for any."""


def _host_name(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(_HOST, value):
        return value.lower()
    raise wrong("must be a host name without a port. Fix: proxy.example")


HostName = Annotated[str, PlainValidator(_host_name), WithJsonSchema({"type": "string", "pattern": f"^{_HOST}$"})]
"""A name that callers use for the proxy, in lower case."""

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**n for n, prefix in enumerate("kmg", 1)}
_UNITS |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmg", 1)}
_SIZE = re.compile(r"([0-9]{1,15})\s*([a-z]{0,3})", re.IGNORECASE)


def _size(value: object) -> int:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match and match[2].lower() in _UNITS:
        value = int(match[1]) * _UNITS[match[2].lower()]
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise wrong("must be a size: a number of bytes, or text such as 64MB (millions) or 64MiB (powers of two)")


Size = Annotated[
    int,
    PlainValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
"""A number of bytes."""

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def _date(value: object) -> date:
    text = value.text if isinstance(value, Ambiguous) else value
    if isinstance(value, date):
        return value
    if isinstance(text, str) and _DATE.fullmatch(text):
        try:
            return date.fromisoformat(text)
        except ValueError as error:
            raise wrong(f"there is no such day: {error}") from error
    raise wrong("must be a date such as 2027-01-31")


Date = Annotated[date, PlainValidator(_date), WithJsonSchema({"type": "string", "format": "date"})]
"""A day, in quotes or without."""

KINDS = ("tokens", "messages", "fraction")


def _amount(kind: object, value: object, *path: str | int) -> Clause:
    """One part of a condition, such as ``tokens: 4000``."""
    if kind not in KINDS:
        raise wrong(f"'{kind}' is no kind of condition: {near(str(kind), KINDS)}", *path)
    if kind == "fraction":
        return Clause(fraction=_fraction(value, *path))
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise wrong(f"{kind} must be a positive whole number", *path)
    return Clause(tokens=value) if kind == "tokens" else Clause(messages=value)


_DECIMAL = re.compile(r"[0-9]{0,3}(\.[0-9]{1,20})?")


def _fraction(value: object, *path: str | int) -> float:
    if isinstance(value, str) and value and _DECIMAL.fullmatch(value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value <= 1:
            return float(value)
        if 1 < value <= 100:
            raise wrong(f"fraction must be over 0 and at most 1: for {value:g} % write {value / 100:g}", *path)
    raise wrong("fraction must be a number over 0 and at most 1, such as 0.85", *path)


def _is_pair(value: object) -> bool:
    """LangChain's spelling of a condition: ``["fraction", 0.8]``."""
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


def _clause(value: object, *path: str | int) -> Clause:
    if isinstance(value, Clause):
        return value
    if _is_pair(value):
        assert isinstance(value, list | tuple)  # noqa: S101 - narrows the type
        return _amount(value[0], value[1], *path)
    if not isinstance(value, Mapping) or not value:
        raise wrong("a condition is {tokens: N}, {messages: N} or {fraction: F}; several of them must all hold", *path)
    parts = [_amount(kind, amount, *path, kind) for kind, amount in value.items()]
    return Clause(
        tokens=next((part.tokens for part in parts if part.tokens is not None), None),
        messages=next((part.messages for part in parts if part.messages is not None), None),
        fraction=next((part.fraction for part in parts if part.fraction is not None), None),
    )


def _trigger(value: object) -> Trigger:
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str) and not _is_pair(value):
        return tuple(_clause(item, index) for index, item in enumerate(value))
    return (_clause(value),)


def _keep(value: object) -> Clause:
    clause = _clause(value)
    if [clause.tokens, clause.messages, clause.fraction].count(None) != 2:
        raise wrong("takes exactly one of tokens, messages and fraction")
    return clause


def _reserve(value: object) -> Clause | None:
    if value is None or isinstance(value, Clause):
        return value
    if isinstance(value, Mapping):
        clause = _keep(value)
        if clause.messages is not None:
            raise wrong("room for the answer is counted in tokens: a number of them, or {fraction: F} of the window")
        return clause
    return _amount("tokens", value)


def _as_written(value: object) -> object:
    """A condition as a file states it. What is in that form already stays: defaults come by here twice."""
    if isinstance(value, Clause):
        return {kind: getattr(value, kind) for kind in KINDS if getattr(value, kind) is not None}
    if isinstance(value, tuple):
        return [_as_written(item) for item in value]
    return value


_COUNT_SCHEMA = {"type": "integer", "minimum": 1}
_FRACTION_SCHEMA = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_PAIR_SCHEMA: dict[str, Any] = {
    "type": "array",
    "prefixItems": [{"enum": list(KINDS)}, {"type": "number", "exclusiveMinimum": 0}],
    "minItems": 2,
    "maxItems": 2,
}


def _clause_schema(most: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"tokens": _COUNT_SCHEMA, "messages": _COUNT_SCHEMA, "fraction": _FRACTION_SCHEMA},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": most,
    }


_ANY_CLAUSE = {"anyOf": [_clause_schema(3), _PAIR_SCHEMA]}

TriggerField = TypeAliasType(
    "TriggerField",
    Annotated[
        Trigger,
        PlainValidator(_trigger),
        PlainSerializer(_as_written),
        WithJsonSchema({"anyOf": [*_ANY_CLAUSE["anyOf"], {"type": "array", "items": _ANY_CLAUSE}, {"type": "null"}]}),
    ],
)
"""When: one condition (several keys: all of them), a list of them (any), or nothing (never)."""

KeepField = TypeAliasType(
    "KeepField",
    Annotated[
        Clause,
        PlainValidator(_keep),
        PlainSerializer(_as_written),
        WithJsonSchema({"anyOf": [_clause_schema(1), _PAIR_SCHEMA]}),
    ],
)
"""How much stays: exactly one of tokens, messages and fraction."""

ReserveField = TypeAliasType("ReserveField", Annotated[
    Clause | None,
    PlainValidator(_reserve),
    PlainSerializer(_as_written),
    WithJsonSchema({
        "anyOf": [
            _COUNT_SCHEMA,
            {
                "type": "object",
                "properties": {"tokens": _COUNT_SCHEMA, "fraction": _FRACTION_SCHEMA},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
            {"type": "null"},
        ]
    }),
])  # fmt: skip
"""Tokens kept free: a number of them, a share of the window, or nothing."""
