"""Translate chat completions to ``/v1/responses`` and back, for an upstream that has nothing else.

Requests in Anthropic's API become chat completions first. The upstream doesn't store the responses, because clients of
these APIs can't refer to them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from proxy.dialects.units import encode
from proxy.errors import RequestError, UpstreamInterrupted
from proxy.http import sse
from proxy.upstream.bridge.completions import StopFilter
from proxy.upstream.bridge.returned import ITEM_IDS, fitted
from proxy.upstream.bridge.transport import (
    BROKEN,
    ErrorInStream,
    Translation,
    Translator,
    body_of,
    decoded_object,
    event_data,
    openai_error,
    without_compression,
)
from proxy.upstream.traits import STREAMS, apply, known
from proxy.upstream.transport import RESPONSES_PATH, Outgoing

UNREADABLE = "The upstream's answer isn't a response of /v1/responses. Ask the operator to check the setting 'speaks'."
LACKING = "'{name}' has no equivalent in /v1/responses, the only API of this model's upstream. Fix: remove it."

_SAME = (
    *("temperature", "top_p", "parallel_tool_calls", "metadata", "service_tier", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
)
_ONLY: Mapping[str, Any] = {"n": 1, "modalities": ["text"]}
"""Fields that only may have one value. With another one, a part of the answer would be missing."""

_TEXTS = {
    "output_text": ("content", "text", "message"),
    "text": ("content", "text", "message"),
    "refusal": ("refusal", "refusal", "message"),
    "reasoning_text": ("reasoning_content", "text", "reasoning"),
    "summary_text": ("reasoning_content", "text", "reasoning"),
    "function_call_arguments": ("function", "arguments", "function_call"),
    "custom_tool_call_input": ("custom", "input", "custom_tool_call"),
}
"""Texts of a stream: the field of the delta or call, that of a response, and the type of the item."""

_CALLS = {item: (name, kind, field) for name, (kind, field, item) in _TEXTS.items() if item.endswith("_call")}
_ERRORS = frozenset({"error", "response.failed"})
_ENDS = frozenset({"response.completed", "response.incomplete"})

Delta = dict[str, Any]
FIRST: Delta = {"role": "assistant", "content": ""}


class ChatOverResponses(Translation):
    """The way back to chat completions.

    ``usage``: the last chunk of a stream has the usage. ``legacy``: calls are those of ``functions``.
    """

    def __init__(self, model: str, bounds: StopFilter, *, usage: bool, legacy: bool) -> None:
        self._bounds = bounds
        self._usage = usage
        self._legacy = legacy
        self._frame: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": 0, "model": model}
        self._sent: dict[tuple[str, Any, int], int] = {}
        self._places: dict[str, tuple[Any, int]] = {}
        self._calls: dict[Any, int] = {}
        self._seen: set[str] = set()

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        message: Delta = {}
        for delta in self._output(answer):
            for name, value in delta.items():
                message[name] = message[name] + value if message.get(name) else value
        (choice,) = self._passed(message, self._reason(answer))
        message = {"role": "assistant", "content": None, **choice.pop("delta")}
        for call in message.get("tool_calls", ()):
            del call["index"]
        choice = {"index": 0, "message": message, **choice}
        made = {**self._frame, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}
        return {name: value for name, value in made.items() if value is not None}

    async def events(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks. Raises ``UpstreamInterrupted`` if the stream ends without its last event."""
        begun = False
        async for data in event_data(body):
            event = {} if data == b"[DONE]" else decoded_object(data, UNREADABLE)
            if event.get("type") in _ERRORS:
                raise ErrorInStream(_error_in(event))
            for choice in (one for delta in self._deltas(event) for one in self._passed(delta)):
                if not begun:
                    yield self._chunk({"index": 0, "delta": FIRST, "finish_reason": None})
                begun = True
                yield self._chunk(choice)
            if event.get("type") in _ENDS:
                response = event["response"]
                (choice,) = self._passed({}, self._reason(response))
                yield self._chunk(choice if begun else {**choice, "delta": FIRST | choice["delta"]})
                if self._usage and (usage := _usage(response)):
                    yield _event({**self._frame, "choices": [], "usage": usage})
                yield sse.encode(b"[DONE]")
                return
        raise UpstreamInterrupted(BROKEN)

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        return _event({**self._frame, "choices": [choice]})

    def _passed(self, delta: Delta, reason: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the choice that's for the client, if any. One with a reason is."""
        for choice in self._bounds.passed({"index": 0, "delta": delta, "finish_reason": reason}):
            stop = {"stop_reason": choice.pop("stop_sequence")} if "stop_sequence" in choice else {}  # as vLLM names it
            yield {**choice, "delta": self._named(choice["delta"]), **stop}

    def _reason(self, response: Mapping[str, Any]) -> str:
        if response.get("status") == "incomplete":
            why = (response.get("incomplete_details") or {}).get("reason")
            return "content_filter" if why == "content_filter" else "length"
        return ("function_call" if self._legacy else "tool_calls") if self._calls else "stop"

    def _named(self, delta: Delta) -> Delta:
        """Return a delta with calls as the client knows them."""
        if self._legacy and (calls := delta.pop("tool_calls", None)):
            delta["function_call"] = calls[0]["function"]
        return delta

    def _deltas(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the deltas for an event. Those that only report a progress have none."""
        name, _, step = str(event.get("type")).removeprefix("response.").rpartition(".")
        name = name.removeprefix("reasoning_") if "summary" in name else name
        place = event.get("output_index", event.get("item_id"))
        index = event.get("content_index", event.get("summary_index", 0))
        if isinstance(event.get("response"), dict):
            yield from self._output(event["response"])
        elif step in ("added", "done") and name == "output_item" and event.get("item"):
            yield from self._item(place, event["item"], done=step == "done")
        elif name == "output_text.annotation":
            yield from self._annotations(place, index, [event["annotation"]])
        elif step == "delta" and name in _TEXTS:
            yield from self._text(name, place, index, event.get("delta") or "")
        elif step == "done" and name in _TEXTS:
            yield from self._rest(name, place, index, event)

    def _output(self, response: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the deltas for the items of a response of types that had no events."""
        tier = response.get("service_tier")
        self._frame |= {"id": response.get("id"), "created": int(response.get("created_at") or 0)}
        self._frame |= {} if tier is None else {"service_tier": tier}
        seen = frozenset(self._seen)
        for place, item in enumerate(response.get("output") or ()):
            if item.get("type") not in seen:
                yield from self._item(place, item, done=True)

    def _item(self, place: Any, item: Mapping[str, Any], *, done: bool) -> Iterator[Delta]:
        kind = str(item.get("type"))
        self._seen.add(kind)
        if kind in _CALLS:
            name, type, field = _CALLS[kind]
            if place in self._calls:
                yield from self._rest(name, place, 0, item) if done else ()
                return
            self._calls[place], text = len(self._calls), (item.get(field) or "") if done else ""
            self._sent[name, place, 0] = len(text)
            opened = {"id": item.get("call_id"), "type": type, type: {"name": item.get("name"), field: text}}
            yield {"tool_calls": [{"index": self._calls[place], **opened}]}
        elif done and kind == "image_generation_call" and item.get("result"):
            url = f"data:image/{item.get('output_format') or 'png'};base64,{item['result']}"
            yield {"images": [{"type": "image_url", "image_url": {"url": url}}]}
        elif done:
            for field in ("summary", "content"):
                for index, part in enumerate(item.get(field) or ()):
                    if part.get("type") in _TEXTS:
                        yield from self._rest(part["type"], place, index, part)
                    yield from self._annotations(place, index, part.get("annotations") or (), whole=True)

    def _rest(self, name: str, place: Any, index: int, whole: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the part of a text that had no deltas."""
        text = whole.get(_TEXTS[name][1]) or ""
        yield from self._text(name, place, index, text[self._sent.get((name, place, index), 0) :])

    def _text(self, name: str, place: Any, index: int, text: str) -> Iterator[Delta]:
        field, inner, item = _TEXTS[name]
        if not text or (item in _CALLS and place not in self._calls):
            return
        self._seen.add(item)
        key = (name, place, index)
        self._sent[key] = self._sent.get(key, 0) + len(text)
        if item in _CALLS:
            yield {"tool_calls": [{"index": self._calls[place], field: {inner: text}}]}
            return
        here = (place, index if item == "reasoning" else 0)
        between = "\n\n" if self._places.get(field, here) != here else ""
        self._places[field] = here
        yield {field: between + text}

    def _annotations(self, place: Any, index: int, given: Any, *, whole: bool = False) -> Iterator[Delta]:
        key = ("annotations", place, index)
        sent = self._sent.get(key, 0)
        if new := given[sent if whole else 0 :]:
            self._sent[key] = sent + len(new)
            nested = [{"type": one["type"], one["type"]: {n: v for n, v in one.items() if n != "type"}} for one in new]
            yield {"annotations": nested}


def _usage(response: Mapping[str, Any]) -> dict[str, Any] | None:
    usage = response.get("usage")
    if not usage:
        return None
    sent, written = usage.get("input_tokens") or 0, usage.get("output_tokens") or 0
    made = {"prompt_tokens": sent, "completion_tokens": written, "total_tokens": usage.get("total_tokens")}
    details = {"prompt_tokens_details": "input_tokens_details", "completion_tokens_details": "output_tokens_details"}
    made |= {name: usage[old] for name, old in details.items() if usage.get(old)}
    return made | {"total_tokens": made["total_tokens"] or sent + written}


def _translate(request: Outgoing, translated: bool) -> tuple[Outgoing, Translation]:
    given = {name: value for name, value in body_of(request).items() if value is not None}
    for name, value in _ONLY.items():
        if given.get(name, value) != value:
            raise RequestError(LACKING.format(name=name), param=name)
    made = {"model": request.model, "input": [*_items(given.get("messages", ()))], "stream": request.stream}
    made |= {**_fields(given), "store": False}
    single = made.get("parallel_tool_calls") is False
    edited = apply(
        made, (*known(request.family or request.model), *(edit for edit in request.edits if edit != STREAMS))
    )
    body, headers = encode(made), without_compression(request.headers)
    sent = msgspec.structs.replace(request, body=body, path=RESPONSES_PATH, query="", headers=headers, edited=edited)
    usage = bool((given.get("stream_options") or {}).get("include_usage"))
    stops = [given["stop"]] if isinstance(given.get("stop"), str) else given.get("stop") or []
    stops = [one for one in stops if isinstance(one, str) and one] if isinstance(stops, list) else []
    bounds = StopFilter(stops, single=single and "parallel_tool_calls" not in made)
    return sent, ChatOverResponses(request.model, bounds, usage=usage, legacy="functions" in given)


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: given[name] for name in _SAME if name in given}
    for name in ("max_tokens", "max_completion_tokens"):
        made |= {"max_output_tokens": given[name]} if name in given else {}
    if "reasoning_effort" in given:
        made["reasoning"] = {"effort": given["reasoning_effort"]}
    text = {"verbosity": given["verbosity"]} if "verbosity" in given else {}
    text |= {"format": _flat(given["response_format"])} if "response_format" in given else {}
    functions = [{"type": "function", "function": one} for one in given.get("functions", ())]
    tools = [_tool(tool) for tool in (*given.get("tools", ()), *functions)]
    if "web_search_options" in given:
        tools.append(_flat({"type": "web_search", "web_search": given["web_search_options"]}))
    if functions:
        made["parallel_tool_calls"] = False
    choice = given.get("tool_choice", given.get("function_call"))
    if choice is not None:
        made["tool_choice"] = _flat({"type": "function", **choice}) if isinstance(choice, dict) else choice
    return {**made, **({"text": text} if text else {}), **({"tools": tools} if tools else {})}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without empty fields. Functions are strict by default in this API, but not in chat completions."""
    kept = {name: value for name, value in _flat(tool).items() if value is not None}
    return {"strict": False, **kept} if kept.get("type") == "function" else kept


def _flat(value: Any) -> Any:
    """Return an object with the fields that chat completions have under the name of its type."""
    if isinstance(value, list):
        return [_flat(one) for one in value]
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or not isinstance(value.get(kind), dict):
        return value
    return {name: inner for name, inner in value.items() if name != kind} | {
        n: _flat(v) for n, v in value[kind].items()
    }


def _items(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    custom: set[str] = set()
    legacy: dict[str, str] = {}
    for number, message in enumerate(messages):
        role, name = message["role"], message.get("name")
        if role in ("tool", "function"):
            id = fitted(message.get("tool_call_id") or legacy.get(str(name), ""), ITEM_IDS)
            kind = "custom_tool_call_output" if id in custom else "function_call_output"
            yield {"type": kind, "call_id": id, "output": _content(message.get("content") or "")}
            continue
        if message.get("audio"):
            where = f"messages[{number}].audio"
            raise RequestError(LACKING.format(name=where), param=where)
        if thought := message.get("reasoning_content") or message.get("reasoning"):
            part = {"type": "reasoning_text", "text": thought}
            # Servers look for an item with an id in their store, and refuse one that isn't there.
            yield {"type": "reasoning", "summary": [], "content": [part]}
        content = _content(message.get("content") or "", "output_text" if role == "assistant" else "input_text", name)
        if refused := message.get("refusal"):
            parts = [{"type": "output_text", "text": content}] if content and isinstance(content, str) else content
            content = [*parts, {"type": "refusal", "refusal": refused}]
        if content or role != "assistant":
            yield {"role": role, "content": content}
        if images := message.get("images"):
            yield {"role": "user", "content": _content(images)}
        for call in _calls(number, message):
            custom |= {call["call_id"]} if "input" in call else set()
            legacy[call["name"]] = call["call_id"]
            yield call


def _calls(number: int, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    old = message.get("function_call")
    calls = [{"id": f"call_{number}", "function": old}] if old else message.get("tool_calls") or ()
    for place, call in enumerate(calls):
        kind = call.get("type", "function")
        item, field = ("custom_tool_call", "input") if kind == "custom" else ("function_call", "arguments")
        try:
            id = fitted(call["id"], ITEM_IDS)
            yield {"type": item, "call_id": id, "name": call[kind]["name"], field: call[kind][field]}
        except (KeyError, TypeError) as error:
            where = f"messages[{number}].tool_calls[{place}]"
            raise RequestError(
                f"The proxy can't translate the request: '{where}' needs 'id', and '{kind}' with 'name' and '{field}'.",
                param=where,
            ) from error


def _content(content: Any, kind: str = "input_text", name: str | None = None) -> Any:
    """Return the content of an item. The API has no names of authors, so ``name`` becomes text."""
    if isinstance(content, str):
        return f"{name}: {content}" if name and content else content
    content = [content] if isinstance(content, dict) else content
    return [*([{"type": kind, "text": f"{name}:"}] if name else []), *(_part(part, kind) for part in content)]


def _part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a part. One without an equivalent stays, so that the upstream decides."""
    match part.get("type", "text" if "text" in part else None):
        case "text":
            return {"type": kind} | {key: part[key] for key in ("text", "prompt_cache_breakpoint") if key in part}
        case "image_url":
            image = part["image_url"] if isinstance(part["image_url"], dict) else {"url": part["image_url"]}
            return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail") or "auto"}
        case "file":
            return {"type": "input_file", **part["file"]}
    return part


def _error_in(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the error of the event ``error`` or ``response.failed``."""
    holder = event.get("response") or event
    stated = holder.get("error") or {name: event.get(name) for name in ("message", "code", "param")}
    return {"type": "server_error", **stated}


def _event(value: Mapping[str, Any]) -> bytes:
    return sse.encode(msgspec.json.encode(value))


def _is_response(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("output"), list) and not value.get("error") and value.get("status") != "failed"


def _error_event(fields: Mapping[str, Any], status: int, number: int) -> bytes:
    return _event(openai_error(fields, status))


TRANSLATOR = Translator(
    translate=_translate, is_answer=_is_response, error=openai_error, error_event=_error_event, unreadable=UNREADABLE
)
