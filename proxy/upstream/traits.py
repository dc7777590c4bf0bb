"""What an upstream takes: edits of a request that leaves in the proxy's own words, and a memory of those that helped.

A bridge writes words that the client never sent: another name for a limit, a user's id, a role. If the upstream refuses
one of them, ``refusals.read`` returns the edits that take it back. ``apply`` makes them in the final body, before it
leaves. ``known`` returns those that are public and change nothing that matters.

    >>> body = {"model": "m", "temperature": 0.5}
    >>> apply(body, [Edit("without", "temperature")])
    ('without temperature',)
    >>> body
    {'model': 'm'}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cachetools import TTLCache

from proxy.constants import DAY
from proxy.dialects.chat.alternation import NOTE, alternating_messages
from proxy.store.forgetting import drop
from proxy.tokens.media import MEDIA_LABELS

MODELS = 10_000  # models of tenants that are remembered
USELESS_SECONDS = 3_600.0  # seconds for which an edit isn't tried again that didn't change an upstream's refusal
LONGEST_USER = 64  # Characters of a user's id that OpenAI takes. A longer one becomes its hash.
LEAST_OUTPUT = 16  # the least output of OpenAI's Responses API, in tokens


class Edit(NamedTuple):
    """One change of a request. ``path`` has the names of fields, and ``*`` for each element of a list."""

    kind: str
    path: str = ""
    value: Any = None

    @property
    def name(self) -> str:
        """Return the name for records and logs, without any value."""
        return " ".join(filter(None, (self.kind, self.path)))


ALTERNATING = Edit("alternating")
WITHOUT_SYSTEM = Edit("without_system")
WITHOUT_EMPTY = Edit("without_empty")
WITHOUT_REASONING = Edit("without_reasoning")
WITH_REASONING = Edit("with_reasoning")
LABELLED_MEDIA = Edit("labelled_media")
SHORT_IDS = Edit("short_ids")
SIGNED_CALLS = Edit("signed_calls")
STREAMS = Edit("streams")

Place = tuple[str, str, str]  # an upstream, its name for the model, and a tenant

REASONING = ("reasoning_content", "reasoning", "reasoning_details", "reasoning_text", "thinking_blocks", "thinking")
"""Fields of messages with reasoning."""

_NO_EFFORT = ("none", "off", "disabled")
SCALE = (*_NO_EFFORT, "minimal", "low", "medium", "default", "high", "xhigh", "max")
"""Efforts, from the least to the most. ``default`` is about as much as ``medium``."""

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_UNCHECKED = {"extra_content": {"google": {"thought_signature": "skip_thought_signature_validator"}}}
"""See https://ai.google.dev/gemini-api/docs/thought-signatures: for calls that another model wrote."""
LABEL = "[{kind} omitted: this model takes text only]"


# ---- Edits


def apply(body: dict[str, Any], edits: Iterable[Edit]) -> tuple[str, ...]:
    """Change a decoded request of chat completions or responses. Return the names of the edits with an effect."""
    return tuple(edit.name for edit in edits if _applied(body, edit))


def _applied(body: dict[str, Any], edit: Edit) -> bool:
    if edit.kind in _MESSAGES:
        field = "messages" if "messages" in body else "input"
        if not isinstance(messages := body.get(field), list) or (field == "input" and edit not in _OF_ITEMS):
            return False
        body[field] = _MESSAGES[edit.kind](messages)
        return bool(body[field] != messages)
    if edit == STREAMS:
        changed, body["stream"] = not body.get("stream"), True
        return changed
    change = _FIELDS.get(edit.kind)
    places = [] if change is None else list(_places(body, edit.path.split(".")))
    return True in [change(holder, name, edit.value) for holder, name in places if change is not None]


def _places(value: Any, path: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects that have the field at a path, and the field's name."""
    name, *rest = path
    if name == "*":
        for one in value if isinstance(value, list) else ():
            yield from _places(one, rest)
    elif isinstance(value, dict) and value.get(name) is not None:
        if rest:
            yield from _places(value[name], rest)
        else:
            yield value, name


def _without(holder: dict[str, Any], name: str, _: Any) -> bool:
    del holder[name]
    return True


def _renamed(holder: dict[str, Any], name: str, other: str) -> bool:
    value = holder.pop(name)
    holder.setdefault(other, value)
    return True


def _shortened(holder: dict[str, Any], name: str, most: int) -> bool:
    value = holder[name]
    if not isinstance(value, str | list) or len(value) <= most:
        return False
    holder[name] = value[:most] if isinstance(value, list) else hashlib.sha256(value.encode()).hexdigest()[:most]
    return True


def _bounded(holder: dict[str, Any], name: str, bound: float, choose: Callable[[float, float], float]) -> bool:
    value = holder[name]
    if is_number(value):
        holder[name] = choose(value, bound)
    return bool(holder[name] != value)


def _nearest(holder: dict[str, Any], name: str, allowed: Sequence[str]) -> bool:
    value = holder[name]
    if value in allowed or value not in SCALE:
        return False
    place, some = SCALE.index(value), value not in _NO_EFFORT
    holder[name] = min(allowed, key=lambda one: ((one not in _NO_EFFORT) != some, abs(SCALE.index(one) - place)))
    return True


_FIELDS: Mapping[str, Callable[[dict[str, Any], str, Any], bool]] = {
    "without": _without,
    "renamed": _renamed,
    "shortened": _shortened,
    "raised": partial(_bounded, choose=max),
    "lowered": partial(_bounded, choose=min),
    "nearest": _nearest,
}

Messages = list[dict[str, Any]]


def _alternating(messages: Messages) -> Messages:
    return [dict(message) for message in alternating_messages(messages)]


def _without_system(messages: Messages) -> Messages:
    """Move what the system says into the user's messages."""
    heads = [one for one in messages if one.get("role") in ("system", "developer")]
    if not heads:
        return messages
    return _alternating([_noted(one) if one in heads else one for one in messages])


def _noted(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    noted = [{"type": "text", "text": NOTE}, *content] if isinstance(content, list) else f"{NOTE}{content}"
    return {"role": "user", "content": noted}


def _without_empty(messages: Messages) -> Messages:
    """Leave out messages without content, and say that a result has none."""
    made = []
    for message in messages:
        content, role = message.get("content"), message.get("role")
        if isinstance(content, list):
            content = [part for part in content if not (isinstance(part, dict) and _blank(part.get("text", "x")))]
        if "role" not in message or not _blank(content):
            made.append(message if "content" not in message else {**message, "content": content})
        elif role == "tool":
            made.append({**message, "content": "(no output)"})
        elif message.get("tool_calls"):
            made.append({name: value for name, value in message.items() if name != "content"} | {"content": None})
    return made


def _blank(content: Any) -> bool:
    return not content or (isinstance(content, str) and not content.strip())


def _without_reasoning(messages: Messages) -> Messages:
    items = [one for one in messages if one.get("type") != "reasoning"]
    return [{name: value for name, value in one.items() if name not in REASONING} for one in items]


def _reasoned(message: dict[str, Any]) -> dict[str, Any]:
    """Add a blank reasoning to calls that have none. Servers take an empty one for a missing one."""
    bare = message.get("tool_calls") and not message.get("reasoning_content")
    return {**message, "reasoning_content": " "} if bare else message


def with_ids(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a chat message or an item with other ids of its calls, or of the call that it answers."""

    def changed(holder: Any, name: str) -> Any:
        id = holder.get(name) if isinstance(holder, dict) else None
        return {**holder, name: change(id)} if isinstance(id, str) else holder

    made: dict[str, Any] = changed(changed(message, "tool_call_id"), "call_id")
    if isinstance(calls := message.get("tool_calls"), list):
        made = {**made, "tool_calls": [changed(call, "id") for call in calls]}
    return message if made == message else made


def short_id(id: str) -> str:
    """Return an id as Mistral takes it: nine letters and digits. Another one becomes its hash."""
    return id if _SHORT_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def _signed(message: dict[str, Any]) -> dict[str, Any]:
    """Add Google's substitute for a thought signature to the first call of a message if it has none."""
    first, *others = message.get("tool_calls") or [{"extra_content": None}]
    return message if "extra_content" in first else {**message, "tool_calls": [first | _UNCHECKED, *others]}


def _labelled(message: dict[str, Any]) -> dict[str, Any]:
    return {name: _in_text(value) if name in ("content", "output") else value for name, value in message.items()}


def _in_text(content: Any) -> Any:
    if not isinstance(content, list) or not any(_media_kind(part) for part in content):
        return content
    parts: list[Any] = [
        {"type": "text", "text": LABEL.format(kind=kind)} if (kind := _media_kind(one)) else one for one in content
    ]
    texts = [part.get("text") for part in parts]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else parts


def _media_kind(part: Any) -> str | None:
    return MEDIA_LABELS.get(str(part.get("type"))) if isinstance(part, dict) else None


def _each(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Messages], Messages]:
    return lambda messages: list(map(change, messages))


_MESSAGES: Mapping[str, Callable[[Messages], Messages]] = {
    ALTERNATING.kind: _alternating,
    WITHOUT_SYSTEM.kind: _without_system,
    WITHOUT_EMPTY.kind: _without_empty,
    WITHOUT_REASONING.kind: _without_reasoning,
    WITH_REASONING.kind: _each(_reasoned),
    LABELLED_MEDIA.kind: _each(_labelled),
    SHORT_IDS.kind: _each(partial(with_ids, change=short_id)),
    SIGNED_CALLS.kind: _each(_signed),
}

_OF_ITEMS = (WITHOUT_REASONING, LABELLED_MEDIA, SHORT_IDS)
"""Edits of messages that also fit the items of the Responses API."""

# ---- Public habits

_SHORT_IDS = tuple(Edit("shortened", name, LONGEST_USER) for name in ("user", "safety_identifier", "prompt_cache_key"))

_KNOWN: Sequence[tuple[re.Pattern[str], tuple[Edit, ...]]] = (
    (re.compile(r""), (*_SHORT_IDS, Edit("raised", "max_output_tokens", LEAST_OUTPUT))),
    (
        re.compile(r"(?:^|/)(?:open-)?(?:mistral|codestral|devstral|ministral|magistral|pixtral|mixtral)"),
        (ALTERNATING, SHORT_IDS),
    ),
)
"""Edits that are public and cost nothing, by the family of the model."""


def known(family: str) -> tuple[Edit, ...]:
    """Return the edits that a family of models is known to need. See ``Profile.family``."""
    return tuple(edit for pattern, edits in _KNOWN if pattern.search(family.lower()) for edit in edits)


class RefusedRequest(NamedTuple):
    """An upstream's own refusal, and the body that it refused."""

    status: int
    said: bytes
    sent: bytes


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- Memory


class Memory:
    """The edits that upstreams were found to need, by place. They're remembered for a day."""

    def __init__(self) -> None:
        self._helped: TTLCache[Place, tuple[Edit, ...]] = TTLCache(MODELS, DAY)
        self._useless: TTLCache[tuple[str, str, str, Edit], bool] = TTLCache(MODELS, USELESS_SECONDS)

    def edits(self, place: Place) -> tuple[Edit, ...]:
        """Return the edits to make, in the order in which they were learned."""
        # Of caches with a time to live, `in` is the quickest question, and few upstreams need edits.
        return self._helped.get(place, ()) if place in self._helped else ()

    def learn(self, place: Place, edits: Iterable[Edit]) -> None:
        """Remember edits that helped. A newer one replaces one of the same field, and any renaming another."""
        for edit in edits:
            replaced = (edit.kind, edit.path) if edit.kind != "renamed" else (edit.kind,)
            self._helped[place] = (*(one for one in self.edits(place) if one[: len(replaced)] != replaced), edit)

    def unlearn(self, place: Place, edit: Edit) -> None:
        """Forget an edit that an upstream was found not to need."""
        if edit in self.edits(place):
            self._helped[place] = tuple(one for one in self.edits(place) if one != edit)

    def acquit(self, place: Place, edits: Iterable[Edit]) -> None:
        """Remember for an hour that these edits aren't what a refusal is about."""
        self._useless.update({(*place, edit): True for edit in edits})

    def helps(self, place: Place, edit: Edit) -> bool:
        """Return whether an edit may help. It may not if it recently changed nothing."""
        useless: bool = (*place, edit) in self._useless
        return not useless

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._helped, forgotten, 2) | drop(self._useless, forgotten, 2)
