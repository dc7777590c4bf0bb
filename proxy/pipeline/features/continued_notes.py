"""Have the conversation's own model write notes, in a request that begins like the last one it got.

The provider's prompt cache serves that beginning at a fraction of the price. The request is the prompt that was last
sent, cut at the checkpoint, with one more message that asks for the notes. So the notes cover exactly the messages that
they replace, and the request doesn't wait for the one that is being sent now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from proxy.dialects.request import Request, fields_of
from proxy.errors import BadBody, ConfigurationError
from proxy.http.headers import VIA, for_other_request, for_upstream
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import SummaryTask, SummaryWriter, Writing, last_prompt
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.sending import client_query
from proxy.pipeline.summary_models import summary_model
from proxy.summary.chunking import SummaryUnasked
from proxy.summary.forms import FORMS
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.prompt import continuation
from proxy.summary.quality import checked, notes_in
from proxy.summary.settings import SummarySettings

log = structlog.get_logger(__name__)

WithTool = Callable[[bytes], bytes]
"""Returns a body with the tool to read archived messages."""


@dataclass(frozen=True, slots=True)
class NotesRequest:
    """A body that asks for notes.

    ``tokens`` is its size, ``most`` its output, and ``source`` the size of the messages that the notes replace.
    """

    body: bytes
    tokens: int
    most: int
    source: int


class NotesWriter(SummaryWriter):
    """Notes by the conversation's own model."""

    needs_body = True

    def __init__(
        self, runtime: Runtime, exchange: Exchange, with_tool: Callable[[], WithTool | None] = lambda: None
    ) -> None:
        """``with_tool`` returns how the conversation's requests get a tool of the proxy; ``None`` if they don't."""
        self._runtime = runtime
        self._exchange = exchange
        self._with_tool = with_tool

    async def tries(self, task: SummaryTask) -> Sequence[Writing]:
        """See ``SummaryWriter``. Failures here say nothing about transcripts: a model may insist on calling a tool."""
        if (body := task.body) is None:
            return ()
        most = task.request.max_tokens
        try:
            model, with_tool = await self._model(most), self._with_tool()
            work = partial(notes_request, task, body, model, with_tool)
            notes = await self._runtime.stores.facts.run(work, *task.job.place)
        except (SummaryUnasked, ConfigurationError, BadBody) as error:
            log.info("summary.not_continued", reason=str(error))
            return ()
        return (Writing((model.name, "continue"), partial(_write, model, notes, most)),)

    async def _model(self, max_tokens: int) -> UpstreamSummaryModel:
        """Return the conversation's own model. Raises ``ConfigurationError`` if its upstream can't be used."""
        exchange, route, dialect = self._exchange, self._exchange.route, self._exchange.dialect
        upstreams = exchange.configuration.upstreams
        headers = for_other_request(for_upstream(exchange.scope["headers"]))
        return dataclasses.replace(
            await summary_model(self._runtime, exchange, route, max_tokens, dialect.answers.read_usage),
            transport=await upstreams.transport(route.upstream, dialect.path, exchange.asker),
            form=FORMS[dialect.name],
            others=(),
            headers=[*headers, (VIA, exchange.via)],
            query=client_query(exchange.scope),
        )


def may_continue(exchange: Exchange) -> bool:
    """Return whether the policy has the conversation's own model write notes, and its API and the request allow it."""
    continues = exchange.caller.policy.section(SummarySettings).method == "continue"
    return (
        continues
        and exchange.dialect.name in FORMS
        and not exchange.body.references
        and not exchange.profile.strict_alternation
    )


async def _write(model: UpstreamSummaryModel, asked: NotesRequest, max_tokens: int) -> str:
    """Return the notes. Raises ``SummaryFailed`` or ``SummaryRejected``."""
    written = await model.continued(asked.body, asked.tokens, asked.most)
    return checked(
        notes_in(written), transcript="", source_tokens=asked.source, max_tokens=max_tokens, count=model.count
    )


def notes_request(
    task: SummaryTask, body: Request, model: UpstreamSummaryModel, with_tool: WithTool | None
) -> NotesRequest:
    """Return the request for notes on the messages up to a checkpoint.

    Raises ``SummaryUnasked`` if the conversation can't be continued.
    """
    job, request = task.job, task.request
    sent = last_prompt(task)
    if sent is None:
        raise SummaryUnasked("the last prompt doesn't hold all messages to summarize")
    format = job.case.counter.format
    unit = format.summary("user", continuation(request.max_tokens))
    tokens = job.fixed + sum(piece.tokens for piece in sent) + format.tokens(unit)
    if model.input_limit is not None and tokens > model.input_limit:
        raise SummaryUnasked("the conversation and the notes don't fit the model")
    other = model.model if model.model != body.model else None
    raw = body.rewritten(units=[*(piece.raw for piece in sent), unit], model=other)
    if with_tool is not None and any(piece.turn is None for piece in sent):
        raw = with_tool(raw)
    fields = fields_of(raw)
    most = output_limit(model.model, request.max_tokens, model.max_output)
    if not model.form.continued(fields, model.model, most):
        raise SummaryUnasked("the request prescribes a tool call or the format of its answer")
    source = sum(turn.facts.tokens for turn in request.turns) + sum(piece.tokens for piece in sent if not piece.turn)
    return NotesRequest(msgspec.json.encode(fields), tokens, most, source)
