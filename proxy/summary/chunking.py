"""Write the summary of a conversation of any length, in chunks if it exceeds the model's window.

If no model returns a summary, ``extract`` builds one without a model.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.compaction import keeps
from proxy.compaction.format import Format, TextCounter
from proxy.compaction.shorten import middle_cut
from proxy.compaction.turn import Turn
from proxy.summary.prompt import Redaction, entries, fenced, language_sample, request_messages
from proxy.summary.quality import Written, checked

PARALLEL = 4
"""Chunks of one conversation that the proxy summarizes concurrently."""

SMALLEST_CHUNK = 500
"""Smallest usable chunk, in tokens. The proxy doesn't call a summary model with a smaller window."""

# Tokens of the prompt's wording, and a margin for tokenizers that count slightly differently.
_PROMPT_TOKENS = 600
_TEMPLATE_MARGIN = 100
_CAUTION = 0.9

_CUT_MARKER = "\n[… {tokens} tokens left out …]\n"


class SummaryFailed(Exception):
    """The model returned no usable summary. The message gives the reason without quoting content."""


class SummaryTooLong(SummaryFailed):
    """The model rejected the request as too long."""


class SummaryUnasked(SummaryFailed):
    """The proxy sent no request, for a reason unrelated to the model's health."""


class SummaryModel(ABC):
    """A model that writes summaries. ``input_limit`` is in tokens, or ``None`` if unknown."""

    __slots__ = ()

    input_limit: int | None
    count: TextCounter

    @abstractmethod
    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """Return the model's response. Raises ``SummaryFailed``."""


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """The turns to summarize, and their format. ``max_tokens`` is the longest summary, by the conversation's tokenizer.

    ``redact`` removes text that the model must not read. ``None``: the model reads everything.
    """

    turns: Sequence[Turn]
    format: Format
    previous: str | None
    max_tokens: int
    template: str | None
    trim: int | None
    redact: Redaction | None = None


@dataclass(frozen=True, slots=True)
class _Material:
    """Parts shared by all requests for one summary. ``sample`` shows the language to write in."""

    request: SummaryRequest
    model: SummaryModel
    previous: str | None
    sample: str | None


async def write(request: SummaryRequest, model: SummaryModel) -> str:
    """Return the text of the summary. Raises ``SummaryFailed`` or ``SummaryRejected``."""
    texts = await asyncio.to_thread(entries, request.turns, request.format, request.redact)
    sizes = await asyncio.to_thread(lambda: [model.count(text) + 2 for text in texts])
    if request.trim is not None:
        texts, sizes = newest(texts, sizes, request.trim, model.count)
    if not texts:
        raise SummaryUnasked("there is nothing to summarize")
    previous = request.previous
    if previous and request.redact is not None:
        previous = await asyncio.to_thread(request.redact, previous)
    sample = await asyncio.to_thread(language_sample, request.turns, request.format, request.redact)
    material = _Material(request, model, previous, sample)
    limit = model.input_limit
    for attempt in (1, 2, 3):
        try:
            return await _write(texts, sizes, material, limit)
        except SummaryTooLong:
            if attempt == 3:
                raise
            # The model accepts less than its known limit, so the next try sends at most half as much.
            limit = min(limit or sum(sizes), sum(sizes)) // 2
    raise AssertionError("unreachable")


async def _write(texts: list[str], sizes: list[int], material: _Material, limit: int | None) -> str:
    request, model = material.request, material.model
    previous_size = model.count(material.previous) if material.previous else 0
    # The summary must be shorter than the text that it replaces.
    source = sum(sizes) + previous_size
    if limit is None:
        return await _ask(texts, source, material, previous=material.previous)
    prompt = (
        _PROMPT_TOKENS + (model.count(material.sample) if material.sample else 0)
        if request.template is None
        else model.count(request.template) + _TEMPLATE_MARGIN
    )
    chunk = int((limit - prompt) * _CAUTION) - previous_size
    if chunk < SMALLEST_CHUNK:
        raise SummaryUnasked("the summary model's window is too small")
    if sum(sizes) <= chunk:
        return await _ask(texts, source, material, previous=material.previous)
    parts = chunks(texts, sizes, chunk, model.count)
    gate = asyncio.Semaphore(PARALLEL)

    async def part(index: int) -> str:
        async with gate:
            return await _ask(parts[index], source, material)

    tasks = [asyncio.ensure_future(part(i)) for i in range(len(parts))]
    try:
        notes = await asyncio.gather(*tasks)
    finally:
        while tasks:  # a failed task refers to this frame: clear the list to avoid a reference cycle
            tasks.pop().cancel()
    if request.redact is not None:
        notes = [await asyncio.to_thread(request.redact, note) for note in notes]
    notes = [f"[notes on part {number}] {fenced(note)}" for number, note in enumerate(notes, start=1)]
    note_sizes = [model.count(note) + 2 for note in notes]
    if sum(note_sizes) > chunk:
        if len(notes) >= len(texts):
            raise SummaryFailed("the summary model's notes do not get shorter")
        return await _write(notes, note_sizes, material, limit)
    return await _ask(notes, source, material, previous=material.previous, merge=True)


async def _ask(
    texts: Sequence[str], source: int, material: _Material, *, previous: str | None = None, merge: bool = False
) -> str:
    request, model, most = material.request, material.model, material.request.max_tokens
    template, sample = request.template, material.sample
    messages = request_messages(
        texts, max_tokens=most, previous=previous, merge=merge, template=template, sample=sample
    )
    written = await model.ask(messages, most)
    transcript = "\n".join([*texts, previous or "", template or ""])
    return await asyncio.to_thread(
        checked, written, transcript=transcript, source_tokens=source, max_tokens=most, count=model.count
    )


def chunks(texts: Sequence[str], sizes: Sequence[int], limit: int, count: TextCounter) -> list[list[str]]:
    """Split the texts into consecutive chunks of up to ``limit`` tokens. A longer text loses its middle."""
    parts: list[list[str]] = [[]]
    taken = 0
    for text, size in zip(texts, sizes, strict=True):
        if size > limit:
            text, size = middle_cut(text, limit, count, _CUT_MARKER), limit
        if taken + size > limit and parts[-1]:
            parts.append([])
            taken = 0
        parts[-1].append(text)
        taken += size
    return parts


def newest(texts: Sequence[str], sizes: Sequence[int], limit: int, count: TextCounter) -> tuple[list[str], list[int]]:
    """Return the newest texts within ``limit`` tokens. If none fits, shorten the last one."""
    first = len(texts)
    left = limit
    while first > 0 and sizes[first - 1] <= left:
        first -= 1
        left -= sizes[first]
    if first == len(texts) and texts:
        return [middle_cut(texts[-1], limit, count, _CUT_MARKER)], [limit]
    return list(texts[first:]), list(sizes[first:])


_OPENING = "(The proxy extracted these notes from the messages without a model. The newest steps are complete.)"


def extract(
    turns: Sequence[Turn],
    previous: str | None,
    max_tokens: int,
    format: Format,
    directives: Sequence[Turn] = (),
) -> str:
    """Return extracts of the assistant's texts, calls, and results within ``max_tokens``, newest first.

    The user's own messages are part of every summary message, so they aren't repeated. ``previous`` is the summary of
    the conversation before ``turns``; it gets up to half of the tokens. ``directives`` are system messages that the
    proxy no longer sends. Their beginnings get up to half of the rest, newest first.
    """
    count = format.text_tokens
    previous = _newest_foreign(turns, format) or previous
    parts = [_OPENING]
    left = max_tokens - count(_OPENING) - 4
    if previous:
        earlier = middle_cut(previous, left // keeps.EXTRACT_DIVISOR, count, "\n[…]\n")
        parts.append(earlier)
        left -= count(earlier) + 2
    lines = (f"- directive: {_start(format.text(turn.raw), keeps.EXTRACT_TEXT)}" for turn in reversed(directives))
    orders: list[str] = []
    share = left // keeps.EXTRACT_DIVISOR
    for line in lines:
        if previous and line in previous:
            continue
        share -= count(line) + 1
        if share < 0:
            break
        orders.append(line)
        left -= count(line) + 1
    parts += reversed(orders)
    kept: list[str] = []
    for turn in reversed(turns):
        line = _line(turn, format)
        if not line:
            continue
        left -= count(line) + 1
        if left < 0:
            break
        kept.append(line)
    return "\n".join([*parts, *reversed(kept)])


def _newest_foreign(turns: Sequence[Turn], format: Format) -> str | None:
    """Return the newest summary that another tool wrote into the turns, or ``None``."""
    found = (format.foreign_summary(turn.raw) for turn in reversed(turns) if turn.facts.kind == "user")
    return next((foreign.summary for foreign in found if foreign is not None), None)


def _line(turn: Turn, format: Format) -> str:
    if turn.facts.kind == "result":
        return f"  → {_start(format.text(turn.raw), keeps.EXTRACT_RESULT)}"
    if turn.facts.kind != "assistant":
        return ""
    lines = []
    text = _start(format.text(turn.raw), keeps.EXTRACT_TEXT)
    if text:
        lines.append(f"- {text}")
    for name, arguments in format.arguments(turn.raw):
        lines.append(f"- called {name}({_start(arguments, keeps.EXTRACT_ARGUMENT)})")
    return "\n".join(lines)


def _start(text: str, characters: int) -> str:
    flat = " ".join(text[: characters * 4].split())
    return flat if len(flat) <= characters else flat[:characters].rsplit(" ", 1)[0] + " …"
