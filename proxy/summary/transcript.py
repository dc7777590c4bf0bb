"""Have a model write a summary from a transcript of the conversation, in chunks if it exceeds the model's window."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from proxy.compaction.format import TextCounter
from proxy.compaction.shorten import middle_cut
from proxy.summary.model import UpstreamSummaryModel
from proxy.summary.prompt import entries, fenced, language_sample, request_messages
from proxy.summary.quality import checked
from proxy.summary.writer import SummaryFailed, SummaryTask, SummaryTooLong, SummaryTry, SummaryUnasked, SummaryWriter

PARALLEL = 4  # chunks of one conversation that the proxy summarizes concurrently
SMALLEST_CHUNK = 500  # Smallest usable chunk, in tokens. The proxy doesn't call a summary model with a smaller window.

# Tokens of the prompt's wording, and a margin for tokenizers that count slightly differently.
_PROMPT_TOKENS = 600
_TEMPLATE_MARGIN = 100
_CAUTION = 0.9

_CUT_MARKER = "\n[… {tokens} tokens left out …]\n"


class TranscriptWriter(SummaryWriter):
    """Summaries of transcripts. Each model is one try."""

    @property
    def available(self) -> bool:
        return self.models.any_for_transcript

    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        models = await self.models.for_transcript(task.max_tokens)
        return [SummaryTry((model.name,), partial(write, task, model)) for model in models]


async def write(task: SummaryTask, model: UpstreamSummaryModel) -> str:
    """Return the text of the summary. Raises ``SummaryFailed`` or ``SummaryRejected``."""
    transcript, texts, sizes = await asyncio.to_thread(_prepared, task, model)
    if not texts:
        raise SummaryUnasked("there is nothing to summarize")
    limit = model.input_limit
    for attempt in (1, 2, 3):
        try:
            return await transcript.summary(texts, sizes, limit)
        except SummaryTooLong:
            if attempt == 3:
                raise
            # The model accepts less than its known limit, so the next try sends at most half as much.
            limit = min(limit or sum(sizes), sum(sizes)) // 2
    raise AssertionError("unreachable")


def _prepared(task: SummaryTask, model: UpstreamSummaryModel) -> tuple[_Transcript, list[str], list[int]]:
    """Return what all requests share, and the entries of the transcript, each with its tokens."""
    texts, sizes = list[str](), list[int]()
    for turn, text in entries(task.turns, task.format, task.redact):
        texts.append(text)
        sizes.append(task.format.counted(turn, text, model.count) + 2)
    if task.trim is not None:
        texts, sizes = newest(texts, sizes, task.trim, model.count)
    if task.previous and task.redact is not None:
        task = replace(task, previous=task.redact(task.previous))
    return _Transcript(task, model, language_sample(task.turns, task.format, task.redact)), texts, sizes


@dataclass(frozen=True, slots=True)
class _Transcript:
    """The parts that all requests for one summary share. ``sample`` shows the language to write in."""

    task: SummaryTask
    model: UpstreamSummaryModel
    sample: str | None

    async def summary(self, texts: list[str], sizes: list[int], limit: int | None) -> str:
        """Return the summary of texts of these sizes. ``limit`` is the most tokens of a request, if that's known."""
        task, count = self.task, self.model.count
        previous_size = count(task.previous) if task.previous else 0
        # The summary must be shorter than the text that it replaces.
        source = sum(sizes) + previous_size
        if limit is None:
            return await self._ask(texts, source, previous=task.previous)
        prompt = (
            _PROMPT_TOKENS + (count(self.sample) if self.sample else 0)
            if task.template is None
            else count(task.template) + _TEMPLATE_MARGIN
        )
        chunk = int((limit - prompt) * _CAUTION) - previous_size
        if chunk < SMALLEST_CHUNK:
            raise SummaryUnasked("the summary model's window is too small")
        if sum(sizes) <= chunk:
            return await self._ask(texts, source, previous=task.previous)
        notes = await self._notes(chunks(texts, sizes, chunk, count), source)
        note_sizes = [count(note) + 2 for note in notes]
        if sum(note_sizes) <= chunk:
            return await self._ask(notes, source, previous=task.previous, merge=True)
        if len(notes) >= len(texts):
            raise SummaryFailed("the summary model's notes do not get shorter")
        return await self.summary(notes, note_sizes, limit)

    async def _notes(self, parts: Sequence[Sequence[str]], source: int) -> list[str]:
        """Return the model's notes on each part."""
        gate = asyncio.Semaphore(PARALLEL)

        async def noted(part: Sequence[str]) -> str:
            async with gate:
                return await self._ask(part, source)

        tasks = [asyncio.ensure_future(noted(part)) for part in parts]
        try:
            notes = await asyncio.gather(*tasks)
        finally:
            while tasks:  # a failed task refers to this frame: clear the list to avoid a reference cycle
                tasks.pop().cancel()
        if (redact := self.task.redact) is not None:
            notes = [await asyncio.to_thread(redact, note) for note in notes]
        return [f"[notes on part {number}] {fenced(note)}" for number, note in enumerate(notes, start=1)]

    async def _ask(self, texts: Sequence[str], source: int, *, previous: str | None = None, merge: bool = False) -> str:
        model, template, most = self.model, self.task.template, self.task.max_tokens
        messages = request_messages(
            texts, max_tokens=most, previous=previous, merge=merge, template=template, sample=self.sample
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
