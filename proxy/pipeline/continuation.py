"""Have the conversation's own model write notes, in a request that begins like the last one it got.

The provider's prompt cache serves that beginning at a fraction of the price. The request is the prompt that was last
sent, cut at the checkpoint, with one more message that asks for the notes. So the notes cover exactly the messages that
they replace, and the request doesn't wait for the one that is being sent now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from proxy.compaction.render import OutgoingMessage
from proxy.compaction.verify import faults
from proxy.dialects.request import Request, fields_of
from proxy.pipeline.job import CompactionJob, any_trigger, planned
from proxy.summary.chunking import SummaryRequest, SummaryUnasked
from proxy.summary.model import ConversationModel, output_limit
from proxy.summary.prompt import continuation
from proxy.summary.quality import checked, notes_in
from proxy.summary.store import StoredSummary


@dataclass(frozen=True, slots=True)
class NotesRequest:
    """A body that asks for notes.

    ``tokens`` is its size, ``most`` its output, and ``source`` the size of the messages that the notes replace.
    """

    body: bytes
    tokens: int
    most: int
    source: int


async def write(own: ConversationModel, asked: NotesRequest, max_tokens: int) -> str:
    """Return the notes. Raises ``SummaryFailed`` or ``SummaryRejected``."""
    written = await own.model.continued(asked.body, asked.tokens, asked.most)
    return checked(notes_in(written), source_tokens=asked.source, max_tokens=max_tokens, count=own.model.count)


def notes_request(
    job: CompactionJob,
    body: Request,
    own: ConversationModel,
    request: SummaryRequest,
    previous: StoredSummary | None,
    place: tuple[int, int],
) -> NotesRequest:
    """Return the request for notes on the messages up to a checkpoint.

    ``body`` is the job's, and ``place`` the position of the previous summary and that of the checkpoint. Raises
    ``SummaryUnasked`` if the conversation can't be continued.
    """
    start, position = place
    if previous is not None and previous.native:
        raise SummaryUnasked("the conversation begins with a compaction by the provider")
    sent = last_prompt(job, body, previous, start, position)
    if sent is None:
        raise SummaryUnasked("the last prompt doesn't hold all messages to summarize")
    model, format = own.model, job.case.counter.format
    unit = format.summary("user", continuation(request.max_tokens))
    tokens = job.fixed + sum(piece.tokens for piece in sent) + format.tokens(unit)
    if model.input_limit is not None and tokens > model.input_limit:
        raise SummaryUnasked("the conversation and the notes don't fit the model")
    other = model.model if model.model != body.model else None
    raw = body.rewritten(units=[*(piece.raw for piece in sent), unit], model=other)
    if own.with_tool is not None and any(piece.turn is None for piece in sent):
        raw = own.with_tool(raw)
    fields = fields_of(raw)
    most = output_limit(model.model, request.max_tokens, model.max_output)
    if not model.form.continued(fields, model.model, most):
        raise SummaryUnasked("the request prescribes a tool call or the format of its answer")
    source = sum(turn.facts.tokens for turn in request.turns) + (previous.tokens if previous else 0)
    return NotesRequest(msgspec.json.encode(fields), tokens, most, source)


def last_prompt(
    job: CompactionJob, body: Request, previous: StoredSummary | None, start: int, position: int
) -> Sequence[OutgoingMessage] | None:
    """Return the messages of the conversation's last prompt, up to a checkpoint.

    That prompt had all messages before the newest answer. Return ``None`` if it had another summary than ``previous``,
    or if the cut leaves a call without its result.
    """
    end = job.head + position
    newest = max((index for index, turn in enumerate(job.turns) if turn.facts.kind == "assistant"), default=0)
    turns = job.turns[:newest]
    size = job.fixed + sum(turn.facts.tokens for turn in turns)
    pieces = [OutgoingMessage(turn.raw, turn.facts.tokens, turn) for turn in turns]
    case = replace(job.case, body=body)
    if any_trigger(case, size, len(turns)):
        prior = planned(case, turns, job.fixed, size)
        cut, summary = prior.plan.cut, None
        if cut:
            if previous is None or cut != start:
                return None
            summary = OutgoingMessage(previous.message, previous.tokens, None, native=bool(previous.native))
        rendered = prior.render(summary)
        if prior.gains(rendered):
            pieces = rendered.pieces
    places = {id(turn): index for index, turn in enumerate(job.turns)}
    if any(piece.turn is not None and id(piece.turn) not in places for piece in pieces):
        return None  # this prompt was repaired, and the next one isn't
    kept = [piece for piece in pieces if piece.turn is None or places[id(piece.turn)] < end]
    kept += [OutgoingMessage(turn.raw, turn.facts.tokens, turn) for turn in job.turns[newest:end]]
    return None if faults([piece.turn.facts for piece in kept if piece.turn]) else kept
