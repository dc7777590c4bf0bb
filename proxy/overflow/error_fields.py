"""Where the error is in an answer: its codes, its own numbers and its sentences, and nothing else.

Providers and the hops before them wrap errors in many ways: an object, an array of one, a JSON text inside a
``message``, a JSON text behind some words of a gateway, an event of a stream, an error inside a 200, a page of HTML.
Here all of them become a list of ``Fault``. Only fields that carry errors are followed. Whatever a provider echoes of
the request (messages, excerpts, quoted values) is not evidence of anything.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec

from proxy.overflow.cleaning import PREFIX, SENTENCE, cleaned, page_text, unescaped

WHOLE_BODY = 1_000_000
"""Bytes up to which a body is parsed. Of a longer one only the first ``PREFIX`` bytes are looked at, as text."""
MAX_FAULTS = 16
MAX_ITEMS = 8
MAX_DEPTH = 10
MAX_EVENTS = 64

# Fields whose value is a sentence about the error, or holds an error further in.
_TEXT_FIELDS = (
    "message",
    "Message",
    "msg",
    "error_message",
    "errorMessage",
    "error_msg",
    "status_msg",
    "detail",
    "details",
    "title",
    "raw",
    "reason",
    "description",
    "error_description",
    "faultstring",
    "exception",
    "err",
    "errmsg",
    "error_messages",
    "reasons",
    "original_error",
    "upstream_error",
    "provider_error",
)
_NESTED_FIELDS = (
    *("error", "errors", "Error", "Response", "base_resp", "metadata", "innererror", "inner_error", "cause", "body"),
    *("data", "fault", "result", "issues", "status", "header", "extensions", "ResponseMetadata", "responseBody"),
    *("response_body", "fieldViolations", "violations", "invalid-params", "invalid_params"),
)
_FIELDS_OF_REQUEST = ("errors", "param_errors", "validation_errors")
"""Here a field of the request may have a sentence, or a list of them."""
_LAST_TEXTS = ("hint", "info", "data", "text", "messages")
"""Read where an error has no sentence of its own: beside one they may hold what was sent."""
_EXCEPTION_KEY = re.compile(r"\w{0,40}[a-z]Exception")
"""``validationException``: the name of an event of Bedrock's is the error's."""
_CODE_FIELDS = (
    *("code", "type", "Code", "error_code", "error_type", "errorCode", "status", "status_code", "reason", "__type"),
)
LIMIT_FIELDS = (
    *("n_ctx", "max_context_length", "context_length", "context_window", "max_context_tokens", "max_model_len"),
    *("max_input_tokens", "max_prompt_tokens", "token_limit", "context_size"),
)
COUNT_FIELDS = ("n_prompt_tokens", "prompt_tokens", "input_tokens", "num_prompt_tokens", "prompt_token_count")
_NUMBER_FIELDS = (*LIMIT_FIELDS, *COUNT_FIELDS)

# In an answer that did not fail, an error is only where one of these says so, ...
_ERROR_IN_SUCCESS = ("error", "Error", "errors", "base_resp", "Response", "ResponseMetadata", "fault", "header")
# ... or where nothing was answered (none of _ANSWERED) and the answer is a message about itself.
_ANSWERED = ("choices", "output", "content", "candidates")
_SURELY_ERROR = ("detail", "error_msg", "error_message", "errorMessage", "errmsg", "exception")
_SAID = ("message", "Message", "msg", "title")
_NUMBERED = (
    *("code", "Code", "status", "status_code", "statusCode", "errcode", "error_code", "errorCode", "__type", "success"),
)
_CODE_BREAK = re.compile(r"[ -]+|(?<=[a-z])(?=[A-Z])")
_CODE_END = re.compile(r"(?i)_?(?:error|exception)$")
_STATUS = ("status", "status_code", "statusCode")
_WELL = (0, "0", 200, "200")
_ERROR_TEXT = re.compile(r"\[error\]|error ?:", re.I)

# Where an error's sentence stands: in one of the envelopes, in the first of the words that is a text, or further in.
_ENVELOPES = ("error", "Error", "Response", "ResponseMetadata", "response", "base_resp", "fault", "header")
_WORDS = (
    *("message", "Message", "msg", "error_message", "errorMessage", "error_msg", "errmsg", "status_msg", "detail"),
    *("error", "faultstring", "exception", "title"),
)
_FURTHER_IN = ("detail", "errors", "message", "choices")
_REPORTS = ("base_resp", "header")
_CODES = ("Code", "error_code", "errorCode", "errcode", "status_code", "statusCode")

_HEAD_MESSAGE = re.compile(r'"(?:message|detail|msg)"\s?:\s?"((?:[^"\\]|\\.){1,4096})', re.S)
_REPR = re.compile(r"\[?\{'[\w-]{1,40}': ")
_DECODER = json.JSONDecoder()
_UNREADABLE = (ValueError, RecursionError, msgspec.DecodeError)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """One error object: what it calls itself, the numbers it carries as fields, and its sentences.

    ``codes`` are lower case. ``texts`` are bounded, on one line, without embedded JSON and without quoted values.
    """

    codes: frozenset[str]
    numbers: Mapping[str, int]
    texts: tuple[str, ...]


def faults(status: int, body: bytes) -> list[ErrorInfo]:
    """The errors in an answer, outermost first; empty where there is none.

    ``body`` is a whole decompressed body, or the start of a stream of server-sent events. A body that is no JSON, no
    event and no HTML counts as one sentence where the status says that the request failed.
    """
    text = body[: WHOLE_BODY if len(body) <= WHOLE_BODY else PREFIX].decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    failed = status >= 400
    if len(body) <= WHOLE_BODY and text[:1] in '{["':
        value = _parse(text)
        if value is not None:
            return _collect(value, failed=failed)
    events = list(_events(text))
    if events:
        return [fault for event in events for fault in _of_event(event)][:MAX_FAULTS]
    return _of_text(text) if failed else []


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    data: str


def _events(text: str) -> Iterator[_Event]:
    """The first events of a stream. ``error:`` as a field of its own is an old llama.cpp server's."""
    if not text.startswith(("data:", "event:", "error:", ":", "id:", "retry:")):
        return
    blocks = text.replace("\r\n", "\n").replace("\r", "\n").split("\n\n", MAX_EVENTS)
    for block in blocks[:MAX_EVENTS]:
        name, data = "", []
        for line in block.split("\n"):
            field, _, value = line.partition(":")
            if field == "event":
                name = value.strip()
            elif field in ("data", "error"):
                name = "error" if field == "error" else name
                data.append(value.strip())
        if data:
            yield _Event(name, "\n".join(data))


def _of_event(event: _Event) -> list[ErrorInfo]:
    value = _parse(event.data)
    if value is not None:
        return _collect(value, failed=names_error(event.name))
    return _of_text(event.data) if names_error(event.name) or says_error(event.data) else []


def _of_text(text: str) -> list[ErrorInfo]:
    """A body that is not JSON as a whole: HTML, words with JSON behind them, or JSON that was cut off."""
    if text.startswith("<"):
        return [ErrorInfo(frozenset(), {}, (cleaned(page_text(text)),))]
    if text.startswith("{") and not text.startswith("{'"):
        found = _HEAD_MESSAGE.search(text[:SENTENCE])
        return _sentences(unescaped(found[1]), 0) if found else []
    return _sentences(text, 0)


@dataclass(frozen=True, slots=True)
class Said:
    """An upstream's sentence about an error: ``holder[key]``, within the value that it was found in."""

    holder: dict[str, Any]
    key: str

    @property
    def text(self) -> str:
        """The sentence, as it was written."""
        text: str = self.holder[self.key]
        return text


def message_site(value: object, depth: int = 0) -> Said | None:
    """Where the sentence of an error stands; ``None`` where there is none that is a text."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, list):
        return next((found for item in value[:MAX_ITEMS] if (found := message_site(item, depth + 1))), None)
    if not isinstance(value, dict):
        return None
    for key in _ENVELOPES:
        inner = value.get(key)
        if not (key in _REPORTS and _is_well(inner)) and (found := _further_in(inner, depth)):
            return found
    # The text of a choice is an answer.
    words = ("error",) if any(key in value for key in ("delta", "finish_reason")) else _WORDS
    for key in words:
        if isinstance(text := value.get(key), str) and text.strip():
            return Said(value, key)
    return next((found for key in _FURTHER_IN if (found := _further_in(value.get(key), depth))), None)


def _further_in(inner: object, depth: int) -> Said | None:
    return message_site(inner, depth + 1) if isinstance(inner, dict | list) else None


def as_error(status: int, body: bytes) -> dict[str, Any] | None:
    """The error in an answer, in OpenAI's envelope and in the upstream's words; ``None`` where it has none.

    ``body`` as for ``faults``. What has OpenAI's form already is left as it is.
    """
    text = body[:WHOLE_BODY].decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    value = _parse(text)
    if value is not None:
        return _enveloped(value, failed=status >= 400)
    for event in _events(text):
        failed = status >= 400 or names_error(event.name)
        value = _parse(event.data)
        if value is None and (failed or says_error(event.data)):
            return {"error": {"message": event.data}}
        if error := _enveloped(value, failed=failed):
            return error
    return None


def _enveloped(value: object, *, failed: bool) -> dict[str, Any] | None:
    part = value if failed else _error_part(value)
    if isinstance(value, list) and value:
        value = value[0]
    if (
        isinstance(value, dict)
        and isinstance(error := value.get("error"), dict)
        and isinstance(error.get("message"), str)
    ):
        return value
    if isinstance(part, list) and part and isinstance(part[0], str):
        return {"error": {"message": part[0]}}
    found = message_site(part)
    if found is None:
        return value if isinstance(value, dict) and value.get("error") else None
    error = {"message": found.text, **{key: field for key, field in found.holder.items() if key != found.key}}
    if "code" not in error and (code := next((error[key] for key in _CODES if error.get(key)), None)) is not None:
        error["code"] = code
    return {"error": error}


def _collect(value: object, *, failed: bool) -> list[ErrorInfo]:
    if not failed:
        return list(islice(_walk(_error_part(value), 0), MAX_FAULTS))
    further = [_of_choices(value.get("choices")), _named_for_an_exception(value)] if isinstance(value, dict) else []
    return list(islice(chain(_walk(value, 0), _walk(further, 0)), MAX_FAULTS))


def names_error(event: str) -> bool:
    """Whether an event of this name is an error as a whole."""
    return "error" in event or "exception" in event


def says_error(value: object) -> bool:
    """Whether a successful answer, or an event, says that it is an error. One that is no JSON is a text."""
    return bool((isinstance(value, str) and _ERROR_TEXT.match(value)) or _error_part(value))


def _error_part(value: object) -> object:
    """What of a successful answer, or of an event, is an error: its ``error``, or itself if it says that it is one."""
    if isinstance(value, list):
        return [part for item in value[:4] if (part := _error_part(item))]
    if isinstance(value, str) and value.startswith("{"):
        value = _parse(value)
    if not isinstance(value, dict):
        return None
    if "error" in (value.get("type"), value.get("object")) or _is_about_itself(value):
        return value
    response = value.get("response")  # the Responses API's ``response.failed``
    if isinstance(response, dict) and response.get("error"):
        return {"error": response["error"]}
    found = {key: value[key] for key in _ERROR_IN_SUCCESS if value.get(key) and not _is_well(value[key])}
    return found or _of_choices(value.get("choices")) or _named_for_an_exception(value)


def _is_about_itself(value: dict[str, object]) -> bool:
    if any(value.get(key) for key in _ANSWERED):
        return False
    if any(value.get(key) for key in _SURELY_ERROR):
        return True
    if any(type(number := value.get(key)) is int and number >= 400 for key in _STATUS):
        return True
    return any(isinstance(value.get(key), str) for key in _SAID) and any(key in value for key in _NUMBERED)


def _is_well(value: object) -> bool:
    """Whether a report on a request says that nothing is wrong: MiniMax and Spark add one to every answer."""
    return isinstance(value, dict) and (value.get("status_code") in _WELL or value.get("code") in _WELL)


def _of_choices(choices: object) -> object:
    """The errors of choices in which nothing was written."""
    if not isinstance(choices, list):
        return None
    return [choice["error"] for choice in choices[:4] if isinstance(choice, dict) and choice.get("error")]


def _named_for_an_exception(value: dict[str, object]) -> list[object]:
    fields = islice(value.items(), MAX_ITEMS)
    return [field for key, field in fields if isinstance(field, dict) and _EXCEPTION_KEY.fullmatch(key)]


def _walk(value: object, depth: int) -> Iterator[ErrorInfo]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, str):
        yield from _sentences(value, depth)
    elif isinstance(value, list):
        for item in value[:MAX_ITEMS]:
            yield from _walk(item, depth + 1)
    elif isinstance(value, dict):
        yield from _object(value, depth)


def _object(value: dict[str, object], depth: int) -> Iterator[ErrorInfo]:
    codes = frozenset(
        name
        for key in _CODE_FIELDS
        if isinstance(code := value.get(key), str | int)
        for name in _names(str(code)[:100])
    )
    if isinstance(param := value.get("param"), str):
        codes |= {f"param:{param[:100].lower()}"}
    numbers = {key: number for key in _NUMBER_FIELDS if type(number := value.get(key)) is int}
    texts: list[str] = []
    inner: list[ErrorInfo] = []
    for key in _TEXT_FIELDS:
        field = value.get(key)
        if isinstance(field, str):
            text, embedded = _split(field, depth)
            texts.append(text)
            inner += embedded
        elif isinstance(field, dict | list):
            inner += _walk(field, depth + 1)
    if isinstance(error := value.get("error"), str):
        text, embedded = _split(error, depth)
        texts.append(text)
        inner += embedded
    if not any(texts) and not inner:
        for sentence in _last_texts(value):
            text, embedded = _split(sentence, depth)
            texts.append(text)
            inner += embedded
    if codes or texts or numbers:
        yield ErrorInfo(codes, numbers, tuple(dict.fromkeys(text for text in texts if text)))
    yield from inner
    for key in _NESTED_FIELDS:
        field = value.get(key)
        if isinstance(field, str) and field[:1] in ("{", "["):
            field = _error_part(_parse(field[:PREFIX]))
        if isinstance(field, dict | list):
            yield from _walk(field, depth + 1)
    for key in _FIELDS_OF_REQUEST:
        if isinstance(field := value.get(key), dict):
            said = [part for part in islice(field.values(), MAX_ITEMS) if _is_said(part)]
            yield from _walk(said, depth + 1)


def _last_texts(value: dict[str, object]) -> list[str]:
    """The sentences of an error that has none where they usually are."""
    if any(value.get(key) for key in _ENVELOPES):
        return []
    found: list[str] = []
    for key in _LAST_TEXTS:
        field = value.get(key)
        if isinstance(field, list) and all(isinstance(item, str) for item in field[:MAX_ITEMS]):
            found += field[:MAX_ITEMS]
        elif isinstance(field, str) and not field.startswith(("{", "[")):
            found.append(field)
    return found


def _names(code: str) -> tuple[str, ...]:
    """A code in lower case, and as it would be in OpenAI's style: ``context_length_exceeded``."""
    return code.lower(), _CODE_END.sub("", _CODE_BREAK.sub("_", code)).lower()


def _is_said(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, list) and bool(part) and isinstance(part[0], str))


def _sentences(text: str, depth: int) -> list[ErrorInfo]:
    own, embedded = _split(text, depth)
    return [ErrorInfo(frozenset(), {}, (own,)), *embedded] if own else embedded


def _split(text: str, depth: int) -> tuple[str, list[ErrorInfo]]:
    """A sentence without the JSON in it, and the errors that this JSON holds."""
    text = text[:PREFIX]
    rest, start = "", 0
    embedded: list[ErrorInfo] = []
    for _ in range(4):
        at = min((i for i in (text.find("{", start), text.find("[{", start)) if i >= 0), default=-1)
        if at < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, at)
        except _UNREADABLE:
            end = text.rfind("}", at, SENTENCE) + 1
            value = _of_repr(text[at:end])
            if value is None:
                rest, start = rest + text[start : at + 1], at + 1
                continue
        rest, start = rest + text[start:at] + " ", end
        embedded += _walk(value, depth + 1)
    return cleaned(rest + text[start:]), embedded


def _of_repr(text: str) -> object:
    """What Python prints of an error's body: ``{'error': {'message': "..."}}``; ``None`` for anything else."""
    if not _REPR.match(text):
        return None
    try:
        value: object = ast.literal_eval(text)
    except (*_UNREADABLE, SyntaxError, MemoryError):
        return None
    return value


def _parse(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except _UNREADABLE:
        pass
    try:
        value: object = json.loads(text)
    except _UNREADABLE:
        return None
    return value
