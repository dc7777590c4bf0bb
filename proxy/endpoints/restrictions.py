"""Check requests of teams that may use some models or paths only.

Upstreams don't all read JSON alike: some take the first of two `model` fields, some ignore case, and gateways have
further fields that name models. A request is sent on only if every reader finds the same, allowed model in it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Scope

from proxy.access.authenticator import Caller, may_use
from proxy.constants import UNDECODABLE
from proxy.dialects.request import without_lone_surrogates
from proxy.endpoints.paths import CHAT, MODELS
from proxy.errors import ModelNotAllowed, PathNotAllowed

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

# Parts of names of fields by which servers and gateways choose models besides `model`.
_CHOOSES = ("model", "fallback", "engine", "deployment", "preset")

MOST_FIELDS = 1_000
"""Fields that a body can have at its top, and each of its tools. The APIs have about 40."""

MOST_TOOLS = 1_000
"""Tools that a body can have. OpenAI takes 128."""

INLINE_BYTES = 65_536
"""A body of at most this many bytes is checked on the event loop, a larger one in a thread."""

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

    ``raw`` is the decompressed body. The check covers the fields at its top, the query, and tools, which can have
    models of their own. A body with more than ``MOST_FIELDS`` fields or ``MOST_TOOLS`` tools isn't allowed.
    """
    if len(raw) <= INLINE_BYTES:
        _check(scope, caller, raw)
    else:
        await asyncio.to_thread(_check, scope, caller, raw)


def _check(scope: Scope, caller: Caller, raw: bytes) -> None:
    fields = _fields(raw)
    if fields is None:
        raise ModelNotAllowed(f"This key is limited to some models, but the body isn't valid JSON. {ASK}")
    model = _decoded(fields.get("model"), str)
    if model is None:
        raise ModelNotAllowed(
            f"This key is limited to some models, but the body doesn't name one. {ASK}", param="model"
        )
    if not may_use(caller, model):
        raise ModelNotAllowed(f"This key may not use the model {model[:100]!r}. {ASK}", param="model")
    tools = _decoded(fields.get("tools"), list[msgspec.Raw]) or []
    if len(tools) > MOST_TOOLS:
        raise ModelNotAllowed(
            f"This key is limited to some models, and the body has over {MOST_TOOLS} tools. Send fewer tools.",
            param="tools",
        )
    for tool in tools:
        named = (_fields(tool) or {}).get("model")
        if named is not None and ((text := _decoded(named, str)) is None or not may_use(caller, text)):
            raise ModelNotAllowed(
                "This key may not use the model that a tool names. Send the tool without it.", param="tools"
            )
    for name, _ in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name == "model":
            raise ModelNotAllowed(f"With this key, the query can't name a model. {ASK}", param="model")
        _check_name(name)


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
            raise ModelNotAllowed(
                f"This key is limited to some models, and the body has over {MOST_FIELDS} fields. Send fewer fields."
            )
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

    def zero(_: str) -> int:
        return 0

    try:
        value = json.loads(
            raw, strict=False, object_pairs_hook=_distinct, parse_int=zero, parse_float=zero, parse_constant=zero
        )
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, value in pairs:
        if name in found:
            raise _repeated(name)
        found[name] = value
    return found


def _repeated(name: str) -> ModelNotAllowed:
    return ModelNotAllowed(f"The body has {name[:100]!r} twice. Send it once.", param=name[:100])


def _check_name(name: str) -> None:
    """Raise ``ModelNotAllowed`` for the name of a field by which some server would choose a model."""
    if name in ("model", "tools"):
        return
    letters = "".join(char for char in name.casefold() if char.isalnum())
    if letters == "tools" or any(part in letters for part in _CHOOSES):
        raise ModelNotAllowed(
            f"With this key, only 'model' can name a model. Send the request without {name[:100]!r}.", param=name[:100]
        )


def _decoded(raw: msgspec.Raw | None, kind: type[T]) -> T | None:
    """Return a JSON value of a type, or ``None`` for anything else."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except UNDECODABLE:
        return None
