"""From a stretch of conversation to the text of its summary, whatever the size of the stretch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.compaction.message import TextCounter, Turn
from proxy.compaction.shorten import middle_cut
from proxy.summary.prompt import request_messages
from proxy.summary.quality import Written, checked
from proxy.summary.redaction import Redaction
from proxy.summary.transcript import entries, fenced, language_sample

PARALLEL = 4
"""Chunks of one conversation that are summarised at the same time."""

SMALLEST_CHUNK = 500
"""A summary model with less room than this, in tokens, cannot be asked."""

# The wording of the prompt, and a margin for a tokenizer that counts a little differently.
_PROMPT_TOKENS = 600
_TEMPLATE_MARGIN = 100
_CAUTION = 0.9

_CUT_MARKER = "\n[… {tokens} tokens left out …]\n"


class SummaryFailed(Exception):
    """No summary could be had from the model; the message says why, without quoting any content."""


class SummaryTooLong(SummaryFailed):
    """The model refused the request as too long for it."""


class SummaryUnasked(SummaryFailed):
    """Nothing was asked, for a reason that says nothing of the model's health."""


class SummaryModel(Protocol):
    """A model that can be asked. ``room`` is what its input may take, in tokens; ``None``: nobody knows."""

    room: int | None
    count: TextCounter

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """Raises ``SummaryFailed``."""
        ...


@dataclass(frozen=True, slots=True)
class SummaryRequest:
    """What is to be summarised, and how long the summary may be, in tokens of the conversation's model.

    ``redact`` is what the model may not read; ``None``: it may read everything.
    """

    turns: Sequence[Turn]
    previous: str | None
    max_tokens: int
    template: str | None
    trim: int | None
    redact: Redaction | None = None


@dataclass(frozen=True, slots=True)
class _Material:
    """What every request for one summary has in common. ``sample`` is of the language to write in."""

    wish: SummaryRequest
    model: SummaryModel
    previous: str | None
    sample: str | None


async def write(wish: SummaryRequest, model: SummaryModel) -> str:
    """The text of the summary. Raises ``SummaryFailed`` or ``SummaryRejected``."""
    texts = await asyncio.to_thread(entries, wish.turns, wish.redact)
    sizes = await asyncio.to_thread(lambda: [model.count(text) + 2 for text in texts])
    if wish.trim is not None:
        texts, sizes = newest(texts, sizes, wish.trim, model.count)
    if not texts:
        raise SummaryUnasked("there is nothing to summarise")
    previous = wish.previous
    if previous and wish.redact is not None:
        previous = await asyncio.to_thread(wish.redact, previous)
    sample = await asyncio.to_thread(language_sample, wish.turns, wish.redact)
    material = _Material(wish, model, previous, sample)
    room = model.room
    for attempt in (1, 2, 3):
        try:
            return await _write(texts, sizes, material, room)
        except SummaryTooLong:
            if attempt == 3:
                raise
            # The model takes less than was known: half of what was sent at most is tried next.
            room = min(room or sum(sizes), sum(sizes)) // 2
    raise AssertionError("unreachable")


async def _write(texts: list[str], sizes: list[int], material: _Material, room: int | None) -> str:
    wish, model = material.wish, material.model
    previous_size = model.count(material.previous) if material.previous else 0
    # What the summary will stand for, and so must be shorter than.
    source = sum(sizes) + previous_size
    if room is None:
        return await _ask(texts, source, material, previous=material.previous)
    prompt = (
        _PROMPT_TOKENS + (model.count(material.sample) if material.sample else 0)
        if wish.template is None
        else model.count(wish.template) + _TEMPLATE_MARGIN
    )
    chunk = int((room - prompt) * _CAUTION) - previous_size
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
        while tasks:  # a task knows its failure, and that knows this call
            tasks.pop().cancel()
    if wish.redact is not None:
        notes = [await asyncio.to_thread(wish.redact, note) for note in notes]
    notes = [f"[notes on part {number}] {fenced(note)}" for number, note in enumerate(notes, start=1)]
    note_sizes = [model.count(note) + 2 for note in notes]
    if sum(note_sizes) > chunk:
        if len(notes) >= len(texts):
            raise SummaryFailed("the summary model's notes do not get shorter")
        return await _write(notes, note_sizes, material, room)
    return await _ask(notes, source, material, previous=material.previous, merge=True)


async def _ask(
    texts: Sequence[str],
    source: int,
    material: _Material,
    *,
    previous: str | None = None,
    merge: bool = False,
) -> str:
    wish, model = material.wish, material.model
    messages = request_messages(
        texts,
        max_tokens=wish.max_tokens,
        previous=previous,
        merge=merge,
        template=wish.template,
        sample=material.sample,
    )
    written = await model.ask(messages, wish.max_tokens)
    return checked(written, source_tokens=source, max_tokens=wish.max_tokens, count=model.count)


def chunks(texts: Sequence[str], sizes: Sequence[int], limit: int, count: TextCounter) -> list[list[str]]:
    """The texts in consecutive chunks of ``limit`` tokens at most; a single longer text has its middle left out."""
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
    """The newest texts within ``limit`` tokens; the last one shortened rather than nothing at all."""
    first = len(texts)
    left = limit
    while first > 0 and sizes[first - 1] <= left:
        first -= 1
        left -= sizes[first]
    if first == len(texts) and texts:
        return [middle_cut(texts[-1], limit, count, _CUT_MARKER)], [limit]
    return list(texts[first:]), list(sizes[first:])
