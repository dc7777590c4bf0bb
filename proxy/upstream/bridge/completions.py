"""Read chat completions and chat streams in all forms that servers send, and put their calls in order.

Servers stream parallel calls in turns, without an index, or with equal ids. A block of ``/v1/messages`` is streamed
whole before the next one, and each call has an id of its own. So a stream's calls are put in order before they are
translated.
"""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from proxy.errors import UpstreamInterrupted
from proxy.upstream.bridge.returned import OPAQUE, Writer, merge
from proxy.upstream.bridge.transport import ErrorInStream

UNREADABLE = "The upstream's answer isn't a chat completion. Ask the operator to check the setting 'speaks'."

FAILED = "The model's server ended the answer with the reason '{}'. Send the request again."
CONTINUED = "The model's server sent arguments after the end of their call. Send the request again."
NAMELESS = "The model's server sent a call without a name. Send the request again."

Delta = dict[str, Any]
Event = dict[str, Any]

_FRAME = ("id", "created", "model", "service_tier")
_TEXTS = ("text", "thinking", "reasoning", "summary", "refusal", "transcript", "content")
"""Fields with the text of a part. It may be in parts inside, as Mistral's thinking."""
_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")
"""Fields with reasoning. If a server fills two of them, they have the same text."""
_FIGURES: Mapping[str, Sequence[str]] = {
    "sent": ("prompt_tokens", "input_tokens"),
    "written": ("completion_tokens", "output_tokens"),
    "cached": ("cached_tokens", "cache_read_input_tokens", "prompt_cache_hit_tokens"),
    "put": ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens"),
    "reasoned": ("reasoning_tokens",),
}
_ENDS = (
    ("error", re.compile(r"error|fail|abort|cancel|malformed|insufficient|interrupt|time_?out")),
    ("length", re.compile(r"length|max_|limit|context|truncat|incomplete")),
    (
        "content_filter",
        re.compile(r"filter|safety|refus|sensitive|recitation|prohibit|blocked|blocklist|spii|guardrail|moderat"),
    ),
)
"""Ends of an answer by the words in their reasons. All others are the model's own."""

_CALL_FIELDS = frozenset({"index", "id", "type", "function", "name", "arguments"})
_DATA_ID = 100  # an id of more characters carries data, such as LiteLLM's ids with thought signatures

_THOUGHTS = frozenset({"reasoning_content", "thinking_blocks"})
_ANY: Any = object()


class AnswerBuilder(ABC):
    """Builds an answer in another API. ``answer`` is whole after ``finish``."""

    answer: dict[str, Any]

    @abstractmethod
    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk in the form of ``Completion``."""

    @abstractmethod
    def finish(self) -> Iterator[Event]:
        """Yield the events at the end of the answer."""


class Completion:
    """A chat completion, whole or in chunks, on its way to a builder.

    The builder's chunks have one choice at most. Its delta has only ``content``, ``refusal``, and ``reasoning_content``
    as texts, ``thinking_blocks``, URLs in ``images``, and ``tool_calls`` with one part of one call. Each call is whole
    before the next call or text. Its first part has its index, id, and name, the others its index and arguments. The
    last chunk's finish reason is ``stop``, ``length``, ``tool_calls``, or ``content_filter``. If a server such as vLLM
    names the text that it stopped at, it's the ``stop_sequence``.
    """

    def __init__(self, builder: AnswerBuilder, writer: Writer) -> None:
        self.reason: str | None = None
        self._stop: Any = None
        self._builder = builder
        self._order = _Order(writer)
        self._index: Any = _ANY
        self._written: defaultdict[str, list[Any]] = defaultdict(list)

    def feed(self, value: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a completion or a chunk. Raises ``ErrorInStream``."""
        choices = _objects(value.get("choices"))
        choice, delta = self._chosen(choices)
        _raise_error(value, choice)
        frame = {name: value[name] for name in _FRAME if value.get(name) is not None}
        if isinstance(usage := value.get("usage") or choice.get("usage"), Mapping):
            frame["usage"] = usage
        yield from self._builder.feed(frame)
        for one in self._order.feed(delta):
            yield from self._builder.feed(_chunk(one))
        stated = choice.get("finish_reason") or (value.get("object") == "chat.completion" and "stop")
        reason, native = _reason(stated), choice.get("native_finish_reason")
        if reason == "stop" and _reason(native) == "error" and not any(self._written.values()):
            reason, stated = "error", native  # OpenRouter states the failure of a provider only there
        if reason == "error":
            raise ErrorInStream({"message": FAILED.format(stated), "type": "server_error"})
        self.reason = (reason or self.reason) if self.reason in (None, "stop") else self.reason
        self._stop = choice.get("stop_reason") or self._stop

    def finish(self) -> Iterator[Event]:
        """Yield the events at the end of the answer. Raises ``UpstreamInterrupted``."""
        reason = self.reason or "stop"
        if reason == "stop" and self._order.is_cut:  # a client that gets "tool_calls" would run half a call
            reason = "length"
        for one in self._order.finish():
            yield from self._builder.feed(_chunk(one))
        end = _chunk({}, "tool_calls" if reason == "stop" and self._order.has_calls else reason)
        end["choices"][0]["stop_sequence"] = self._stop if isinstance(self._stop, str) else None
        yield from self._builder.feed(end)
        yield from self._builder.finish()

    def _chosen(self, choices: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Delta]:
        """Return the first choice with content and its delta. From then on, return the ones with its index.

        Copilot puts each call into a choice of its own. So choices with nothing but calls belong to the answer, too.
        """
        every = sorted(((one, self._delta(one)) for one in choices), key=lambda pair: _is_call(pair[1]))
        read = [pair for pair in every if self._index in (_ANY, pair[0].get("index")) or _is_call(pair[1])]
        chosen, delta = next((one for one in read if one[1]), read[0] if read else ({}, {}))
        calls = [other.get("tool_calls", ()) for _, other in read if other is delta or _is_call(other)]
        delta |= {"tool_calls": made} if (made := [*itertools.chain(*calls)]) else {}
        if delta and self._index is _ANY:
            self._index = chosen.get("index")
        for name, value in delta.items():
            self._written[name] += [value] if isinstance(value, str) else value
        return chosen, delta

    def _delta(self, choice: Mapping[str, Any]) -> Delta:
        if isinstance(delta := choice.get("delta"), Mapping) and delta:
            return _read(delta)
        message = choice.get("message")
        read = _read(message if isinstance(message, Mapping) else {"content": choice.get("text")}, whole=True)
        return {name: new for name, value in read.items() if (new := self._unwritten(name, value))}

    def _unwritten(self, name: str, value: Any) -> Any:
        """Return the new part of a message's field. A message at the end of a stream repeats what came before."""
        before = self._written[name]
        if not isinstance(value, str):
            return [] if before else value
        written = "".join(before)
        return value.removeprefix(written) if value.startswith(written) else ""


def _is_call(delta: Delta) -> bool:
    return delta.keys() <= {"tool_calls"}


def _chunk(delta: Delta, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in _listed(value) if isinstance(one, Mapping)]


def _raise_error(value: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    """Raise ``ErrorInStream`` if an object has an error, or is one."""
    error = value.get("error") or choice.get("error")
    if not error and not value.get("choices"):
        error = value if value.get("message") else value.get("detail")
    if error:
        raise ErrorInStream(error if isinstance(error, Mapping) else {"message": str(error)})


def _reason(stated: Any) -> str | None:
    """Return a finish reason, or ``error``. SGLang's own API has an object, and some servers ``""`` or ``"null"``."""
    stated = str((stated.get("type") if isinstance(stated, Mapping) else stated) or "").lower()
    if stated in ("", "null", "none"):
        return None
    return next((name for name, words in _ENDS if words.search(stated)), "stop")


def _read(message: Mapping[str, Any], *, whole: bool = False) -> Delta:
    """Return the delta for a message or delta in any form, without empty fields."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for part in _listed(message.get("content") or _text(message.get("audio"))):
        kind, text = _part(part)
        found[kind].append(text)
    found["refusal"].append(_text(message.get("refusal")))
    if reasoning := next(filter(None, map(_text, map(message.get, _REASONING))), ""):
        found["reasoning_content"] = [reasoning]
    delta: Delta = {name: "".join(found[name]) for name in ("reasoning_content", "content", "refusal")}
    delta["thinking_blocks"] = _objects(message.get("thinking_blocks"))
    delta["opaque"] = {name: message[name] for name in OPAQUE if message.get(name)}
    delta["images"] = [*found["images"], *filter(None, map(_url, _listed(message.get("images"))))]
    calls = _objects(message.get("tool_calls"))
    calls = calls or [{"index": 0, "function": one} for one in _objects(message.get("function_call"))]
    delta["tool_calls"] = [_call(one, number if whole else None) for number, one in enumerate(calls)]
    return {name: value for name, value in delta.items() if value}


def _part(part: Any) -> tuple[str, str]:
    """Return the field of the delta for a part of a content, and its text or URL. A part without a text is JSON."""
    if not isinstance(part, Mapping):
        return "content", str(part)
    kind = str(part.get("type"))
    if "image" in kind and (url := _url(part)):
        return "images", url
    text = _text(part)
    if "think" in kind or "reason" in kind:
        return "reasoning_content", text
    if "refusal" in part:
        return "refusal", text
    return "content", text if any(name in part for name in _TEXTS) else msgspec.json.encode(part).decode()


def _text(value: Any) -> str:
    """Return the text of a field or part, with the texts of the parts inside."""
    if isinstance(value, Mapping):
        return _text(next((value[name] for name in _TEXTS if value.get(name)), None))
    return value if isinstance(value, str) else "".join(map(_text, value)) if isinstance(value, list) else ""


def _url(image: Any) -> str | None:
    if isinstance(image, Mapping):
        data = image.get("b64_json")
        return f"data:image/png;base64,{data}" if data else _url(image.get("image_url") or image.get("url"))
    return image if isinstance(image, str) else None


def _call(part: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    """Return a part of a call. ``number`` replaces a missing index."""
    function = part.get("function")
    function = function if isinstance(function, Mapping) else part
    index, id, arguments = part.get("index"), part.get("id"), function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else msgspec.json.encode(arguments).decode()
    return {
        "index": index if isinstance(index, int) else number,
        "id": "" if id is None else str(id),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
        "opaque": {name: value for name, value in part.items() if name not in _CALL_FIELDS and value},
    }


def _listed(value: Any) -> list[Any]:
    return [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def figures(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the prompt, of the answer, read from a cache, written to one, and of the reasoning."""
    fields = dict(usage)
    for details in ("prompt_tokens_details", "input_tokens_details", "completion_tokens_details"):
        fields |= inner if isinstance(inner := usage.get(details), Mapping) else {}
    stated = {kind: map(fields.get, names) for kind, names in _FIGURES.items()}
    return {
        kind: next((int(one) for one in found if isinstance(one, int | float) and one > 0), 0)
        for kind, found in stated.items()
    }


def is_cut(arguments: str) -> bool:
    """Return whether arguments are the start of a JSON object."""
    try:
        from_json(arguments)
    except ValueError as error:
        return arguments.lstrip().startswith("{") and str(error).startswith("EOF")
    return False


class _StreamedCall:
    """One call. ``number`` is its position in the answer, whatever the upstream's index."""

    def __init__(self, number: int, index: int | None) -> None:
        self.number = number
        self.index = index
        self.id = ""
        self.name = ""
        self.given = ""
        self.opaque: dict[str, Any] = {}
        self.closed = False
        self._texts: list[str] = []
        self._length = 0
        self._sent = 0
        self._complete: bool | None = None

    @property
    def arguments(self) -> str:
        """The arguments up to now."""
        return "".join(self._texts)

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a part. Raises ``UpstreamInterrupted`` if the client has the whole call already."""
        text = part["function"]["arguments"]
        if self.closed and text.strip():
            raise UpstreamInterrupted(CONTINUED)
        self.id = self.id or part["id"]
        self.name = self.name or part["function"]["name"]
        merge(self.opaque, part["opaque"])
        self._texts.append(text)
        self._length += len(text)
        self._complete = None

    def matches(self, part: Mapping[str, Any]) -> bool:
        """Return whether neither index nor id says that a part belongs to another call."""
        index, id = part["index"], part["id"]
        return (index is None or self.index is None or index == self.index) and (not id or self.id in ("", id))

    def repeats(self, part: Mapping[str, Any]) -> bool:
        """Return whether a part is the whole call again, as some servers send it at the end of a stream."""
        if part["id"] != self.id or not self.id or len(part["function"]["arguments"]) != self._length:
            return False
        return part["function"] == {"name": self.name, "arguments": self.arguments} and self.complete()

    def precedes(self, part: Mapping[str, Any]) -> bool:
        """Return whether a part with the same index or id begins another call."""
        name, text = part["function"]["name"], part["function"]["arguments"]
        if not name or not self.name:
            return False
        return name != self.name or (bool(text.strip()) and self.complete())

    def complete(self) -> bool:
        """Return whether the call has a name and the arguments are a JSON object."""
        if self._complete is None:
            self._complete = bool(self.name) and _is_object(self.arguments)
        return self._complete

    def release(self, writer: Writer) -> Iterator[Delta]:
        """Yield what the client doesn't have yet. The server's data comes before the call."""
        if not self.name:
            return
        text = "".join(self._texts[self._sent :])
        self._sent = len(self._texts)
        if not self.given:
            self.given = writer.id(self.id, self.name)
            if len(self.id) > _DATA_ID:
                self.opaque["id"] = self.id
            yield from self.data(writer)
            opening = {"id": self.given, "type": "function", "function": {"name": self.name, "arguments": text}}
            yield {"tool_calls": [{"index": self.number, **opening}]}
        elif text:
            yield {"tool_calls": [{"index": self.number, "function": {"arguments": text}}]}

    def data(self, writer: Writer) -> Iterator[Delta]:
        """Yield the server's data that the client doesn't have yet."""
        opaque, self.opaque = self.opaque, {}
        if opaque:
            yield writer.data(calls={self.given: opaque})


class _Order:
    """The calls and texts of one answer. Those behind an incomplete call wait."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._calls: list[_StreamedCall] = []
        self._opaque: dict[str, Any] = {}
        self._newest: dict[tuple[Any, Any], _StreamedCall] = {}
        self._waiting: deque[_StreamedCall | Delta] = deque()

    @property
    def has_calls(self) -> bool:
        """Whether the client has got a call."""
        return any(call.given for call in self._calls)

    @property
    def is_cut(self) -> bool:
        """Whether a call has no end."""
        return any(isinstance(one, _StreamedCall) and is_cut(one.arguments) for one in self._waiting)

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the deltas that a delta makes ready."""
        merge(self._opaque, delta.get("opaque") or {})
        thoughts = {name: delta[name] for name in delta if name in _THOUGHTS}
        rest = {name: delta[name] for name in delta.keys() - thoughts.keys() - {"tool_calls", "opaque"}}
        data = [self._data()] if self._opaque and (rest or delta.get("tool_calls")) else []
        self._waiting += filter(None, [thoughts, *data, rest])
        for part in delta.get("tool_calls") or ():
            self._add(part)
        yield from self._ready(ended=False)

    def finish(self) -> Iterator[Delta]:
        """Yield all that waits. Raises ``UpstreamInterrupted`` for a call that has arguments and no name.

        A server's data isn't put behind a text, because clients take the last block for the answer.
        """
        yield from self._ready(ended=True)
        for call in self._calls:
            yield from call.data(self._writer)
        if self._opaque and self.has_calls:
            yield self._data()

    def _data(self) -> Delta:
        opaque, self._opaque = self._opaque, {}
        return self._writer.data(message=opaque)

    def _add(self, part: Mapping[str, Any]) -> None:
        call = self._call_of(part)
        if call is not None and call.repeats(part):
            return
        if call is None or call.precedes(part):
            call = _StreamedCall(len(self._calls), part["index"])
            self._calls.append(call)
            self._waiting.append(call)
        call.add(part)
        for key in itertools.product({call.index, _ANY}, {call.id, _ANY}):
            if key not in self._newest or self._newest[key].number < call.number:
                self._newest[key] = call

    def _call_of(self, part: Mapping[str, Any]) -> _StreamedCall | None:
        """Return the newest call that a part may belong to."""
        indexes = (_ANY,) if part["index"] is None else (part["index"], None)
        ids = (part["id"], "") if part["id"] else (_ANY,)
        found = (self._newest.get(key) for key in itertools.product(indexes, ids))
        return max((one for one in found if one and one.matches(part)), key=lambda one: one.number, default=None)

    def _ready(self, *, ended: bool) -> Iterator[Delta]:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, _StreamedCall):
                if ended and first.arguments and not first.name:
                    raise UpstreamInterrupted(NAMELESS)
                yield from first.release(self._writer)
                if not ended and (len(self._waiting) == 1 or not first.complete()):
                    return
                first.closed = True
            else:
                yield first
            self._waiting.popleft()


def _is_object(text: str) -> bool:
    if not text.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class StopFilter:
    """Passes choices on up to the first of their stop sequences. If it's ``single``, only the first call passes."""

    def __init__(self, stops: Sequence[str], *, single: bool) -> None:
        self._stops = stops
        self._single = single
        self._held = ""
        self._matched: str | None = None
        self._called = False

    def passed(self, choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the part of a choice that passes, if any. It has a delta, and a finish reason if it's the last one."""
        choice, ended = dict(choice), choice["finish_reason"] is not None
        if self._stops or self._single:
            choice["delta"] = {} if self._matched is not None else self._bounded(choice["delta"], ended=ended)
        if ended and self._matched is not None and not self._called:
            choice |= {"finish_reason": "stop", "stop_sequence": self._matched}
        if choice["delta"] or ended:
            yield choice

    def _bounded(self, delta: Delta, *, ended: bool) -> Delta:
        """Return the part of a delta that passes. Text that may begin a stop sequence waits for the next delta."""
        calls = [call for call in delta.get("tool_calls", ()) if call["index"] == 0 or not self._single]
        text, self._held = self._held + delta.get("content", ""), ""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, self._matched = min(found)
            text, calls = text[:end], []
        elif not ended and not calls:
            tails = range(max(0, len(text) - max(map(len, self._stops), default=0)), len(text))
            begins = (place for place in tails if any(stop.startswith(text[place:]) for stop in self._stops))
            end = next(begins, len(text))
            text, self._held = text[:end], text[end:]
        self._called = self._called or bool(calls)
        made = {**delta, "content": text, "tool_calls": calls}
        return {name: value for name, value in made.items() if value}


class Bounded(AnswerBuilder):
    """Builds an answer of what passes its bounds. Everything behind a stop sequence but the usage is dropped."""

    def __init__(self, builder: AnswerBuilder, stops: Sequence[str], *, single: bool) -> None:
        self._builder = builder
        self._bounds = StopFilter(stops, single=single)

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        choices = chunk.get("choices")
        chunks = [{**chunk, "choices": [one]} for one in self._bounds.passed(choices[0])] if choices else [chunk]
        for made in chunks:
            yield from self._builder.feed(made)

    def finish(self) -> Iterator[Event]:
        yield from self._builder.finish()
