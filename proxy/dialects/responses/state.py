"""Requests whose history the server keeps, by ``previous_response_id``.

If such a request overflows, its own items are rarely the cause. ``/responses/compact`` shortens the chain at the
server, and the request continues from its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator

from proxy.config.fields import Section, off_for_false
from proxy.config.sections import PolicySection
from proxy.constants import UNDECODABLE


class ResponsesSettings(Section):
    """Settings for `/v1/responses`."""

    state: Annotated[Literal["recover", "compact", "off"], BeforeValidator(off_for_false)] = "recover"
    """When the upstream compacts a history that it keeps (`previous_response_id`). recover: after an overflow. compact:
    also when the conversation reaches the trigger. off: never."""


SECTION = PolicySection("responses", ResponsesSettings, "Settings for `/v1/responses`.", apart=True)

CALL_TYPES = frozenset({"function_call", "custom_tool_call"})
OUTPUT_TYPES = frozenset({"function_call_output", "custom_tool_call_output"})

_FIELD = b'"previous_response_id"'
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def previous_response(raw: bytes) -> str | None:
    """Return the id of the response that a request continues; ``None`` if it has its whole history."""
    if _FIELD not in raw:
        return None
    value = _value(_fields(raw).get("previous_response_id"))
    return value if isinstance(value, str) and value else None


def continues(previous_response_id: msgspec.Raw, conversation: msgspec.Raw) -> bool:
    """Return whether the server has a part of the history: by an earlier response, or in a stored conversation.

    A missing field is empty.
    """
    previous = _value(previous_response_id)
    return (isinstance(previous, str) and previous != "") or _value(conversation) not in (None, "")


def compact_request(raw: bytes, model: str) -> bytes:
    """Return the body for ``POST /responses/compact``, which shortens the chain of a request."""
    return msgspec.json.encode({"model": model, "previous_response_id": previous_response(raw)})


def open_calls(raw: bytes) -> frozenset[str]:
    """Return the ids of calls whose outputs are in a request, but the calls aren't."""
    items = _items(raw)
    answered = {item.get("call_id") for item in items if item.get("type") in OUTPUT_TYPES}
    made = {item.get("call_id") for item in items if item.get("type") in CALL_TYPES}
    return frozenset(call for call in answered - made if isinstance(call, str))


def calls_in(output: object, wanted: frozenset[str]) -> list[dict[str, Any]]:
    """Return the wanted calls in a response's ``output``, without the ids by which the server stored them."""
    items = output if isinstance(output, list) else []
    calls = (item for item in items if isinstance(item, dict) and item.get("type") in CALL_TYPES)
    return [
        {key: value for key, value in call.items() if key not in ("id", "status")}
        for call in calls
        if call.get("call_id") in wanted
    ]


def continued(raw: bytes, compacted: Sequence[object], calls: Sequence[object]) -> bytes:
    """Return a request that continues from a compacted chain in place of ``previous_response_id``.

    ``calls`` are those that the request's outputs answer. All other fields keep their bytes.
    """
    fields = _fields(raw)
    del fields["previous_response_id"]
    own = _value(fields.get("input"))
    items = own if isinstance(own, list) else [{"role": "user", "content": own}] if isinstance(own, str) else []
    fields["input"] = msgspec.Raw(msgspec.json.encode([*compacted, *calls, *items]))
    return msgspec.json.encode(fields)


def _items(raw: bytes) -> list[dict[str, Any]]:
    value = _value(_fields(raw).get("input"))
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _decoder.decode(raw)
    except UNDECODABLE:
        return {}


def _value(raw: msgspec.Raw | None) -> object:
    if not raw:
        return None
    try:
        value: object = msgspec.json.decode(raw)
    except UNDECODABLE:
        return None
    return value
