"""The types of settings, with their checks, JSON Schemas, and fixes for common mistakes.

A regular expression may be slow on some texts, which come from clients. So each use has a bound: redaction has a time
limit, and pins use an engine that takes linear time. Linear-time engines don't support some expressions, or read them
differently than Python.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import date
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError
from typing_extensions import TypeAliasType

from proxy.compaction.rules import NotSearchable, search_for
from proxy.compaction.settings import Clause, Trigger
from proxy.config.document import Ambiguous, near, shown


class Section(BaseModel):
    """A section of the configuration: immutable, with no unknown keys. Its errors don't include values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    main: ClassVar[str | None] = None
    """The setting that a plain value in the place of the section probably means."""


def wrong(
    problem: str, *path: str | int, fix: str, example: str | None = None, shows: bool = True
) -> PydanticCustomError:
    """Return the error for an invalid value.

    ``path`` leads from the field to the invalid part, for the line. ``fix`` is the text to write; the setting's name
    replaces ``SETTING`` in it. ``example`` replaces a fix that contains a secret value. ``shows`` allows the message to
    quote the value.
    """
    # The texts are values, because pydantic would read braces in a template.
    context: dict[str, Any] = {"problem": problem, "fix": fix, "example": example or fix, "path": path}
    return PydanticCustomError("refused", "{problem}", context if shows else {**context, "shows": False})


def no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise wrong("must be a number", fix="write digits only, as in SETTING: 45")
    return value


Count = Annotated[int, Field(gt=0), BeforeValidator(no_truth_value)]  # a positive whole number

Days = Annotated[Count, Field(le=36_500)]
"""A lifetime in days, at most a century. A store doesn't take one of many millennia."""

CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(no_truth_value)]  # a whole number, zero or more
Seconds = Annotated[float, Field(gt=0), BeforeValidator(no_truth_value)]  # a duration in seconds, over zero
Amount = Annotated[float, Field(gt=0), BeforeValidator(no_truth_value)]  # an amount of money, over zero
Grace = Annotated[float, Field(ge=0), BeforeValidator(no_truth_value)]  # a duration in seconds, zero or more

Port = Annotated[int, Field(ge=0, le=65535), BeforeValidator(no_truth_value)]
"""A TCP port; 0 lets the system choose a free one."""

Text = Annotated[str, Field(min_length=1)]  # text that isn't empty


def off_for_false(value: object) -> object:
    """Return "off" for false, because YAML 1.1 reads a plain ``off`` as false."""
    return "off" if value is False else value


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise PydanticKnownError("string_type")
    if NAME.fullmatch(value):
        return value
    raise wrong(
        "isn't a valid name",
        fix="use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit",
    )


# Names of policies and teams appear in response headers and metrics, hence the narrow alphabet.
Name = Annotated[str, PlainValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"})]
"""The name of an upstream, policy, or team."""

_HOST = r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])"
_ORIGIN = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*)://({_HOST})(?::([0-9]{{1,5}}))?")
_DEFAULT_PORTS = {("http", "80"), ("https", "443")}


def _origin(value: object) -> str:
    """Return an origin as browsers send it: in lower case, without the scheme's default port."""
    match = _ORIGIN.fullmatch(value) if isinstance(value, str) else None
    if value == "*":
        return "*"
    if match is None:
        raise wrong("must be an origin: scheme, host and port, without a path", fix="SETTING: https://app.example")
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
    raise wrong("must be a host name without a port", fix="SETTING: proxy.example")


HostName = Annotated[str, PlainValidator(_host_name), WithJsonSchema({"type": "string", "pattern": f"^{_HOST}$"})]
"""A host name of the proxy, in lower case."""

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
    raise wrong("must be a size in bytes, 64MB or 64MiB", fix="SETTING: 64MB")


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
            raise wrong(f"isn't a valid date ({error})", fix="SETTING: 2027-01-31") from error
    raise wrong("must be a date", fix="SETTING: 2027-01-31")


Date = Annotated[date, PlainValidator(_date), WithJsonSchema({"type": "string", "format": "date"})]
"""A day, with or without quotes."""

_AMOUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SECONDS = {"s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "minutes": 60, "h": 3600}
_COUNTS = {"k": 1_000, "m": 1_000_000, "d": 1, "day": 1, "days": 1, "tokens": 1, "messages": 1, "s": 1}
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]+)?)\s*%")
_SPECIAL = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|~|[-+.0-9].*|.*[:#{}\[\],&*!|>'\"%@`].*|\s.*|.*\s")


def number_for(text: str, *, whole: bool) -> str | None:
    """Return the plain number for a text like ``45s`` or ``128k``, or ``None``."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = None if found is None else ({"": 1} | (_COUNTS if whole else _SECONDS)).get(found[2].lower())
    if found is None or unit is None or len(text) > 20:
        return None
    value = float(found[1].replace("_", "").replace(",", "")) * unit
    return f"{round(value)}" if whole or value.is_integer() else f"{value}"


def quoted(text: str) -> str:
    """Return a text with quotes if YAML would read another type without them."""
    return f'"{text}"' if _SPECIAL.fullmatch(text) else text


def condition_for(value: object, usual: str) -> str:
    """Return the condition that a plain value probably means: a fraction or a number of tokens."""
    text = str(value)
    percent = _PERCENT.fullmatch(text.strip())
    if percent is not None and 0 < float(percent[1]) <= 100:
        return f"{{fraction: {float(percent[1]) / 100:g}}}"
    known = None if isinstance(value, bool) else number_for(text, whole=False) or number_for(text, whole=True)
    number = float(known) if known is not None else 0
    if 0 < number <= 1:
        return f"{{fraction: {number:g}}}"
    if 1 < number <= 100:
        return f"{{fraction: {number / 100:g}}}"
    return f"{{tokens: {number_for(text, whole=True)}}}" if number else usual


KINDS = ("tokens", "messages", "fraction")
PRICE_STEP = "price_step"


def _amount(kind: object, value: object, *path: str | int, name: object = None) -> Clause:
    """Return one part of a condition, for example ``tokens: 4000``. ``name`` replaces the kind in the fix."""
    name = name or kind
    if kind not in KINDS:
        raise wrong(f"unknown key '{shown(str(kind))}'", *path, fix=near(str(kind), [*KINDS, PRICE_STEP]), shows=False)
    if kind == "fraction":
        return Clause(fraction=_fraction(value, *path))
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        known = number_for(value, whole=True) if isinstance(value, str) else None
        example = "4000" if kind == "tokens" else "10"
        raise wrong(
            "must be a positive whole number", *path, fix=f"{name}: {known or example}", example=f"{name}: {example}"
        )
    return Clause(tokens=value) if kind == "tokens" else Clause(messages=value)


def _price_step(value: object, *path: str | int) -> Clause:
    if value is True or value == "true":
        return Clause(price_step=True)
    raise wrong("must be true, or be omitted", *path, fix=f"{PRICE_STEP}: true")


_SHARE = "must be over 0 and at most 1"
_SHARE_EXAMPLE = "fraction: 0.85"
_DECIMAL = re.compile(r"[0-9]{0,3}(\.[0-9]{1,20})?")


def _fraction(value: object, *path: str | int) -> float:
    if isinstance(value, str) and value and _DECIMAL.fullmatch(value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value <= 1:
            return float(value)
        if 1 < value <= 100:
            raise wrong(_SHARE, *path, fix=f"for {value:g}% write fraction: {value / 100:g}", example=_SHARE_EXAMPLE)
    percent = condition_for(value, "").strip("{}") if isinstance(value, str) else ""
    raise wrong(
        _SHARE, *path, fix=percent if percent.startswith("fraction") else _SHARE_EXAMPLE, example=_SHARE_EXAMPLE
    )


_USUAL = "{fraction: 0.85}"
_USUAL_KEEP = "{fraction: 0.1}"


def _clause(value: object, *path: str | int, usual: str = _USUAL) -> Clause:
    if isinstance(value, Clause):
        return value
    if not isinstance(value, Mapping) or not value:
        plain = value.text if isinstance(value, Ambiguous) else value
        known = condition_for(plain, usual) if isinstance(plain, str | int | float) else usual
        raise wrong("must be a mapping", *path, fix=f"SETTING: {known}", example=f"SETTING: {usual}")
    parts = [
        _price_step(amount, *path) if kind == PRICE_STEP and usual == _USUAL else _amount(kind, amount, *path, kind)
        for kind, amount in value.items()
    ]
    return Clause(**{kind: value for part in parts for kind, value in condition_parts(part).items()})


def _trigger(value: object) -> Trigger:
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_clause(item, index) for index, item in enumerate(value))
    return (_clause(value),)


def _keep(value: object) -> Clause:
    clause = _clause(value, usual=_USUAL_KEEP)
    if len(condition_parts(clause)) != 1:
        raise wrong("must have exactly one of tokens, messages and fraction", fix=f"SETTING: {_USUAL_KEEP}")
    return clause


def _reserve(value: object) -> Clause | None:
    if value is None or isinstance(value, Clause):
        return value
    if isinstance(value, Mapping):
        clause = _keep(value)
        if clause.messages is not None:
            raise wrong("must be a number of tokens or a fraction of the window", fix="SETTING: 4000")
        return clause
    return _amount("tokens", value, name="SETTING")


def condition_parts(clause: Clause) -> dict[str, Any]:
    return {kind: getattr(clause, kind) for kind in (*KINDS, PRICE_STEP) if getattr(clause, kind) is not None}


def lowest(trigger: Trigger, kind: str) -> float | None:
    """Return the lowest bound of this kind among clauses without other parts."""
    return min((parts[kind] for parts in map(condition_parts, trigger) if parts.keys() == {kind}), default=None)


def _as_written(value: object) -> object:
    """Return a condition as a file states it. Keep values in that form, because pydantic serializes defaults twice."""
    if isinstance(value, tuple):
        return [_as_written(item) for item in value]
    return condition_parts(value) if isinstance(value, Clause) else value


_COUNT_SCHEMA = {"type": "integer", "minimum": 1}
_FRACTION_SCHEMA = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_KIND_SCHEMAS: dict[str, dict[str, Any]] = {"fraction": _FRACTION_SCHEMA, PRICE_STEP: {"const": True}}


def _clause_schema(most: int, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {kind: _KIND_SCHEMAS.get(kind, _COUNT_SCHEMA) for kind in kinds},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": most,
    }


_ANY_CLAUSE = _clause_schema(4, (*KINDS, PRICE_STEP))

TriggerField = TypeAliasType(
    "TriggerField",
    Annotated[
        Trigger,
        PlainValidator(_trigger),
        PlainSerializer(_as_written),
        WithJsonSchema({"anyOf": [_ANY_CLAUSE, {"type": "array", "items": _ANY_CLAUSE}, {"type": "null"}]}),
    ],
)
"""One condition (all of its keys must be reached), a list (any of them), or null (never)."""

KeepField = TypeAliasType(
    "KeepField",
    Annotated[
        Clause,
        PlainValidator(_keep),
        PlainSerializer(_as_written),
        WithJsonSchema({"anyOf": [_clause_schema(1)]}),
    ],
)
"""The conversation to keep: exactly one of tokens, messages, and fraction."""

ReserveField = TypeAliasType(
    "ReserveField",
    Annotated[
        Clause | None,
        PlainValidator(_reserve),
        PlainSerializer(_as_written),
        WithJsonSchema({"anyOf": [_COUNT_SCHEMA, _clause_schema(1, ("tokens", "fraction")), {"type": "null"}]}),
    ],
)
"""Reserved tokens: a number, a fraction of the window, or null."""


class Flaw(NamedTuple):
    """A problem with an expression, and how to fix it."""

    problem: str
    fix: str


_LOOKS = Flaw("look-ahead and look-behind aren't supported", "match the surrounding text instead")
_REFERS = Flaw("references to groups aren't supported", "repeat the group's expression instead")
_GOES_ON = Flaw(
    "possessive and atomic parts aren't supported",
    "write a plain repetition or group. The search takes linear time without them",
)

_UNLIKE = {"ASSERT": _LOOKS, "GROUPREF": _REFERS, "POSSESSIVE_REPEAT": _GOES_ON, "ATOMIC_GROUP": _GOES_ON}
"""Flaws by the beginning of the name that Python's parser gives to a part."""

# Literal characters in Python, but word boundaries in Rust's regex.
_EDGE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:[<>]|b\{)")
# A literal brace in Python, but a number of errors in the package regex.
_INEXACT = re.compile(r"(?<!\\)(?:\\\\)*\{[0-9<=,\s]*[eids][^}]*\}")


def unclear(pattern: str) -> Flaw | None:
    """Return the flaw of an expression that other engines read differently than Python, or ``None``.

    Raises ``re.error`` for an invalid expression.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        try:
            re.compile(pattern)
        except FutureWarning:
            return Flaw(
                "has a bracket or a doubled sign in a set, which engines read differently", "write \\ before it"
            )
    if _INEXACT.search(pattern):
        return Flaw("has a brace that could be read as a number of errors", "write \\{ for a brace")
    return None


def unsearchable(pattern: str) -> Flaw | None:
    """Return the flaw of an expression that the linear-time engine doesn't support, or ``None``.

    Raises ``re.error`` for an invalid expression.
    """
    parts = repr(parser.parse(pattern))  # the parser's names, and numbers in place of the expression's characters
    for name, flaw in _UNLIKE.items():
        if f"({name}" in parts:
            return flaw
    if _EDGE.search(pattern):
        return Flaw("has \\<, \\> or \\b{", "write < and > without a backslash, and \\b(?:\\{) for a brace after \\b")
    try:
        search_for(pattern)
    except NotSearchable as error:
        return Flaw(f"isn't valid in the syntax of Rust's regex ({error})", "use syntax that Python and Rust share")
    return None


_MOST_PATTERN = 1_000
_EVERYTHING = "matches the empty text, so it matches every text"
_NARROWER = "write a narrower expression, for example .+ instead of .*"


def _expression(value: object) -> str:
    """Return a regular expression as text, so that its section stays comparable and printable."""
    if not isinstance(value, str) or not value or len(value) > _MOST_PATTERN:
        raise wrong(f"must be a regular expression of 1 to {_MOST_PATTERN} characters", fix='SETTING: ["text to find"]')
    try:
        why = unclear(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong(
            f"isn't a regular expression ({error})", fix="put \\ before a character that stands for itself"
        ) from error
    if why is not None:
        raise wrong(why.problem, fix=why.fix)
    return value


def _pattern(value: object) -> str:
    pattern = _expression(value)
    if re.search(pattern, "") is not None:
        raise wrong(_EVERYTHING, fix=_NARROWER)
    return pattern


def _searched(value: object) -> str:
    pattern = _expression(value)
    if (why := unsearchable(pattern)) is not None:
        raise wrong(why.problem, fix=why.fix)
    if search_for(pattern)(""):
        raise wrong(_EVERYTHING, fix=_NARROWER)
    return pattern


_PATTERN_SCHEMA = {"type": "string", "minLength": 1, "maxLength": _MOST_PATTERN}

Pattern = Annotated[str, PlainValidator(_pattern), WithJsonSchema(_PATTERN_SCHEMA)]
"""A regular expression in Python's syntax that can match anywhere in a text."""

SearchedPattern = Annotated[str, PlainValidator(_searched), WithJsonSchema(_PATTERN_SCHEMA)]
"""A regular expression without backtracking, so that searches take linear time."""
