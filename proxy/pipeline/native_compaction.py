"""Have the conversation's own provider compact the messages before a checkpoint.

The request is the prompt that was last sent, cut at the checkpoint, like one for notes in ``continuation``. The result
is stored as a summary. Reasoning in the messages after it stays valid if they directly follow, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.compaction.render import OutgoingMessage
from proxy.compaction.summary_message import collect_identifiers
from proxy.dialects.dialect import NativeCompaction
from proxy.dialects.request import Request
from proxy.pipeline.continuation import last_prompt
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionJob
from proxy.summary.chunking import SummaryFailed, SummaryUnasked
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.prompt import native_instructions
from proxy.summary.store import NativeResult, StoredSummary


@dataclass(frozen=True, slots=True)
class CompactRequest:
    """A body that asks an API to compact ``sent``. ``tokens`` is its size, ``most`` its output."""

    api: NativeCompaction
    body: bytes
    tokens: int
    most: int
    sent: Sequence[OutgoingMessage]


def compact_request(
    job: CompactionJob,
    body: Request,
    model: UpstreamSummaryModel,
    max_tokens: int,
    previous: StoredSummary | None,
    place: tuple[int, int],
) -> CompactRequest:
    """Return the request to compact the messages up to a checkpoint.

    ``body`` is the job's, and ``place`` the position of the previous summary and that of the checkpoint. Raises
    ``SummaryUnasked`` if the provider's result can't replace these messages.
    """
    start, position = place
    if job.case.native is None or not _replaceable(job, position):
        raise SummaryUnasked("a message before the checkpoint must be kept")
    sent = last_prompt(job, body, previous, start, position)
    if not sent:
        raise SummaryUnasked("the last prompt doesn't hold all messages to summarize")
    tokens = job.fixed + sum(piece.tokens for piece in sent)
    if model.input_limit is not None and tokens > model.input_limit:
        raise SummaryUnasked("the messages and their summary don't fit the model")
    raw = body.rewritten(units=[piece.raw for piece in sent], model=model.model if model.model != body.model else None)
    most = output_limit(model.model, max_tokens, model.max_output)
    api = job.case.native.api
    asked = api.request(raw, native_instructions(max_tokens), most)
    if asked is None:
        raise SummaryUnasked("the request's options rule out compaction by the provider")
    return CompactRequest(api, asked, tokens, most, sent)


def _replaceable(job: CompactionJob, position: int) -> bool:
    """Return whether the provider's result may replace all messages up to a position.

    Nothing may come before the result, or between it and the next message. If reasoning is bound to its prompt, that
    message must have another role than the one before, because the API would join them.
    """
    body = job.body
    if job.head or any(index < position for index in job.plan.pinned):
        return False
    if any(turn.facts.kind == "system" for turn in body[:position]):
        return False
    bound = job.case.counter.format.binds_reasoning == "always"
    return not bound or body[position - 1].facts.role != body[position].facts.role


async def native_summary(
    facts: FactsCache,
    job: CompactionJob,
    model: UpstreamSummaryModel,
    asked: CompactRequest,
    previous: StoredSummary | None,
    place: tuple[int, int],
) -> StoredSummary:
    """Return the provider's result as an entry to store. Raises ``SummaryFailed``."""
    start, position = place
    case, format = job.case, job.case.counter.format
    answer = await model.compacted(asked.body, asked.tokens, asked.most)
    made = asked.api.read(answer)
    if made is None:
        raise SummaryFailed("the provider returned no compaction")
    covers: tuple[bytes, ...] = ()
    if format.binds_reasoning == "always":
        turns = await facts.turns([piece.raw for piece in asked.sent], case.counter, case.tenant)
        covers = tuple(turn.facts.digest for turn in turns)

    def entry() -> StoredSummary:
        found = collect_identifiers(job.body[start:position], previous.found if previous else None, format)
        native = NativeResult(asked.api.beta, covers)
        return StoredSummary(made.text, made.unit, format.tokens(made.unit), found, native=native)

    return await facts.run(entry)
