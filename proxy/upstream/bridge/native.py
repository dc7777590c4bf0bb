"""Relay untranslated requests without what only this proxy wrote, because the API's owner refuses it.

A user changes the model in the middle of a session, so the answers of bridges reach upstreams with the client's API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.request import fields_of, listed, without_lone_surrogates
from proxy.dialects.units import decode, encode
from proxy.errors import BadBody
from proxy.upstream.bridge.returned import MARK, SEALED, is_own, is_unique, is_verifiable
from proxy.upstream.bridge.transport import LARGE
from proxy.upstream.traits import short_id, with_ids
from proxy.upstream.transport import MESSAGES_PATH, RESPONSES_PATH, Outgoing

_Object = dict[str, Any]

_UNSIGNED = (b'"signature":""', b'"signature": ""')
_DATA = "__thought__"
"""What LiteLLM writes between an id and a thought signature of Gemini's."""


async def cleaned(request: Outgoing, *, verifies: bool, short_ids: bool) -> Outgoing:
    """Return a request without what only bridges write.

    ``verifies`` says that the upstream is Anthropic's, which refuses thinking without its signature. ``short_ids`` says
    that it's Mistral's, which refuses other providers' ids.
    """
    body = request.body
    field: str = "messages"
    change: Callable[[_Object], _Object | None] | None = None
    if request.path == MESSAGES_PATH:
        if MARK.encode() in body or (verifies and any(mark in body for mark in _UNSIGNED)):
            change = partial(_verified, verifies=verifies)
    elif request.path == RESPONSES_PATH:
        if b"_proxy" in body or SEALED.replace('"', '\\"').encode() in body:
            field, change = "input", _Items(request)
    elif _DATA.encode() in body and "gemini" not in (request.family or request.model).lower():
        change = partial(with_ids, change=lambda id: id.partition(_DATA)[0])
    elif short_ids and b'"tool_call_id"' in body:
        change = partial(with_ids, change=short_id)
    if change is None:
        return request
    changing = partial(_changed, request, field, change)
    return await asyncio.to_thread(changing) if len(body) > LARGE else changing()


def _verified(message: _Object, *, verifies: bool) -> _Object | None:
    """Return a message without thinking that bridges wrote; ``None`` if nothing is left."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    kept = [block for block in content if not isinstance(block, dict) or _is_taken(block, verifies=verifies)]
    return message if len(kept) == len(content) else {**message, "content": kept} if kept else None


def _is_taken(block: _Object, *, verifies: bool) -> bool:
    return not is_own(block) and (not verifies or block.get("type") != "thinking" or is_verifiable(block))


def _changed(request: Outgoing, field: str, change: Callable[[_Object], _Object | None]) -> Outgoing:
    """Return a request with changed messages or items. Those without a change keep their bytes."""
    try:
        fields = fields_of(without_lone_surrogates(request.body))
        raws = msgspec.json.decode(fields[field], type=list[msgspec.Raw])
    except (BadBody, KeyError, *UNDECODABLE):
        return request  # the upstream judges it
    befores = [dict(decode(raw)) for raw in raws]
    afters = [change(before) for before in befores]
    if all(after is before for after, before in zip(afters, befores, strict=True)):
        return request
    pairs = list(zip(raws, befores, afters, strict=True))
    newest = next((pair for pair in reversed(pairs) if pair[1].get("role") == "assistant"), pairs[-1])
    if newest[1] is not newest[2] and decode(fields.get("thinking", b"")).get("type") == "enabled":
        # Older models want the newest round to begin with thinking, unless it's off.
        fields["thinking"] = msgspec.Raw(b'{"type":"disabled"}')
    kept = [raw if after is before else encode(after) for raw, before, after in pairs if after is not None]
    return msgspec.structs.replace(request, body=msgspec.json.encode({**fields, field: listed(kept)}))


class _Items:
    """Returns items of ``/v1/responses`` as their owner takes them: without ids, references, and reasoning of bridges.

    A reference to an item that the proxy doesn't have stays, so that the upstream refuses it.
    """

    def __init__(self, request: Outgoing) -> None:
        self._request = request
        self._known: dict[str, _Object] | None = None

    def __call__(self, item: _Object) -> _Object | None:
        own = is_unique(item.get("id"))
        if item.get("type") == "item_reference" and own:
            item = self._expanded().get(item["id"], item)
        kind = item.get("type")
        sealed = kind == "reasoning" and str(item.get("encrypted_content")).startswith(SEALED)
        if sealed or (own and item["id"].startswith("rs_")):
            return None
        return {name: item[name] for name in item if name != "id"} if own and kind != "item_reference" else item

    def _expanded(self) -> dict[str, _Object]:
        if self._known is None:
            raw = self._request.body if self._request.expanded is None else self._request.expanded()
            self._known = {
                one["id"]: one
                for one in decode(raw).get("input") or ()
                if isinstance(one, dict) and is_unique(one.get("id"))
            }
        return self._known
