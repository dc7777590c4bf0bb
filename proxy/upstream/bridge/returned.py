"""What bridges write into answers, so that every API's owner takes it, and its way back to the server.

A client may send an answer's parts to another upstream later. So the ids of calls have the characters and the length
that all APIs take. ``Writer`` writes them, and ``restored`` gives a server its own ids back:

    >>> writer = Writer("kimi-k2", [])
    >>> id = writer.id("functions.run:0", "run")
    >>> call = {"id": id, "type": "function", "function": {"name": "run", "arguments": "{}"}}
    >>> restored([{"role": "assistant", "tool_calls": [call]}], "kimi-k2")[0]["tool_calls"][0]["id"]
    'functions.run:0'

Data that a server attaches to calls and messages, such as Gemini's thought signatures, travels in a block of redacted
thinking. Another model gets neither the server's own ids nor its data.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.request import fields_of, listed, without_lone_surrogates
from proxy.dialects.units import decode, encode
from proxy.errors import BadBody
from proxy.upstream.bridge.transport import LARGE
from proxy.upstream.traits import short_id, with_ids
from proxy.upstream.transport import MESSAGES_PATH, RESPONSES_PATH, Outgoing

MOST_DATA = 131_072  # Characters of a server's data in one block. Clients send it in each later request.
OPAQUE = ("reasoning_details", "reasoning_opaque", "extra_content")  # OpenRouter, Copilot, and Google want these back
MARK = "proxy:"  # begins a server's data in a block of redacted thinking
SEALED = '[{"type":"'  # begins the blocks of thinking that a bridge writes as sealed reasoning of `/v1/responses`

_UNIQUE = re.compile(r"[a-z]+_proxy[0-9a-f]{24,32}")
_TAKEN = re.compile(r"[a-zA-Z0-9_-]{1,40}")  # an id that Anthropic (characters) and OpenAI (length) take

_CHAT = re.compile(r".{0,40}", re.DOTALL)
ITEM_IDS = re.compile(r"[a-zA-Z0-9_-]{0,64}")  # ids of calls that OpenAI takes in `/v1/responses`

_SEALED = re.compile(r"call_p([0-9a-f]{4})[0-9a-f]{4}-([a-zA-Z0-9_-]{1,25})")
"""A writer's id: a digest of the model, random digits, and the server's id. ``-n`` is the name of the function, and
``-`` with two digits is a byte."""

_ESCAPED = re.compile(r"-n|(?:-[0-9a-f]{2})+")
_PROOF = {"thinking": "signature", "redacted_thinking": "data"}
_UNSIGNED = (b'"signature":""', b'"signature": ""')
_LITELLM = "__thought__"  # what LiteLLM writes between an id and a thought signature of Gemini's


def unique(prefix: str) -> str:
    """Return a new id. Ids of upstreams may be empty, or occur again in other conversations."""
    return f"{prefix}_proxy{uuid.uuid4().hex[:24]}"


def is_unique(id: Any) -> bool:
    """Return whether a bridge made an id, so that it never occurs again."""
    return isinstance(id, str) and _UNIQUE.fullmatch(id) is not None


def is_verifiable(block: Any) -> bool:
    """Return whether a block of thinking has what its writer needs to verify it."""
    return isinstance(block, dict) and bool(block.get(_PROOF.get(str(block.get("type")), "")))


def is_own(block: Mapping[str, Any]) -> bool:
    """Return whether a block of thinking has data for another server."""
    return str(block.get("data")).startswith(MARK)


def fitted(id: str, form: re.Pattern[str] = _CHAT) -> str:
    """Return an id that OpenAI takes. Another one becomes its hash, which doesn't lead back."""
    return id if form.fullmatch(id) else f"call_{hashlib.sha256(id.encode()).hexdigest()[:32]}"


class Writer:
    """Writes what clients send back. ``taken`` are the ids of the conversation's calls."""

    def __init__(self, model: str, taken: Iterable[str]) -> None:
        self._tag = _tag(model)
        self._taken = set(taken)

    def id(self, own: str, name: str) -> str:
        """Return the id for a call of a function. Only an id that isn't valid, or occurs again, becomes another one.

        One that's too long for this form is lost, unless it carries data.
        """
        made = own
        if own in self._taken or not _TAKEN.fullmatch(own):
            before, found, after = own.partition(name)
            inner = f"{_escaped(before)}-n{_escaped(after)}" if found else _escaped(before)
            made = f"call_p{self._tag}{uuid.uuid4().hex[:4]}-{inner}"
            made = made if _SEALED.fullmatch(made) and made not in self._taken else unique("call")
        self._taken.add(made)
        return made

    def data(self, **data: Any) -> dict[str, Any]:
        """Return the delta of an answer with a server's data: ``message`` of the message, ``calls`` by their ids."""
        text = MARK + msgspec.json.encode({"by": self._tag, **data}).decode()
        return {"thinking_blocks": [{"type": "redacted_thinking", "data": text}]} if len(text) <= MOST_DATA else {}


def restored(messages: Iterable[dict[str, Any]], model: str, *, signed: bool = False) -> list[dict[str, Any]]:
    """Return chat messages with the server's own ids and data. ``signed`` keeps thinking that its writer can verify.

    Results must be behind their calls. The ids of other servers stay if they're short enough, and so do those of calls
    that the server gave one id in the same message.
    """
    made, own = [], dict[str, str]()
    for message in messages:
        blocks, used = message.pop("thinking_blocks", ()), set[str]()
        data = [one for block in blocks if (one := _data(block)) is not None and one.by == _tag(model)]
        for call in message.get("tool_calls", ()):
            id = call["id"]
            extra = {name: value for one in data for name, value in one.calls.get(id, {}).items()}
            theirs = str(extra.pop("id", "") or _unsealed(id, call["function"]["name"], model))
            own[id] = fitted(id) if theirs in used else theirs
            used.add(own[id])
            call |= {"id": own[id], **{name: extra[name] for name in extra.keys() - call.keys()}}
        if "tool_call_id" in message:
            id = message["tool_call_id"]
            message["tool_call_id"] = own.get(id) or fitted(id)
        for one in data:
            merge(message, {name: one.message[name] for name in OPAQUE if name in one.message})
        kept = [block for block in blocks if signed and is_verifiable(block) and not is_own(block)]
        made.append(message | ({"thinking_blocks": kept} if kept else {}))
    return made


def merge(held: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add opaque fields to those before. The texts of a streamed detail become one."""
    for name, value in new.items():
        before = held.get(name)
        if not isinstance(value, list):
            held[name] = before | value if isinstance(value, dict) and isinstance(before, dict) else value
            continue
        details = held[name] = before if isinstance(before, list) else []
        for one in value:
            last = details[-1] if details else None
            if isinstance(last, dict) and isinstance(one, dict) and _continues(last, one):
                texts = {
                    field: last[field] + one[field]
                    for field in ("text", "summary")
                    if last.get(field) and one.get(field)
                }
                details[-1] = last | {field: inner for field, inner in one.items() if inner is not None} | texts
            else:
                details.append(one)


def _continues(last: Mapping[str, Any], detail: Mapping[str, Any]) -> bool:
    same = "index" in detail and all(last.get(name) == detail.get(name) for name in ("type", "index"))
    return same and not ("data" in last or "data" in detail or last.get("signature"))


def _tag(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()[:4]


def _escaped(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", lambda one: "".join(f"-{byte:02x}" for byte in one[0].encode()), text)


def _unsealed(id: str, name: str, model: str) -> str:
    """Return the model's own id in a writer's."""
    found = _SEALED.fullmatch(id)
    if found is None or found[1] != _tag(model):
        return fitted(id)
    return _ESCAPED.sub(
        lambda one: name if one[0] == "-n" else bytes.fromhex(one[0].replace("-", "")).decode("utf-8", "replace"),
        found[2],
    )


class _Data(msgspec.Struct):
    by: str = ""
    message: dict[str, Any] = {}
    calls: dict[str, dict[str, Any]] = {}


def _data(block: Any) -> _Data | None:
    if not isinstance(block, dict) or not is_own(block):
        return None
    try:
        return msgspec.json.decode(block["data"].removeprefix(MARK), type=_Data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


async def cleaned(request: Outgoing, *, verifies: bool, short_ids: bool) -> Outgoing:
    """Return an untranslated request without what only bridges write, because the API's owner refuses it.

    ``verifies`` says that the upstream is Anthropic's, which refuses thinking without its signature. ``short_ids`` says
    that it's Mistral's, which refuses other providers' ids.
    """
    body = request.body
    field: str = "messages"
    change: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    if request.path == MESSAGES_PATH:
        if MARK.encode() in body or (verifies and any(mark in body for mark in _UNSIGNED)):
            change = partial(_verified, verifies=verifies)
    elif request.path == RESPONSES_PATH:
        if b"_proxy" in body or SEALED.replace('"', '\\"').encode() in body:
            field, change = "input", _native_item
    elif _LITELLM.encode() in body and "gemini" not in (request.family or request.model).lower():
        change = partial(with_ids, change=lambda id: id.partition(_LITELLM)[0])
    elif short_ids and b'"tool_call_id"' in body:
        change = partial(with_ids, change=short_id)
    if change is None:
        return request
    changing = partial(_changed, request, field, change)
    return await asyncio.to_thread(changing) if len(body) > LARGE else changing()


def _verified(message: dict[str, Any], *, verifies: bool) -> dict[str, Any] | None:
    """Return a message without thinking that bridges wrote; ``None`` if nothing is left."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    kept = [block for block in content if not isinstance(block, dict) or _is_taken(block, verifies=verifies)]
    return message if len(kept) == len(content) else {**message, "content": kept} if kept else None


def _is_taken(block: dict[str, Any], *, verifies: bool) -> bool:
    return not is_own(block) and (not verifies or block.get("type") != "thinking" or is_verifiable(block))


def _changed(request: Outgoing, field: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Outgoing:
    """Return a request with changed messages or items. Those without a change keep their bytes."""
    try:
        body = request.body if request.expanded is None else request.expanded()
        fields = fields_of(without_lone_surrogates(body))
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


def _native_item(item: dict[str, Any]) -> dict[str, Any] | None:
    """Return an item of ``/v1/responses`` as its owner takes it: without the ids and the reasoning of bridges.

    A reference to an item that the proxy doesn't have stays, so that the upstream refuses it.
    """
    own, kind = is_unique(item.get("id")), item.get("type")
    sealed = kind == "reasoning" and str(item.get("encrypted_content")).startswith(SEALED)
    if sealed or (own and item["id"].startswith("rs_")):
        return None
    return {name: item[name] for name in item if name != "id"} if own and kind != "item_reference" else item
