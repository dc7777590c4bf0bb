"""Have the conversation's own model write notes, in a request that begins like the last one it got.

The provider's prompt cache serves that beginning at a fraction of the price. The request is the prompt that was last
sent, cut at the checkpoint, with one more message that asks for the notes. So the notes cover exactly the messages that
they replace, and the request doesn't wait for the one that is being sent now.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from proxy.dialects.request import Request, fields_of
from proxy.errors import BadBody, ConfigurationError
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.prompt import continuation
from proxy.summary.quality import checked, notes_in
from proxy.summary.writer import SummaryModels, SummaryTask, SummaryTry, SummaryUnasked, SummaryWriter

log = structlog.get_logger(__name__)


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
        return (SummaryTry((model.name, "continue"), partial(_write, model, asked, task.max_tokens)),)


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


async def _write(model: UpstreamSummaryModel, asked: NotesRequest, max_tokens: int) -> str:
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
