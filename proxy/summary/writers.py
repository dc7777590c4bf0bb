"""The writers of summaries: from a transcript, or in the conversation itself.

A transcript goes to any model, in chunks if it exceeds the model's window. Notes are written by the conversation's own
model, in a request that begins like the last one it got. The provider's prompt cache serves that beginning at a
fraction of the price. The request is the prompt that was last sent, cut at the checkpoint, with one more message that
asks for the notes. So the notes cover exactly the messages that they replace, and the request doesn't wait for the one
that is being sent now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from proxy.compaction.format import TextCounter
from proxy.compaction.shorten import middle_cut
from proxy.dialects.request import Request, fields_of
from proxy.errors import BadBody, ConfigurationError
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.prompt import continuation, entries, fenced, language_sample, request_messages
from proxy.summary.quality import SummaryFailed, SummaryTooLong, SummaryUnasked, checked, notes_in
from proxy.summary.writer import SummaryModels, SummaryTask, SummaryTry, SummaryWriter

log = structlog.get_logger(__name__)

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
    if (most := task.settings.trim_tokens_to_summarize) is not None:
        texts, sizes = newest(texts, sizes, most, model.count)
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
        if (template := task.settings.prompt) is not None:
            prompt = count(template) + _TEMPLATE_MARGIN
        else:
            prompt = _PROMPT_TOKENS + (count(self.sample) if self.sample else 0)
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
        model, template, most = self.model, self.task.settings.prompt, self.task.max_tokens
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


class NotesRequest(NamedTuple):
    """A body that asks for notes.

    ``tokens`` is its size, ``most`` its output, and ``source`` the size of the messages that the notes replace.
    """

    body: bytes
    tokens: int
    most: int
    source: int


class NotesWriter(SummaryWriter):
    """Notes by the conversation's own model. Only with ``whole``, also if the cache doesn't have their prompt."""

    whole = False

    @property
    def available(self) -> bool:
        return self.models.may_continue

    @property
    def needs_body(self) -> bool:
        return self.models.may_continue

    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        """See ``SummaryWriter``. Failures here say nothing about transcripts: a model may insist on calling a tool."""
        if task.body is None or task.in_thread is None:
            return ()
        try:
            model = await self.models.for_continuation(task.max_tokens)
            asked = await task.in_thread(partial(_notes_request, task, task.body, model, self.models, self.whole))
        except (SummaryUnasked, ConfigurationError, BadBody) as error:
            log.info("summary.not_continued", reason=str(error))
            return ()
        return (SummaryTry((model.name, "continue"), partial(_noted, model, asked, task.max_tokens)),)


class NotesAfterRefusal(NotesWriter):
    """Notes if the upstream refuses transcripts. A login's token may work only with the prompt of its agent."""

    whole = True

    @property
    def available(self) -> bool:
        return self.models.refuses_transcripts

    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        if self.models.refuses_transcripts or not self.models.may_continue:
            return await super().tries(task)
        return (SummaryTry((self.models.own, "continue"), partial(self._write, task), after_refusal=True),)

    async def _write(self, task: SummaryTask) -> str:
        for _, write, _ in await super().tries(task):
            text = await write()
            self.models.refused_transcript()
            return text
        raise SummaryUnasked("the conversation can't be continued")


async def _noted(model: UpstreamSummaryModel, asked: NotesRequest, max_tokens: int) -> str:
    """Return the notes. Raises ``SummaryFailed`` or ``SummaryRejected``."""
    written = await model.continued(asked.body, asked.tokens, asked.most)
    return checked(
        notes_in(written), transcript="", source_tokens=asked.source, max_tokens=max_tokens, count=model.count
    )


def _notes_request(
    task: SummaryTask, body: Request, model: UpstreamSummaryModel, models: SummaryModels, whole: bool
) -> NotesRequest:
    """Return the request for notes on the messages up to a checkpoint.

    Raises ``SummaryUnasked`` if the conversation can't be continued.
    """
    sent = task.last_prompt() or (task.whole_prompt() if whole else None)
    if sent is None:
        raise SummaryUnasked("the last prompt doesn't hold all messages to summarize")
    unit = task.format.summary("user", continuation(task.max_tokens))
    tokens = task.fixed + sum(piece.tokens for piece in sent) + task.format.tokens(unit)
    if model.input_limit is not None and tokens > model.input_limit:
        raise SummaryUnasked("the conversation and the notes don't fit the model")
    other = model.model if model.model != body.model else None
    raw = body.rewritten(units=[*(piece.raw for piece in sent), unit], model=other)
    if any(piece.turn is None for piece in sent):
        raw = models.with_tool(raw)
    fields = fields_of(raw)
    most = output_limit(model.model, task.max_tokens, model.max_output)
    if not model.form.continued(fields, model.model, most):
        raise SummaryUnasked("the request prescribes a tool call or the format of its answer")
    source = sum(turn.facts.tokens for turn in task.turns) + sum(piece.tokens for piece in sent if not piece.turn)
    return NotesRequest(msgspec.json.encode(fields), tokens, most, source)
