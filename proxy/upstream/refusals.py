"""Read an upstream's refusal of a request that left in the proxy's own words: which edits take the words back?

    >>> refusal = b'{"error": {"message": "Unsupported parameter", "param": "temperature"}}'
    >>> read(refusal, {"model": "m", "temperature": 0.5})
    (Edit(kind='without', path='temperature', value=None),)

No edit touches what the answer depends on, see ``_protected``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from proxy.dialects.conditions import FIELDS, Reach
from proxy.dialects.units import encode
from proxy.upstream.traits import (
    ALTERNATING,
    LABELLED_MEDIA,
    REASONING,
    SCALE,
    SHORT_IDS,
    SIGNED_CALLS,
    STREAMS,
    WITH_REASONING,
    WITHOUT_EMPTY,
    WITHOUT_REASONING,
    WITHOUT_SYSTEM,
    Edit,
    apply,
    is_number,
)

REFUSAL_BYTES = 4_096  # Bytes of a refusal that are read. Names behind them are in an echo of the request.

MOST_NAMES = 16

MOST_VALUES = 100  # values of a refusal in JSON that are read

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

ROLES = re.compile(r"alternat|\broles?\b|after role|last role", re.I)
"""A refusal because of the sequence of roles, unless it's about calls without results."""

ROWS: Sequence[tuple[re.Pattern[str], Edit]] = [
    (re.compile(words, re.I), edit)
    for words, edit in (
        (r"(?:is missing|without) an? `?thought_?signature", SIGNED_CALLS),
        (
            r"call id\b[\s\S]{0,200}\blength of 9\b|(?:calls\W{0,2}\d+\W{0,2}|call_)id\b[^.]{0,20}\btoo long",
            SHORT_IDS,
        ),
        (r"(?:only|must|requires?|set)\b.{0,30}\bstream|\bstream\w{0,10}\b.{0,20}\b(?:must|required|true)", STREAMS),
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
    rf"(?:(?<![-\w/.])|(?<=[\d\]]\.))(?:{'|'.join(REASONING)}|thinking mode)(?! is enabled)(?![-\w]|\.\w)", re.I
)
_EFFORT = re.compile(r"budget_?tokens|thinking[. _]budget|(?:support|allow) (?:thinking|reasoning)\b|think value", re.I)
"""A refusal of thinking, or of the budget that a server made of an effort."""
_UNDONE = re.compile(
    r"unsupported|not? (?:longer )?(?:be )?(?:support|permit|allow|recogni|accept|valid|available|defin|expect|enabl)"
    r"|n't (?:support|accept|allow|have)|unknown|unrecogni|unexpected|invalid|extra|forbidden|cannot|can't|disallowed"
    r"|too (?:long|many|large|small|high|low)|must|should|only|exceed|at most|at least|above|below|minimum|maximum"
    r"|fail|不|无效|非法|超出|错误|未知|最大|最小",
    re.I,
)
"""A refusal in words. A text without any of these isn't one."""

_VERB = r"(?:is|are|does|was|must|should|has)\b"
_NAME = re.compile(
    r"(?<!role )(?<![\"']:)(?<![\"']: )[`'\"“‘\[(<](?:\$\.|#/)?([A-Za-z][\w.\[\]-]{0,63}?)[`'\"”’\])>:]"
    r"|\b([a-z]+(?:[_.][a-z]+)+)\b"
    r"|(?:argument supplied|parameter|field|argument|property|key|option|keyword|input|name|value for|参数|字段)s?"
    rf"\s?[:=：]?[ \t]+(?!{_VERB})([A-Za-z][\w.]+)\b"
    r"|(?<=: )([A-Za-z]\w*)$"
    rf"|\b(?![Mm]odel\b)([A-Za-z]\w{{0,40}})(?=:? (?:{_VERB}|(?:range|value)\b)|: | ?[参字不的超无非])",
    re.ASCII | re.MULTILINE,
)
"""The names in a refusal: in quotes unless they're roles or values of JSON, with underscores, and bare words."""
_CAMEL = re.compile(r"(?<=[a-z\d])(?=[A-Z])")  # xAI writes `presencePenalty`
_BARE = 5  # the group of a bare word, the last one of a field's name in words
_WORDS = 4  # in the longest name of a field

_NUMBER = r"(?<![\w.-])(-?\d+(?:\.\d+)?)"
_MOST = re.compile(
    r"(?:at most|\bmax(?:imum)?\b|no (?:more|longer|greater) than|up to|<=?|\d >=?|less than(?: or equal to)?"
    r"|not exceed|limit(?:ed)?|longer than|more than|exceeds?|above|不能?(?:大于|超过)|最[大多]|上限)"
    rf"[^\d\n]{{0,40}}?{_NUMBER}",
    re.I | re.ASCII,
)
_LEAST = re.compile(
    r"(?:at least|\bmin(?:imum)?\b|no (?:less|fewer) than|(?<!\d )>=?|greater than(?: or equal to)?|below"
    rf"|不能?[小低]于|最[小少]|下限)[^\d\n]{{0,40}}?{_NUMBER}",
    re.I | re.ASCII,
)
_RANGE = re.compile(
    rf"(?:range|between|within|in|范围|应在)\D{{0,40}}?{_NUMBER}\s?(?:,|and|to|-|\.\.+)\s?{_NUMBER}", re.I | re.ASCII
)
_ALLOWED = re.compile(
    r"(?:supported|valid|allowed|accepted|permitted|available|one of|should be|must be|expected|choose)\b", re.I
)


_SAID = ("message", "msg", "description")
_PLACE = ("param", "loc", "field")
_JSON = json.JSONDecoder()
_BEFORE = 24  # characters before a name that tell an echo


_Fault = tuple[str, str]  # one complaint: the place in the request, and the words


def read(refusal: bytes, sent: Mapping[str, Any], raw: bytes = b"") -> tuple[Edit, ...]:
    """Return the edits that a refusal asks for. None if it blames what no edit may touch, or nothing that was sent.

    ``raw`` is the bytes of ``sent``. A name is an echo if the request has it with the same words before it.
    """
    stated, words = _complaints(refusal)
    if (edit := _about_reasoning(words, sent, raw)) is not None:
        return (edit,)
    edits: list[Edit] = []
    for number, (path, said) in enumerate((*stated, *islice(_named(words, raw), MOST_NAMES))):
        if edits and number >= len(stated):
            break
        found = _resolved(sent, path) or _resolved(sent, _CAMEL.sub("_", path).lower())
        if found is None:
            continue
        if _protected(*found, sent):
            break
        edit = _edit(*found, said)
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
    if "tool_choice" in text and sent.get("tool_choice") not in (
        None,
        "auto",
        "none",
    ):  # thinking excludes forced calls
        return None if effort is None else Edit("without", effort)
    if _MISSING.search(text):
        return WITH_REASONING if _changes(sent, WITH_REASONING) else None
    if _UNDONE.search(text) and _changes(sent, WITHOUT_REASONING):
        named = {name for name in REASONING if re.search(rf"(?<![-\w.]){name}(?![-\w])", text)}
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
                stated.append((".".join(map(str, place)) if isinstance(place, list) else str(place), said))
            waiting += [inner for name, inner in value.items() if name != "input"]
    text = "\n".join(words)[:REFUSAL_BYTES].replace('\\"', '"')
    return stated[:MOST_NAMES], text.replace("\\n", "\n")


def _named(text: str, raw: bytes) -> Iterator[_Fault]:
    for match in _own(_NAME, text, raw) if _UNDONE.search(text) else ():
        yield match[match.lastindex or 0], text
        if match.lastindex == _BARE:  # "Service tier is not available"
            words = text[max(0, match.start() - _BEFORE) : match.end()].lower().split(" ")[-_WORDS:]
            yield from (("_".join(words[start:]), text) for start in range(len(words)))


def _own(pattern: re.Pattern[str], text: str, raw: bytes) -> Iterator[re.Match[str]]:
    """Yield the matches in a refusal that aren't an echo: the request has other words before them."""
    for match in islice(pattern.finditer(text), 4 * MOST_NAMES):
        start, end = match.span(match.lastindex or 0)
        words = text[max(0, start - _BEFORE) : end]
        encoded = msgspec.json.encode(words)[1:-1]
        if start < _BEFORE or (encoded not in raw and re.sub(r"\s", "", words).encode() not in raw):
            yield match


def _resolved(sent: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    """Return the place in a request that a path names, and its value; ``None`` if it has none."""
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
        name = names[0].removeprefix(f"{parent}_") if len(names) == 1 and names != ["type"] else ""
        if isinstance(inner, dict) and inner.get(name) is not None:
            return f"{parent}.{name}", inner[name]
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
    if isinstance(value, str) and value in SCALE:
        cue = _ALLOWED.search(said)
        words = re.findall(r"(?<![\w-])[a-z]+(?![\w-])", said[cue.start() :].lower()) if cue else []
        allowed = tuple(sorted({word for word in words if word in SCALE} - {value}, key=SCALE.index))
        return Edit("nearest", path, allowed) if allowed else Edit("without", path)
    if is_number(value):
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
    span = _RANGE.search(said)
    return (_number(span[1]), _number(span[2])) if span else (_first(_LEAST, said), _first(_MOST, said))


def _first(pattern: re.Pattern[str], said: str) -> float | None:
    found = pattern.search(said)
    return _number(found[1]) if found else None


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number
