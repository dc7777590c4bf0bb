"""Check requests of teams that may use some models or paths only.

Upstreams don't all read JSON alike: some take the first of two `model` fields, some ignore case, and gateways have
further fields that name models. A request is sent on only if every reader finds the same, allowed model in it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec.structs import replace
from starlette.types import Scope

from proxy.access.authenticator import Caller, may_use
from proxy.access.spending import Spending, limit_of
from proxy.constants import UNDECODABLE
from proxy.dialects.request import without_lone_surrogates
from proxy.endpoints.paths import CHAT, MODELS
from proxy.errors import ModelNotAllowed, PathNotAllowed, SpendingExceeded
from proxy.pipeline.billing import Bill
from proxy.telemetry.record import Usage

_NAMING_MODELS = frozenset(
    {
        *("/v1/completions", "/v1/embeddings", "/v1/moderations"),
        *("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
        *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    }
)
"""Paths whose POST names the model that answers. They list, change and delete nothing at the provider."""

# Parts of names of fields by which servers and gateways choose a model, a provider, or an address besides `model`.
_CHOOSES = (
    *("model", "fallback", "engine", "deployment", "preset", "variant", "provider", "rout", "gateway"),
    *("apibase", "baseurl", "apikey", "userconfig", "litellm", "extraheaders", "extraquery", "extrabody"),
)

_CHECKED = frozenset({"model", "tools", "provider", "extra_body"})
"""Fields of these names are allowed if their values are."""

# Fields of OpenRouter's `provider` that only forbid providers.
_FORBIDS = frozenset({"data_collection", "zdr", "require_parameters", "enforce_distillable_text"})

_CONVERSATION = frozenset({"messages", "input", "system", "instructions", "prompt"})
"""Fields with texts, calls, and results. Of these, only objects that could choose a model are read."""

# In a conversation: endings of names of fields that define tools, by their letters, and fields with arguments of calls.
_DEFINES = re.compile(r"(?:tools?|toolsets?|toolchanges?|definitions?)$")
_ARGUMENTS = frozenset({"arguments", "args"})
_MAY_NAME = re.compile(rb"model|fallback|\\u", re.I)

# Endings of names of fields, anywhere in a body, whose texts are models.
_NAMES_MODELS = ("model", "models", "modelid", "modelname", "fallback", "fallbacks")

# In a JSON Schema: fields whose names are those of parameters, and fields with examples of parameters.
_PARAMETERS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_EXAMPLES = frozenset({"default", "const", "enum", "examples", "input_examples"})

MOST_FIELDS = 1_000  # Fields that a body can have at its top, and each of its tools. The APIs have about 40.
MOST_TOOLS = 1_000  # Tools that a body can have. OpenAI takes 128.
INLINE_BYTES = 65_536  # a body of at most this many bytes is checked on the event loop, a larger one in a thread

T = TypeVar("T")

ASK = "Use one of the key's models in 'model', or ask the operator of this proxy."


def check_path(scope: Scope, caller: Caller) -> None:
    """Raise ``PathNotAllowed`` or ``ModelNotAllowed`` if the caller's team may not use the path of a request."""
    if caller.paths == "all":
        return
    method, path = scope["method"], scope["path"]
    if (path == CHAT and method == "POST") or (path == MODELS and method in ("GET", "HEAD")):
        return
    if caller.paths == "models":
        if method == "POST" and path in _NAMING_MODELS:
            return
        if method in ("GET", "HEAD") and path.startswith(f"{MODELS}/"):
            if may_use(caller, path.removeprefix(f"{MODELS}/")):
                return
            raise ModelNotAllowed(f"This key may not use this model. {ASK}", param="model")
    raise PathNotAllowed(f"This key may not use {method} {path[:200]}. Ask the operator of this proxy to allow it.")


async def check_body(scope: Scope, caller: Caller, raw: bytes) -> None:
    """Raise ``ModelNotAllowed`` unless a body is JSON that names one model, and the caller may use that model.

    ``raw`` is the decompressed body. The check covers all fields, the query, and tools in the conversation, but not the
    conversation's other parts, examples in schemas, and ``metadata``. A body with more than ``MOST_FIELDS`` fields or
    ``MOST_TOOLS`` tools isn't allowed.
    """
    if len(raw) <= INLINE_BYTES:
        _check(scope, caller, raw)
    else:
        await asyncio.to_thread(_check, scope, caller, raw)


_NO_PRICE = (
    "Your team has a budget in US dollars, and the model '{model}' has no price. Use another model, or ask the "
    "operator of this proxy to add it to 'prices'."
)


async def check_budget(spending: Spending, scope: Scope, caller: Caller, bill: Bill, model: str, raw: bytes) -> None:
    """Raise ``SpendingExceeded`` if the caller's team has spent its limit, unless the request can only cost nothing.

    It can if its model's price is 0, and the limit is in US dollars. Such a limit can't hold without a price, so raise
    ``ModelNotAllowed`` for a model that has none.
    """
    limit = limit_of(caller)
    if bill.price_of is None and limit is not None and limit.usd is not None:
        raise ModelNotAllowed(_NO_PRICE.format(model=model[:100]), param="model")
    try:
        await spending.check(caller)
    except SpendingExceeded:
        priced = bill.price_of is not None and limit is not None and limit.usd is not None
        if not priced or bill.amount(Usage(1, 1)).money:
            raise
        # The body must not name a model that costs something.
        await check_body(scope, replace(caller, models=(model,)), raw)


def _check(scope: Scope, caller: Caller, raw: bytes) -> None:
    fields = _fields(raw)
    if fields is None:
        raise _unreadable()
    model = _decoded(fields.get("model"), str)
    if model is None:
        raise ModelNotAllowed(
            f"This key is limited to some models, but the body doesn't name one. {ASK}", param="model"
        )
    if not _allowed(caller, model):
        raise ModelNotAllowed(f"This key may not use the model {model[:100]!r}. {ASK}", param="model")
    if (extra := fields.get("extra_body")) is not None:
        inner = _fields(extra) or {}
        if "extra_body" in inner:
            raise _only_model("extra_body")
        _check_fields(caller, inner)
    _check_fields(caller, fields)
    query = scope["query_string"].decode("latin-1").replace(";", "&")
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if name in _CHECKED:
            raise ModelNotAllowed(f"With this key, the query can't have {name!r}. {ASK}", param=name)
        _check_name(name)


def _allowed(caller: Caller, model: str) -> bool:
    """Return whether a caller may use a model.

    LiteLLM takes several models with commas, and OpenRouter a preset of models. They must be listed literally.
    """
    several = "," in model or "@preset/" in model
    return may_use(caller, model) and (not several or model in (caller.models or ()))


def _check_fields(caller: Caller, fields: Mapping[str, msgspec.Raw]) -> None:
    """Raise ``ModelNotAllowed`` if a field names a model that the caller may not use, or chooses a provider."""
    for name, raw in fields.items():
        if name in _CONVERSATION:
            _check_conversation(caller, name, raw)
        elif name != "metadata":
            value = _check_value(caller, name, raw)
            if name == "provider" and not (isinstance(value, dict) and _FORBIDS.issuperset(value)):
                raise ModelNotAllowed(
                    f"With this key, 'provider' can have only {', '.join(sorted(_FORBIDS))}.", param="provider"
                )


def _check_value(caller: Caller, field: str, raw: msgspec.Raw) -> Any:
    """Return a field's value. Raises ``ModelNotAllowed`` if a part names a model that the caller may not use."""
    try:
        value = _loaded(bytes(raw))
    except (ValueError, RecursionError):
        raise _unreadable() from None
    if field == "tools" and isinstance(value, list):
        if len(value) > MOST_TOOLS:
            raise ModelNotAllowed(
                f"This key is limited to some models, and the body has over {MOST_TOOLS} tools. Send fewer tools.",
                param="tools",
            )
        if any(len(tool) > MOST_FIELDS for tool in value if isinstance(tool, dict)):
            raise _too_many()
    _check_names(caller, field, value, _names_model(field))
    return value


def _check_conversation(caller: Caller, field: str, raw: msgspec.Raw) -> None:
    """Raise ``ModelNotAllowed`` if an object of a conversation, at any depth, could choose another model."""
    if _MAY_NAME.search(raw):
        try:
            value = _loaded(bytes(raw), _merged)
        except (ValueError, RecursionError):
            raise _unreadable() from None
        _check_names(caller, field, value, None)


def _check_names(caller: Caller, field: str, value: Any, names: bool | None) -> None:
    """Raise ``ModelNotAllowed`` if a value names a model that the caller may not use.

    ``names`` is true if all texts are models, and false if only those in fields for models are. ``None`` is for a
    conversation. There, the arguments of calls and the texts of messages choose nothing.
    """
    left = [(names, value)]
    while left:
        names, inner = left.pop()
        if isinstance(inner, dict):
            chooses = names is not None or ("type" in inner and "role" not in inner)
            called = "name" in inner or str(inner.get("type")).endswith("tool_use")
            for key, one in inner.items():
                if key in _PARAMETERS and isinstance(one, dict):
                    left += [(False, schema) for schema in one.values()]
                elif key in _EXAMPLES or (names is None and (key in _ARGUMENTS or (key == "input" and called))):
                    continue
                elif chooses and _names_model(key):
                    left.append((True, one))
                else:
                    left.append((False if names is None and _DEFINES.search(_letters(key)) else names, one))
        elif isinstance(inner, list):
            left += [(names, one) for one in inner]
        elif names and isinstance(inner, str) and not _allowed(caller, inner):
            named = f"{inner[:100]!r}, named in {field[:100]!r}"
            raise ModelNotAllowed(
                f"This key may not use the model {named}. Send the request without it.", param=field[:100]
            )


class _Name:
    """A field's name. Two are never equal, so that no field hides another."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _fields(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """Return the fields of a JSON object, or ``None`` for anything else.

    Raises ``ModelNotAllowed`` for more than ``MOST_FIELDS`` fields, for repeated ones, and for names that some servers
    take for `model`.
    """
    pairs = _pairs(without_lone_surrogates(bytes(raw)))
    if pairs is None and (plain := _plain(bytes(raw))) is not None:
        pairs = _pairs(without_lone_surrogates(plain))
    if pairs is None:
        return None
    fields: dict[str, msgspec.Raw] = {}
    for name, value in pairs:
        if name in fields:
            raise _repeated(name)
        _check_name(name)
        fields[name] = value
    return fields


def _pairs(raw: bytes) -> list[tuple[str, msgspec.Raw]] | None:
    """Return the fields of a JSON object in their order, repeated ones too, or ``None`` for anything else.

    Raises ``ModelNotAllowed`` for more than ``MOST_FIELDS`` fields.
    """
    count = itertools.count(1)

    def name(text: str) -> _Name:
        if next(count) > MOST_FIELDS:
            raise _too_many()
        return _Name(text)

    decoder = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, text: name(text))
    try:
        found: dict[_Name, msgspec.Raw] = decoder.decode(raw)
    except UNDECODABLE:
        return None
    return [(field.text, value) for field, value in found.items()]


def _plain(raw: bytes) -> bytes | None:
    """Return the value that Python's parser reads, as strict JSON with zeros for numbers, or ``None``.

    It takes NaN, control characters and other encodings, as some upstreams do. Raises ``ModelNotAllowed`` for repeated
    fields.
    """

    try:
        return json.dumps(_loaded(raw)).encode()
    except (ValueError, RecursionError):
        return None


def _loaded(raw: bytes, fields: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value that Python's parser reads, with zeros for numbers. ``fields`` makes an object of its fields.

    Raises ``ModelNotAllowed`` for repeated fields unless ``fields`` takes them, ``ValueError``, and ``RecursionError``.
    """

    def zero(_: str) -> int:
        return 0

    return json.loads(
        raw, strict=False, object_pairs_hook=fields or _distinct, parse_int=zero, parse_float=zero, parse_constant=zero
    )


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in pairs:
        if name in found:
            raise _repeated(name)
        found[name] = value
    return found


def _merged(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with a list of the values of each repeated field."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        found[name] = [found[name], value] if name in found else value
    return found


def _repeated(name: str) -> ModelNotAllowed:
    return ModelNotAllowed(f"The body has {name[:100]!r} twice. Send it once.", param=name[:100])


def _unreadable() -> ModelNotAllowed:
    return ModelNotAllowed(f"This key is limited to some models, but the body isn't valid JSON. {ASK}")


def _too_many() -> ModelNotAllowed:
    return ModelNotAllowed(
        f"This key is limited to some models, and the body has over {MOST_FIELDS} fields. Send fewer fields."
    )


def _only_model(name: str) -> ModelNotAllowed:
    return ModelNotAllowed(
        f"With this key, only 'model' can choose a model. Send the request without {name[:100]!r}.", param=name[:100]
    )


def _check_name(name: str) -> None:
    """Raise ``ModelNotAllowed`` for the name of a field by which some server would choose a model or a provider."""
    if name in _CHECKED:
        return
    letters = _letters(name)
    if letters == "tools" or any(part in letters for part in _CHOOSES):
        raise _only_model(name)


def _names_model(name: str) -> bool:
    return _letters(name).endswith(_NAMES_MODELS)


@lru_cache(4_096)
def _letters(name: str) -> str:
    return "".join(char for char in name.casefold() if char.isalnum())


def _decoded(raw: msgspec.Raw | None, kind: type[T]) -> T | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except UNDECODABLE:
        return None
