"""OpenAI's ``POST /responses/compact``: the user's messages and an encrypted item in place of items.

It compacts the items of a request, or the history that the server keeps, by ``previous_response_id``. If a request with
such a history overflows, its own items are rarely the cause. So the chain at the server is shortened, and the request
continues from the result. See developers.openai.com/api/docs/guides/compaction, November 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.dialects.conditions import goes
from proxy.dialects.request import NOTHING, encoded, fields_of, value_of
from proxy.dialects.responses.units import is_client_call, item_row
from proxy.errors import BadBody

_FIELD = b'"previous_response_id"'
_LACKS = frozenset({"metadata", "moderation", "safety_identifier", "store", "user"})
"""Conditions that ``/responses/compact`` has no fields for."""


def previous_response(raw: bytes) -> str | None:
    """Return the id of the response that a request continues; ``None`` if it has its whole history."""
    if _FIELD not in raw:
        return None
    value = value_of(_fields(raw).get("previous_response_id", NOTHING))
    return value if isinstance(value, str) and value else None


def compact_request(raw: bytes, model: str) -> bytes:
    """Return the body for ``POST /responses/compact``, which shortens the chain of a request."""
    own = {"model": model, "previous_response_id": previous_response(raw)}
    return msgspec.json.encode({**own, **_conditions(_fields(raw))})


def _conditions(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    return {name: value for name, value in fields.items() if goes(name) and name not in _LACKS}


def open_calls(raw: bytes) -> frozenset[str]:
    """Return the ids of calls whose outputs are in a request, but the calls aren't."""
    items = _items(raw)
    answered = {item.get("call_id") for item in items if item_row(item).plays == "answer"}
    made = {item.get("call_id") for item in items if is_client_call(item)}
    return frozenset(call for call in answered - made if isinstance(call, str))


def calls_in(output: object, wanted: frozenset[str]) -> list[dict[str, Any]]:
    """Return the wanted calls in a response's ``output``, without the ids by which the server stored them."""
    items = output if isinstance(output, list) else []
    calls = (item for item in items if isinstance(item, dict) and is_client_call(item))
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
    own = value_of(fields.get("input", NOTHING))
    items = own if isinstance(own, list) else [{"role": "user", "content": own}] if isinstance(own, str) else []
    fields["input"] = encoded([*compacted, *calls, *items])
    return msgspec.json.encode(fields)


def _items(raw: bytes) -> list[dict[str, Any]]:
    value = value_of(_fields(raw).get("input", NOTHING))
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    try:
        return fields_of(raw)
    except BadBody:
        return {}
