"""Read an upstream's refusal, and add the sizes of the request's parts to it."""

from __future__ import annotations

import codecs
from collections.abc import Mapping

import msgspec

from proxy.overflow.errors import message_site
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.response_start import ResponseStart, readable

_BOUND_ELSEWHERE = (
    *(b"bound to a different conversation", b"Invalid `signature`"),
    *(b"without its required following item", b"without its required 'reasoning' item"),
)
"""The wordings for reasoning whose prefix or neighbors changed.

Anthropic's are from platform.claude.com, "Preserved thinking", OpenAI's from issue 3009 of openai-python.
"""


async def refuses_reasoning(context: ConversationContext, start: ResponseStart) -> bool:
    """Return whether the upstream refused bound reasoning, and the proxy hasn't retried without it yet."""
    if start.answer.status != 400 or "reasoning" in context.retries:
        return False
    if context.counter is None or context.counter.format.binds_reasoning == "never":
        return False
    shown = await readable(start.answer, start.first)
    return any(wording in shown for wording in _BOUND_ELSEWHERE)


async def refuses_compaction(start: ResponseStart) -> bool:
    """Return whether the upstream refused a compaction that it made itself."""
    return start.answer.status == 400 and b"compaction" in await readable(start.answer, start.first)


async def add_sizes(start: ResponseStart, parts: Mapping[str, int]) -> None:
    """Add one sentence to the message of the upstream's refusal: the parts of the request, with sizes in tokens.

    Status, type, and code stay. A response that isn't an error with a message stays unchanged.
    """
    added = _sentence(parts)
    body = await readable(start.answer, start.first)
    first = _error_with(body, added) or b"\n".join(_line_with(line, added) for line in body.split(b"\n"))
    if first == body:
        return
    start.first = first
    start.answer.headers = [
        pair for pair in start.answer.headers if pair[0] not in ("content-length", "content-encoding")
    ]
    if start.complete:
        start.answer.headers.append(("content-length", str(len(first))))


def advice(parts: Mapping[str, int]) -> str:
    """Return the sentence as an ASCII header value."""
    return _sentence(parts).strip("()").encode("ascii", "replace").decode()


def _line_with(line: bytes, added: str) -> bytes:
    """Return a line of a stream. If it has the data of an error, add a sentence to its message."""
    name, separator, data = line.partition(b":")
    changed = _error_with(data.strip(), added) if name in (b"data", b"error") else None
    return line if changed is None else name + separator + b" " + changed


def _error_with(body: bytes, added: str) -> bytes | None:
    """Return an error with a sentence added to its message, or ``None`` for anything else."""
    value = _decoded(body.removeprefix(codecs.BOM_UTF8))
    found = message_site(value)
    if found is None:
        return None
    found.holder[found.key] = f"{found.text} {added}"
    return msgspec.json.encode(value)


def _sentence(parts: Mapping[str, int]) -> str:
    """Return one sentence about the parts of a request, with sizes in tokens."""
    sized = sorted(((tokens, name) for name, tokens in parts.items() if tokens), reverse=True)
    if not sized:
        return "(The compaction proxy can't shorten any part of this request.)"
    listed = ", ".join(f"{name} {tokens:,}" for tokens, name in sized)
    return (
        f"(The compaction proxy couldn't make the request small enough. It still has these parts, in tokens: {listed}. "
        f"Shorten the {sized[0][1]}, or use a model with a larger window.)"
    )


def _decoded(data: bytes) -> object:
    """Return the JSON value, or ``None`` for invalid JSON."""
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value
