"""Read the errors of a response: their codes, numeric fields, and sentences.

Providers and gateways wrap errors in many ways: an object, an array of one, a JSON text inside a ``message``, a JSON
text after a gateway's words, an event of a stream, an error inside a 200, a page of HTML. ``read_errors`` turns all of
them into a list of ``ErrorInfo``. It follows only fields that carry errors. Parts of the request that a provider echoes
(messages, excerpts, quoted values) aren't evidence.

``candidates`` finds the parts of a response that may be errors, ``cleaned`` prepares a sentence for searching, and
``as_error`` puts an error into OpenAI's envelope.
"""

from __future__ import annotations

import ast
import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import msgspec

MAX_ERRORS = 16
# Fields whose value is a sentence about the error, or contains a nested error.
_TEXT_FIELDS = (
    *("message", "Message", "msg", "error_message", "errorMessage", "error_msg", "status_msg", "detail", "details"),
    *("title", "raw", "reason", "description", "error_description", "faultstring", "exception", "err", "errmsg"),
    *("error_messages", "reasons", "original_error", "upstream_error", "provider_error", "error"),
)
_NESTED_FIELDS = (
    *("errors", "Error", "Response", "base_resp", "metadata", "innererror", "inner_error", "cause", "body"),
    *("data", "fault", "result", "issues", "status", "header", "extensions", "ResponseMetadata", "responseBody"),
    *("response_body", "fieldViolations", "violations", "invalid-params", "invalid_params"),
)
_FIELDS_OF_REQUEST = ("errors", "param_errors", "validation_errors")
"""Objects that map a field of the request to a sentence, or to a list of sentences."""
_LAST_TEXTS = ("hint", "info", "data", "text", "messages")
"""Read only if an error has no other sentence. Next to another sentence, they may contain the request."""
_CODE_FIELDS = (
    *("code", "type", "Code", "error_code", "error_type", "errorCode", "status", "status_code", "reason", "__type"),
)
LIMIT_FIELDS = (
    *("n_ctx", "max_context_length", "context_length", "context_window", "max_context_tokens", "max_model_len"),
    *("max_input_tokens", "max_prompt_tokens", "token_limit", "context_size"),
)
COUNT_FIELDS = ("n_prompt_tokens", "prompt_tokens", "input_tokens", "num_prompt_tokens", "prompt_token_count")

_CODE_BREAK = re.compile(r"[ -]+|(?<=[a-z])(?=[A-Z])")
_CODE_END = re.compile(r"(?i)_?(?:error|exception)$")
_HEAD_MESSAGE = re.compile(r'"(?:message|detail|msg)"\s?:\s?"((?:[^"\\]|\\.){1,4096})', re.S)
_REPR = re.compile(r"\[?\{'[\w-]{1,40}': ")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The codes, numeric fields, and sentences of one error object."""

    codes: frozenset[str]  # lower case
    numbers: Mapping[str, int]
    texts: tuple[str, ...]  # bounded, on one line, without embedded JSON and without quoted values


def read_errors(status: int, body: bytes) -> list[ErrorInfo]:
    """Return the errors in a response, outermost first; empty if there is none.

    ``body`` is a whole decompressed body, or the start of a stream of server-sent events. If the status is an error, a
    body that isn't JSON, an event, or HTML counts as one sentence.
    """
    errors: list[ErrorInfo] = []
    for candidate in candidates(status, body):
        text, value = candidate.text, candidate.value
        if value is None:
            errors += _of_text(text) if candidate.failed or says_error(text) else ()
        else:
            parts = (value, further_errors(value)) if candidate.failed else (error_part(value),)
            errors += islice(chain.from_iterable(_walk(part, 0) for part in parts), MAX_ERRORS)
        if len(errors) >= MAX_ERRORS:
            break
    return errors[:MAX_ERRORS]


def _of_text(text: str) -> list[ErrorInfo]:
    """Read a body that isn't JSON as a whole: HTML, words followed by JSON, or truncated JSON."""
    if text.startswith("<"):
        return [ErrorInfo(frozenset(), {}, (cleaned(page_text(text)),))]
    if text.startswith("{") and not text.startswith("{'"):
        found = _HEAD_MESSAGE.search(text[:SENTENCE])
        return _sentences(unescaped(found[1]), 0) if found else []
    return _sentences(text, 0)


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
    codes = _codes(value)
    numbers = {key: number for key in (*LIMIT_FIELDS, *COUNT_FIELDS) if type(number := value.get(key)) is int}
    texts: list[str] = []
    inner: list[ErrorInfo] = []

    def add(sentence: str) -> None:
        text, embedded = _split(sentence, depth)
        texts.append(text)
        inner.extend(embedded)

    for key in _TEXT_FIELDS:
        field = value.get(key)
        if isinstance(field, str):
            add(field)
        elif isinstance(field, dict | list):
            inner += _walk(field, depth + 1)
    if not any(texts) and not inner:
        for sentence in _last_texts(value):
            add(sentence)
    if codes or texts or numbers:
        yield ErrorInfo(codes, numbers, tuple(dict.fromkeys(text for text in texts if text)))
    yield from inner
    for key in _NESTED_FIELDS:
        field = value.get(key)
        if isinstance(field, str) and field[:1] in ("{", "["):
            field = error_part(parse(field[:PREFIX]))
        if isinstance(field, dict | list):
            yield from _walk(field, depth + 1)
    for key in _FIELDS_OF_REQUEST:
        if isinstance(field := value.get(key), dict):
            yield from _walk([part for part in islice(field.values(), MAX_ITEMS) if _is_sentence(part)], depth + 1)


def _codes(value: dict[str, object]) -> frozenset[str]:
    """Return the codes in lower case, and in OpenAI's style: ``context_length_exceeded``."""
    found = [str(code)[:100] for key in _CODE_FIELDS if isinstance(code := value.get(key), str | int)]
    codes = {*map(str.lower, found), *(_CODE_END.sub("", _CODE_BREAK.sub("_", code)).lower() for code in found)}
    if isinstance(param := value.get("param"), str):
        codes.add(f"param:{param[:100].lower()}")
    return frozenset(codes)


def _last_texts(value: dict[str, object]) -> list[str]:
    """Return the sentences of an error that has none in the usual fields."""
    if any(value.get(key) for key in ENVELOPES):
        return []
    found: list[str] = []
    for key in _LAST_TEXTS:
        field = value.get(key)
        if isinstance(field, list) and all(isinstance(item, str) for item in field[:MAX_ITEMS]):
            found += field[:MAX_ITEMS]
        elif isinstance(field, str) and not field.startswith(("{", "[")):
            found.append(field)
    return found


def _is_sentence(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, list) and bool(part) and isinstance(part[0], str))


def _sentences(text: str, depth: int) -> list[ErrorInfo]:
    own, embedded = _split(text, depth)
    return [ErrorInfo(frozenset(), {}, (own,)), *embedded] if own else embedded


def _split(text: str, depth: int) -> tuple[str, list[ErrorInfo]]:
    """Return a sentence without the JSON in it, and the errors in that JSON."""
    text = text[:PREFIX]
    rest, start = "", 0
    embedded: list[ErrorInfo] = []
    for _ in range(4):
        at = min((i for i in (text.find("{", start), text.find("[{", start)) if i >= 0), default=-1)
        if at < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, at)
        except UNREADABLE:
            end = text.rfind("}", at, SENTENCE) + 1
            value = _of_repr(text[at:end])
            if value is None:
                rest, start = rest + text[start : at + 1], at + 1
                continue
        rest, start = rest + text[start:at] + " ", end
        embedded += _walk(value, depth + 1)
    return cleaned(rest + text[start:]), embedded


def _of_repr(text: str) -> object:
    """Parse an error's body as Python prints it: ``{'error': {'message': "..."}}``; ``None`` for other text."""
    if not _REPR.match(text):
        return None
    try:
        value: object = ast.literal_eval(text)
    except (*UNREADABLE, SyntaxError, MemoryError):
        return None
    return value


WHOLE_BODY = 1_000_000  # Bytes of a body that is parsed. Of a longer one, the first `PREFIX` bytes are read as text.
MAX_ITEMS = 8
MAX_DEPTH = 10
MAX_EVENTS = 64

ENVELOPES = ("error", "Error", "Response", "ResponseMetadata", "response", "base_resp", "fault", "header")
_EXCEPTION_KEY = re.compile(r"\w{0,40}[a-z]Exception")  # Bedrock's name for the event of an error

# A successful response contains an error only if it has one of these fields, ...
_ERROR_IN_SUCCESS = ("error", "Error", "errors", "base_resp", "Response", "ResponseMetadata", "fault", "header")
# ... or if it has none of _ANSWERED and its fields describe an error.
_ANSWERED = ("choices", "output", "content", "candidates")
_ONLY_IN_ERRORS = ("detail", "error_msg", "error_message", "errorMessage", "errmsg", "exception")
_MESSAGES = ("message", "Message", "msg", "title")
_STATUS = ("status", "status_code", "statusCode")
_CODES = (*_STATUS, "code", "Code", "errcode", "error_code", "errorCode", "__type", "success")
_SUCCESS = (0, "0", 200, "200")
_ERROR_TEXT = re.compile(r"\[error\]|error ?:", re.I)

UNREADABLE = (ValueError, RecursionError, msgspec.DecodeError)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of a response that may be an error."""

    text: str
    value: object  # its JSON, `None` if it isn't JSON
    failed: bool  # the event's name, or else the status, is an error, so all of `value` describes it
    event: bool = False  # it is an event of a stream


def candidates(status: int, body: bytes) -> Iterator[Candidate]:
    """Yield the parts of a response that may be errors: the JSON body, a stream's events, or an error's text."""
    text = body[: WHOLE_BODY if len(body) <= WHOLE_BODY else PREFIX].decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    failed = status >= 400
    if len(body) <= WHOLE_BODY and text[:1] in '{["' and (value := parse(text)) is not None:
        yield Candidate(text, value, failed)
    elif found := list(_events(text)):
        for name, data in found:
            yield Candidate(data, parse(data), names_error(name), event=True)
    elif failed:
        yield Candidate(text, None, failed)


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and data of a stream's first events. Old llama.cpp servers send ``error:`` as a separate field."""
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
            yield name, "\n".join(data)


def names_error(event: str) -> bool:
    """Return whether an event with this name is an error."""
    return "error" in event or "exception" in event


def says_error(value: object) -> bool:
    """Return whether a successful response or an event is an error. ``value`` is a string if it isn't JSON."""
    return bool((isinstance(value, str) and _ERROR_TEXT.match(value)) or error_part(value))


def error_part(value: object) -> object:
    """Return the error in a successful response or an event: its ``error`` field, or the value if it is an error."""
    if isinstance(value, list):
        return [part for item in value[:4] if (part := error_part(item))]
    if isinstance(value, str) and value.startswith("{"):
        value = parse(value)
    if not isinstance(value, dict):
        return None
    if "error" in (value.get("type"), value.get("object")) or _is_about_itself(value):
        return value
    response = value.get("response")  # the Responses API's ``response.failed``
    if isinstance(response, dict) and response.get("error"):
        return {"error": response["error"]}
    found = {key: value[key] for key in _ERROR_IN_SUCCESS if value.get(key) and not reports_success(value[key])}
    return found or _errors_of_choices(value) or _exceptions(value)


def further_errors(value: object) -> list[object]:
    """Return the errors of a failed response outside the usual fields: in its choices, and Bedrock's exceptions."""
    return [*(_errors_of_choices(value) or ()), *_exceptions(value)] if isinstance(value, dict) else []


def _is_about_itself(value: dict[str, object]) -> bool:
    if any(value.get(key) for key in _ANSWERED):
        return False
    if any(value.get(key) for key in _ONLY_IN_ERRORS):
        return True
    if any(type(number := value.get(key)) is int and number >= 400 for key in _STATUS):
        return True
    return any(isinstance(value.get(key), str) for key in _MESSAGES) and any(key in value for key in _CODES)


def reports_success(value: object) -> bool:
    """Return whether a status report shows success. MiniMax and Spark add a report to every response."""
    return isinstance(value, dict) and (value.get("status_code") in _SUCCESS or value.get("code") in _SUCCESS)


def _errors_of_choices(value: dict[str, object]) -> list[object] | None:
    choices = value.get("choices")
    if not isinstance(choices, list):
        return None
    return [choice["error"] for choice in choices[:4] if isinstance(choice, dict) and choice.get("error")]


def _exceptions(value: dict[str, object]) -> list[object]:
    fields = islice(value.items(), MAX_ITEMS)
    return [field for key, field in fields if isinstance(field, dict) and _EXCEPTION_KEY.fullmatch(key)]


def parse(text: str) -> object:
    """Return the value of a JSON text, or ``None``."""
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        pass
    try:
        value: object = json.loads(text)  # accepts lone surrogates
    except UNREADABLE:
        return None
    return value


PREFIX = 65_536  # characters of a long text that are read
SENTENCE = 8_192  # characters of one error message that are read
SHORT_QUOTE = 16  # Characters. A shorter quoted value is a name ("middle-out"), not a user's text.
MOST_HIDDEN = 8  # hidden parts of a page that `page_text` removes, at most, for each tag

_HIDDEN = ("style", "script")
_QUOTED = re.compile(r"""(?P<key>['"]?\w{1,20}['"]?\s?[:=]\s?)?"(?P<text>[^"]*)["]""")
_QUOTED_ECHO = re.compile(
    r"""['"]?(?:content|text|input|prompt|arguments|value)['"]?\s?[:=]\s?(?:'[^']{0,4096}'|`[^`]{0,4096}`)"""
)
_ERROR_KEY = re.compile(r"""['"]?(?:message|msg|detail|details|error|reason|raw)['"]?\s?[:=]\s?$""", re.I)
_TAG = re.compile(r"<[^<>]{1,200}>")
_ESCAPES = {"\\n": " ", "\\t": " ", "\\r": " ", '\\"': '"', "\\/": "/", "\\`": "`"}
_NARROW: dict[int, int | str] = {
    **{full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F) if chr(full) not in "！；？"},
    0x2009: "\u202f",
    0xA0: "\u202f",
}
"""Full-width East Asian characters, except the ends of sentences, and the spaces within numbers."""
_ONE_NUMBER = re.compile(r"(?<=\d)\u202f(?=\d{3}(?!\d))")


def page_text(page: str) -> str:
    """Return the first part of a page as text, without styles and scripts."""
    page = page[:PREFIX]
    for name in _HIDDEN:
        parts = re.split(rf"<{name}\b", page, maxsplit=MOST_HIDDEN, flags=re.I)
        page = parts[0] + "".join(re.split(rf"</{name}>", part, maxsplit=1, flags=re.I)[-1] for part in parts[1:])
    return html.unescape(_TAG.sub(" ", page[:SENTENCE]))


def cleaned(text: str) -> str:
    """Return one line of bounded length, without long quoted values, unless they are an error's message."""
    text = _ONE_NUMBER.sub("", unescaped(text[:SENTENCE]).translate(_NARROW))
    text = " ".join(text.split())
    return _QUOTED_ECHO.sub(" ", _QUOTED.sub(_unquote, text))


def _unquote(found: re.Match[str]) -> str:
    key = found["key"] or ""
    return found[0] if len(found["text"]) < SHORT_QUOTE or _ERROR_KEY.search(key) else f"{key} "


def unescaped(text: str) -> str:
    """Replace JSON's escapes in a text that was truncated, or was escaped twice."""
    if "\\" in text:
        for escape, plain in _ESCAPES.items():
            text = text.replace(escape, plain)
    return text


# A sentence is in one of ENVELOPES, in the first of _SENTENCE_FIELDS that is a string, or in one of _FURTHER_IN.
_SENTENCE_FIELDS = (
    *("message", "Message", "msg", "error_message", "errorMessage", "error_msg", "errmsg", "status_msg", "detail"),
    *("error", "faultstring", "exception", "title"),
)
_FURTHER_IN = ("detail", "errors", "message", "choices")
_REPORTS = ("base_resp", "header")
_CODES_OF_ENVELOPE = ("Code", "error_code", "errorCode", "errcode", "status_code", "statusCode")


@dataclass(frozen=True, slots=True)
class MessageSite:
    """The place of an upstream's sentence about an error: ``holder[key]``, within the value that was searched."""

    holder: dict[str, Any]
    key: str

    @property
    def text(self) -> str:
        """Return the sentence, unchanged."""
        text: str = self.holder[self.key]
        return text


def message_site(value: object, depth: int = 0) -> MessageSite | None:
    """Return the place of an error's sentence; ``None`` if no sentence is a string."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, list):
        return next((found for item in value[:MAX_ITEMS] if (found := message_site(item, depth + 1))), None)
    if not isinstance(value, dict):
        return None
    for key in ENVELOPES:
        inner = value.get(key)
        if not (key in _REPORTS and reports_success(inner)) and (found := message_site(inner, depth + 1)):
            return found
    # A choice's text is the model's output, not an error.
    fields = ("error",) if any(key in value for key in ("delta", "finish_reason")) else _SENTENCE_FIELDS
    for key in fields:
        if isinstance(text := value.get(key), str) and text.strip():
            return MessageSite(value, key)
    return next((found for key in _FURTHER_IN if (found := message_site(value.get(key), depth + 1))), None)


def as_error(status: int, body: bytes) -> dict[str, Any] | None:
    """Return the error in a response, in OpenAI's envelope and the upstream's words; ``None`` if there is none."""
    for candidate in candidates(status, body):
        failed = candidate.failed or status >= 400
        if candidate.value is not None:
            if error := _enveloped(candidate.value, failed=failed):
                return error
        elif candidate.event and (failed or says_error(candidate.text)):
            return {"error": {"message": candidate.text}}
    return None


def _enveloped(value: object, *, failed: bool) -> dict[str, Any] | None:
    part = value if failed else error_part(value)
    if isinstance(value, list) and value:
        value = value[0]
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(error, dict) and isinstance(error.get("message"), str):
        return value
    if isinstance(part, list) and part and isinstance(part[0], str):
        return {"error": {"message": part[0]}}
    found = message_site(part)
    if found is None:
        return value if isinstance(value, dict) and error else None
    made = {"message": found.text, **{key: field for key, field in found.holder.items() if key != found.key}}
    if (
        "code" not in made
        and (code := next((made[key] for key in _CODES_OF_ENVELOPE if made.get(key)), None)) is not None
    ):
        made["code"] = code
    return {"error": made}
