"""What an upstream takes: edits of a request that leaves in the proxy's own words, and the refusals that ask for them.

A bridge writes words that the client never sent: another name for a limit, a user's id, a role. If the upstream refuses
one of them, ``read`` returns the edits that take it back. ``apply`` makes them in the final body, before it leaves.
``known`` returns those that are public and change nothing that matters. ``Memory`` remembers which ones helped.

    >>> refusal = b'{"error": {"message": "Unsupported parameter", "param": "temperature"}}'
    >>> read(refusal, {"model": "m", "temperature": 0.5})
    (Edit(kind='without', path='temperature', value=None),)

No edit touches what the answer depends on, see ``_protected``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from cachetools import TTLCache

from proxy.constants import DAY
from proxy.dialects.chat.alternation import NOTE, alternating_messages
from proxy.dialects.conditions import FIELDS, Reach
from proxy.dialects.units import encode
from proxy.store.forgetting import drop

REFUSAL_BYTES = 4_096
"""Bytes of a refusal that are read. Names behind them are in an echo of the request."""

MOST_NAMES = 16

MOST_VALUES = 100
"""Values of a refusal in JSON that are read."""

MODELS = 10_000
"""Models of tenants that are remembered."""

USELESS_SECONDS = 3_600.0
"""Seconds for which an edit isn't tried again that didn't change an upstream's refusal."""

LONGEST_USER = 64
"""Characters of a user's id that OpenAI takes. A longer one becomes its hash."""

LEAST_OUTPUT = 16
"""The least output of OpenAI's Responses API, in tokens."""


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
STREAMS = Edit("streams")

Place = tuple[str, str, str]
"""An upstream, its name for the model, and a tenant."""

_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "reasoning_text", "thinking_blocks", "thinking")
"""Fields of messages with reasoning."""

_NO_EFFORT = ("none", "off", "disabled")
_SCALE = (*_NO_EFFORT, "minimal", "low", "medium", "default", "high", "xhigh", "max")
"""Efforts, from the least to the most. ``default`` is about as much as ``medium``."""

_LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens", "max_output_tokens": ""}
"""Names of the limit on a model's output, and the other name in the same API."""

_KEPT = frozenset(
    {
        *("model", "tools", "functions", "function_call", "instructions", "system", "prompt", "stream", "format"),
        *("response_format", "output_format", "modalities", "audio", "n", "logprobs", "top_logprobs", "prediction"),
        *("web_search_options", "previous_response_id", "conversation", "background", "messages", "input"),
        *(name for name, reach in FIELDS.items() if reach is Reach.EVERYWHERE),
    }
)
"""Fields on which the answer depends, or that say where data may go."""

_MEDIA_PARTS = {
    **dict.fromkeys(("image_url", "input_image", "image"), "image"),
    **dict.fromkeys(("input_audio", "audio"), "audio"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
    **dict.fromkeys(("video_url", "input_video", "video"), "video"),
}
LABEL = "[{kind} omitted: this model takes text only]"


# ---- Edits


def apply(body: dict[str, Any], edits: Iterable[Edit]) -> tuple[str, ...]:
    """Change a decoded request of chat completions or the Responses API. Return the names of the edits with an effect.

    An edit twice has the same effect as once.
    """
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
    if _is_number(value):
        holder[name] = choose(value, bound)
    return bool(holder[name] != value)


def _nearest(holder: dict[str, Any], name: str, allowed: Sequence[str]) -> bool:
    value = holder[name]
    if value in allowed or value not in _SCALE:
        return False
    place, some = _SCALE.index(value), value not in _NO_EFFORT
    holder[name] = min(allowed, key=lambda one: ((one not in _NO_EFFORT) != some, abs(_SCALE.index(one) - place)))
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
    return [{name: value for name, value in one.items() if name not in _REASONING} for one in items]


def _with_reasoning(messages: Messages) -> Messages:
    """Add a blank reasoning to each call that has none. Servers take an empty one for a missing one."""
    bare = [one for one in messages if one.get("tool_calls") and not one.get("reasoning_content")]
    return [{**one, "reasoning_content": " "} if one in bare else one for one in messages]


def _labelled_media(messages: Messages) -> Messages:
    """Put labels in the place of images, audio, and files."""
    return [
        {name: _labelled(value) if name in ("content", "output") else value for name, value in one.items()}
        for one in messages
    ]


def _labelled(content: Any) -> Any:
    if not isinstance(content, list) or not any(_media_kind(part) for part in content):
        return content
    parts: list[Any] = [
        {"type": "text", "text": LABEL.format(kind=kind)} if (kind := _media_kind(one)) else one for one in content
    ]
    texts = [part.get("text") for part in parts]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else parts


def _media_kind(part: Any) -> str | None:
    return _MEDIA_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None


_MESSAGES: Mapping[str, Callable[[Messages], Messages]] = {
    ALTERNATING.kind: _alternating,
    WITHOUT_SYSTEM.kind: _without_system,
    WITHOUT_EMPTY.kind: _without_empty,
    WITHOUT_REASONING.kind: _without_reasoning,
    WITH_REASONING.kind: _with_reasoning,
    LABELLED_MEDIA.kind: _labelled_media,
}

_OF_ITEMS = (WITHOUT_REASONING, LABELLED_MEDIA)
"""Edits of messages that also fit the items of the Responses API."""

# ---- Public habits

_SHORT_IDS = tuple(Edit("shortened", name, LONGEST_USER) for name in ("user", "safety_identifier", "prompt_cache_key"))

_KNOWN: Sequence[tuple[re.Pattern[str], tuple[Edit, ...]]] = (
    (re.compile(r""), (*_SHORT_IDS, Edit("raised", "max_output_tokens", LEAST_OUTPUT))),
    (
        re.compile(r"(?:^|/)(?:open-)?(?:mistral|codestral|devstral|ministral|magistral|pixtral|mixtral)"),
        (ALTERNATING,),
    ),
)
"""Edits that are public and cost nothing, by the family of the model."""


def known(family: str) -> tuple[Edit, ...]:
    """Return the edits that a family of models is known to need. See ``Profile.family``."""
    return tuple(edit for pattern, edits in _KNOWN if pattern.search(family.lower()) for edit in edits)


# ---- Refusals


class Refused(NamedTuple):
    """An upstream's own refusal, and the body that it refused."""

    status: int
    said: bytes
    sent: bytes


ROLES = re.compile(r"alternat|\broles?\b|after role|last role", re.I)
"""A refusal because of the sequence of roles, unless it's about calls without results."""

ROWS: Sequence[tuple[re.Pattern[str], Edit]] = [
    (re.compile(words, re.I), edit)
    for words, edit in (
        (
            r"(?:only|must|requires?|set)\b.{0,30}\bstream|\bstream\w{0,10}\b.{0,20}\b(?:must|required|true)",
            STREAMS,
        ),
        (
            r"(?:non-?empty|must not be empty|(?:can(?:not|'t)|may not) be empty|empty (?:content|text|message|string)"
            r"|non-?whitespace|(?:content|text) (?:field )?is (?:empty|blank)|has no content|content or tool_calls)",
            WITHOUT_EMPTY,
        ),
        (
            r"(?:image|vision|multi-?modal|audio|video|\bfile|media|document)\w{0,12}[^.]{0,60}"
            r"(?:not (?:supported|available|allowed|enabled|valid)|unsupported|only supported|isn't supported)"
            r"|(?:not|n't) (?:support|accept|process|have|a)\b[^.]{0,60}(?:image|vision|multi-?modal|audio|video|file)"
            r"|no endpoints found[^.]{0,40}(?:image|vision|file)"
            r"|(?:unknown|unsupported) (?:variant|content)[^.]{0,20}(?:image|input_|file|audio)"
            r"|(?:text|string)[- ]only|invalid type: sequence, expected a string|content must be a string",
            LABELLED_MEDIA,
        ),
        (
            r"\bsystem\b[^.]{0,40}(?:not|n't|un)[ _]?(?:be )?(?:support|allow|accept|permit)"
            r"|only\b[^.]{0,30}\buser\b[^.]{0,30}\bassistant\b[^.]{0,30}(?:roles?|support)"
            r"|(?:not|n't) (?:support|accept|allow)[^.]{0,30}\b(?:system|developer)\b",
            WITHOUT_SYSTEM,
        ),
        (ROLES.pattern, ALTERNATING),
    )
]
"""Refusals whose words name no field, and the edit that helps. The first row that matches holds."""

_TOO_MANY = re.compile(r"too many|at most \d|more than \d|maximum (?:number )?of|exceed|limit|too (?:large|big)", re.I)
"""A number or a size of media is at fault, and not their type."""

_MISSING = re.compile(
    r"missing|\brequired\b|must be (?:passed|provided|included|present|sent|echoed)|passed back", re.I
)
_NAMES_REASONING = re.compile(
    rf"(?<![-\w/.])(?:{'|'.join(_REASONING)}|thinking mode)(?! is enabled)(?![-\w]|\.\w)", re.I
)
_EFFORT = re.compile(r"budget_?tokens|thinking[. _]budget|(?:support|allow) (?:thinking|reasoning)\b|think value", re.I)
"""A refusal of thinking, or of the budget that a server made of an effort."""
_UNDONE = re.compile(
    r"unsupported|not? (?:longer )?(?:be )?(?:support|permit|allow|recogni|accept|valid|available|defin|expect|enabl)"
    r"|n't (?:support|accept|allow|have)|unknown|unrecogni|unexpected|invalid|extra|forbidden|cannot|can't|disallowed"
    r"|too (?:long|many|large|small|high|low)|must|should|only|exceed|at most|at least|above|below|minimum|maximum",
    re.I,
)
"""A refusal in words. A text without any of these isn't one."""

_NAME = re.compile(
    r"(?<!role )(?<![\"']:)(?<![\"']: )[`'\"“‘\[(<](?:\$\.|#/)?([A-Za-z][\w.\[\]-]{0,63}?)[`'\"”’\])>:]"
    r"|\b([a-z]+(?:[_.][a-z]+)+)\b"
    r"|(?:argument supplied|parameter|field|argument|property|key|option|keyword|input|name|value for)s?"
    r"\s?[:=]?\s+([a-z][\w.]+)\b"
    r"|\b([a-z]\w{2,40})(?=:? (?:is|are|does|was|must|should|has|range|value)\b|: )"
)
"""The names in a refusal: in quotes unless they're roles or values of JSON, with underscores, and bare words."""

_NUMBER = r"(?<![\w.-])(-?\d+(?:\.\d+)?)"
_MOST = re.compile(
    r"(?:at most|\bmax(?:imum)?\b|no (?:more|longer|greater) than|up to|<=?|\d >=?|less than(?: or equal to)?"
    rf"|not exceed|limit(?:ed)?|longer than|more than|exceeds?|above)[^\d\n]{{0,40}}?{_NUMBER}",
    re.I,
)
_LEAST = re.compile(
    r"(?:at least|\bmin(?:imum)?\b|no (?:less|fewer) than|(?<!\d )>=?|greater than(?: or equal to)?|below)"
    rf"[^\d\n]{{0,40}}?{_NUMBER}",
    re.I,
)
_RANGE = re.compile(rf"(?:range|between|within|in)\D{{0,40}}?{_NUMBER}\s?(?:,|and|to|-|\.\.+)\s?{_NUMBER}", re.I)
_ALLOWED = re.compile(
    r"(?:supported|valid|allowed|accepted|permitted|available|one of|should be|must be|expected|choose)\b", re.I
)


_SAID = ("message", "msg", "description")
_PLACE = ("param", "loc", "field")
_JSON = json.JSONDecoder()
_BEFORE = 24
"""Characters before a name that tell an echo."""


class _Fault(NamedTuple):
    """One complaint: the place in the request, the words, and whether the upstream stated the place in a field."""

    path: str
    said: str
    stated: bool = True


def read(refusal: bytes, sent: Mapping[str, Any], raw: bytes = b"") -> tuple[Edit, ...]:
    """Return the edits that a refusal asks for. None if it blames what no edit may touch, or nothing that was sent.

    ``raw`` is the bytes of ``sent``. A name is an echo if the request has it with the same words before it.
    """
    stated, words = _complaints(refusal)
    if (edit := _about_reasoning(words, sent, raw)) is not None:
        return (edit,)
    edits: list[Edit] = []
    for fault in (*stated, *islice(_named(words, raw), MOST_NAMES)):
        if edits and not fault.stated:
            break
        found = _resolved(sent, fault.path)
        if found is None:
            continue
        if _protected(*found, sent):
            break
        edit = _edit(*found, fault.said)
        if edit is not None and edit not in edits:
            edits.append(edit)
    if edits:
        return tuple(edits)
    return next(((row,) for row in _by_words(words, raw) if _changes(sent, row)), ())


def _changes(sent: Mapping[str, Any], edit: Edit) -> bool:
    """Return whether an edit has an effect on a request, which stays as it is."""
    return bool(apply(msgspec.json.decode(encode(sent)), (edit,)))


def _about_reasoning(text: str, sent: Mapping[str, Any], raw: bytes) -> Edit | None:
    """Return the edit for reasoning in the history that is refused or missing, or for a budget of thinking."""
    effort = next((name for name in ("thinking", "reasoning_effort", "reasoning") if sent.get(name) is not None), None)
    if effort is not None and any(_own(_EFFORT, text, raw)):
        return Edit("without", effort)
    if next(_own(_NAMES_REASONING, text, raw), None) is None:
        return None
    if _MISSING.search(text):
        return WITH_REASONING if _changes(sent, WITH_REASONING) else None
    if _UNDONE.search(text) and _changes(sent, WITHOUT_REASONING):
        named = {name for name in _REASONING if re.search(rf"(?<![-\w.]){name}(?![-\w])", text)}
        return WITHOUT_REASONING if not named & sent.keys() else None
    return None


def _by_words(text: str, raw: bytes) -> tuple[Edit, ...]:
    """Return the edits that may help if a refusal names no field, in the order to try them."""
    row = next((edit for pattern, edit in ROWS if any(_own(pattern, text, raw))), None)
    if row is None or (row == LABELLED_MEDIA and _TOO_MANY.search(text)):
        return ()
    if row == ALTERNATING:
        return () if "tool_call" in text.lower() else (ALTERNATING, WITHOUT_SYSTEM)
    return (row,)


def _complaints(refusal: bytes) -> tuple[list[_Fault], str]:
    """Return the complaints that state the place (``param``, ``loc``, or ``field``), and all words of a refusal.

    JSON inside of a text is read, too, because gateways put the original error there. ``input`` is an echo, and so is
    an object with a role.
    """
    try:
        waiting: list[Any] = [msgspec.json.decode(refusal)]
    except (ValueError, RecursionError):
        waiting = [refusal[:REFUSAL_BYTES].decode("utf-8", "replace")]
    stated, words, said = list[_Fault](), list[str](), ""
    for _ in range(MOST_VALUES):
        value = waiting.pop(0) if waiting else None
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                inner, end = _JSON.raw_decode(value, start := value.index("{"))
                waiting += [inner, value[end:]]
                value = value[:start]
            words.append(value)
        elif isinstance(value, list):
            waiting = [*value[:MOST_NAMES], *waiting]
        elif isinstance(value, dict) and "role" not in value:
            said = next((value[name] for name in _SAID if isinstance(value.get(name), str)), said)
            place = next((value[name] for name in _PLACE if value.get(name)), None)
            if place and value.get("type") != "missing":
                stated.append(_Fault(".".join(map(str, place)) if isinstance(place, list) else str(place), said))
            waiting += [inner for name, inner in value.items() if name != "input"]
    text = "\n".join(words)[:REFUSAL_BYTES].replace('\\"', '"')
    return stated[:MOST_NAMES], text.replace("\\n", "\n")


def _named(text: str, raw: bytes) -> Iterator[_Fault]:
    """Yield the names in the words of a refusal."""
    for match in _own(_NAME, text, raw) if _UNDONE.search(text) else ():
        yield _Fault(match[match.lastindex or 0], text, stated=False)


def _own(pattern: re.Pattern[str], text: str, raw: bytes) -> Iterator[re.Match[str]]:
    """Yield the matches in a refusal that aren't an echo: the request has other words before them."""
    for match in islice(pattern.finditer(text), 4 * MOST_NAMES):
        start, end = match.span(match.lastindex or 0)
        words = text[max(0, start - _BEFORE) : end]
        encoded = msgspec.json.encode(words)[1:-1]
        if start < _BEFORE or (encoded not in raw and re.sub(r"\s", "", words).encode() not in raw):
            yield match


def _resolved(sent: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    """Return the place in a request that a path names, and its value. Labels of types in a path are skipped.

    ``None`` if the request doesn't have it. A path into a list that doesn't end at a field stays at the list.
    """
    names = re.findall(r"[^.\[\]/]+", path.removeprefix("#"))
    for other in ("_".join(names), *(_LIMITS if path in _LIMITS else ())):  # `reasoning.effort`, or another API's limit
        if path not in sent and sent.get(other) is not None:
            return other, sent[other]
    value: Any = sent
    taken: list[str] = []
    for place, name in enumerate(names):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value, step = value[int(name)], "*"
        elif isinstance(value, dict) and value.get(name) is not None:
            value, step = value[name], name
        elif place and place == len(names) - 1:
            return (".".join(taken), value) if taken and taken[0] in ("messages", "input", "tools") else None
        else:
            continue
        taken.append(step)
    if taken:
        return ".".join(taken), value
    for parent, inner in sent.items():  # such as `effort` for `reasoning.effort`; `type` is the word of many sentences
        if len(names) == 1 and names != ["type"] and isinstance(inner, dict) and inner.get(names[0]) is not None:
            return f"{parent}.{names[0]}", inner[names[0]]
    return None


def _protected(path: str, value: Any, sent: Mapping[str, Any]) -> bool:
    """Return whether the answer depends on a part: messages, tools, a choice that forces, a form of the answer."""
    head, *rest = path.split(".")
    if head in ("tool_choice", "function_call"):
        return bool(value != "auto")
    if head == "text":
        return "format" in rest or (not rest and "format" in sent["text"])
    return head in _KEPT or any(name in ("format", "schema") for name in rest)


def _edit(path: str, value: Any, said: str) -> Edit | None:
    """Return the edit for a field at fault, or ``None`` if its value doesn't break what the refusal says."""
    if isinstance(value, str | list):
        most = _first(_MOST, said)
        if most is not None and re.search(r"long|length|many|at most|items|character|size|max", said, re.I):
            return Edit("shortened", path, most) if len(value) > most > 0 else None
    if isinstance(value, str) and value in _SCALE:
        cue = _ALLOWED.search(said)
        words = re.findall(r"(?<![\w-])[a-z]+(?![\w-])", said[cue.start() :].lower()) if cue else []
        allowed = tuple(sorted({word for word in words if word in _SCALE} - {value}, key=_SCALE.index))
        return Edit("nearest", path, allowed) if allowed else Edit("without", path)
    if _is_number(value):
        least, most = _range(said)
        if most is not None and value > most >= (least or 0):
            return Edit("lowered", path, most)
        if least is not None and value < least:
            return Edit("raised", path, least)
        if least is not None or most is not None:
            return None
    if path not in _LIMITS:
        return Edit("without", path)
    return Edit("renamed", path, _LIMITS[path]) if _LIMITS[path] else None


def _range(said: str) -> tuple[float | None, float | None]:
    """Return the least and the most number that a refusal allows."""
    span = _RANGE.search(said)
    return (_number(span[1]), _number(span[2])) if span else (_first(_LEAST, said), _first(_MOST, said))


def _first(pattern: re.Pattern[str], said: str) -> float | None:
    found = pattern.search(said)
    return _number(found[1]) if found else None


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- Memory


class Memory:
    """The edits that upstreams were found to need, by place. They're remembered for a day."""

    def __init__(self) -> None:
        self._helped: TTLCache[Place, tuple[Edit, ...]] = TTLCache(MODELS, DAY)
        self._useless: TTLCache[tuple[str, str, str, Edit], bool] = TTLCache(MODELS, USELESS_SECONDS)

    def edits(self, place: Place) -> tuple[Edit, ...]:
        """Return the edits to make, in the order in which they were learned."""
        return self._helped.get(place, ())

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
