"""Read the errors of a response: their codes, numeric fields, and sentences.

Providers and gateways wrap errors in many ways: an object, an array of one, a JSON text inside a ``message``, a JSON
text after a gateway's words, an event of a stream, an error inside a 200, a page of HTML. ``read_errors`` turns all of
them into a list of ``ErrorInfo``. It follows only fields that carry errors. Parts of the request that a provider echoes
(messages, excerpts, quoted values) aren't evidence.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from proxy.overflow.cleaning import PREFIX, SENTENCE, cleaned, page_text, unescaped
from proxy.overflow.error_detection import (
    ENVELOPES,
    MAX_DEPTH,
    MAX_ITEMS,
    UNREADABLE,
    Candidate,
    candidates,
    error_part,
    further_errors,
    parse,
    says_error,
)

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
    """The codes, numeric fields, and sentences of one error object.

    ``codes`` are lower case. ``texts`` are bounded, on one line, without embedded JSON and without quoted values.
    """

    codes: frozenset[str]
    numbers: Mapping[str, int]
    texts: tuple[str, ...]


def read_errors(status: int, body: bytes) -> list[ErrorInfo]:
    """Return the errors in a response, outermost first; empty if there is none.

    ``body`` is a whole decompressed body, or the start of a stream of server-sent events. If the status is an error, a
    body that isn't JSON, an event, or HTML counts as one sentence.
    """
    return list(islice(chain.from_iterable(map(_of_candidate, candidates(status, body))), MAX_ERRORS))


def _of_candidate(candidate: Candidate) -> Iterator[ErrorInfo]:
    text, value = candidate.text, candidate.value
    if value is None:
        yield from _of_text(text) if candidate.failed or says_error(text) else ()
    elif candidate.failed:
        yield from _walk(value, 0)
        yield from _walk(further_errors(value), 0)
    else:
        yield from _walk(error_part(value), 0)


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
