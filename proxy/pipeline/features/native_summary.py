"""Have the conversation's own provider compact the messages before a checkpoint.

The request is the prompt that was last sent, cut at the checkpoint, like one for notes. The result is stored as a
summary. Reasoning in the messages after it stays valid if they directly follow, unchanged. An upstream may refuse a
result of its own. Then the conversation gets summaries of the proxy.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.compaction.render import OutgoingMessage
from proxy.compaction.summary_message import collect_names
from proxy.config.upstreams import COMPACTS
from proxy.dialects.dialect import NativeCompaction
from proxy.dialects.request import Request
from proxy.errors import BadBody, ConfigurationError
from proxy.http.headers import VIA, for_other_request, for_upstream, with_beta
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import CompactionJob, SummaryTask, SummaryWriter, Writing, last_prompt
from proxy.pipeline.response_start import ResponseStart, readable
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.sending import client_query
from proxy.pipeline.summary_models import summary_model
from proxy.store.forgetting import drop
from proxy.summary.chunking import SummaryFailed, SummaryUnasked
from proxy.summary.forms import FORMS
from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.prompt import native_instructions
from proxy.summary.settings import SummarySettings
from proxy.summary.store import NativeResult, StoredSummary

log = structlog.get_logger(__name__)

CONVERSATIONS = 10_000
"""Conversations whose upstream refused a compaction of its own, the most recently used ones."""


class NativeSummaries:
    """The summaries by providers. Remembers which conversations may not have them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._refused: LRUCache[tuple[str, str], tuple[int, str]] = LRUCache(CONVERSATIONS)

    def writer(self, exchange: Exchange) -> NativeWriter | None:
        """Return how the provider compacts a conversation; ``None`` if the policy or the request rules it out."""
        api, route, body = exchange.dialect.native, exchange.route, exchange.body
        if not exchange.caller.policy.section(SummarySettings).native or api is None or self._is_refused(exchange):
            return None
        upstream = exchange.configuration.settings.upstreams[route.upstream]
        stated = exchange.profile.native_compaction
        possible = stated if api.listed else stated is not False
        if not possible or COMPACTS.get(upstream.provider) != exchange.dialect.name:
            return None
        if body.compacted or body.references or not api.accepts(body.raw):
            return None
        caller = exchange.caller.credential
        key = upstream.api_key.get_secret_value() if upstream.api_key else None if caller is None else caller.key
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return NativeWriter(self._runtime, exchange, api, ("native", route.model, digest))

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt with a summary of the proxy in place of the provider's, if the upstream refused that."""
        if not attempt.outcome.summary.native or start.answer.status != 400:
            return None
        if b"compaction" not in await readable(start.answer, start.first):
            return None
        exchange = run.exchange
        messages = len(exchange.body.units)
        self._refused[exchange.conversation] = messages, exchange.mark(messages)
        others = tuple(writer for writer in attempt.input.writers if not isinstance(writer, NativeWriter))
        return await run.attempt(attempt.budget, replace(attempt.input, writers=others, attempt=run.next_number))

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the conversations of forgotten tenants, and return those tenants."""
        return drop(self._refused, forgotten)

    def _is_refused(self, exchange: Exchange) -> bool:
        messages, known = self._refused.get(exchange.conversation, (0, None))
        return known is not None and exchange.mark(messages) == known


class NativeWriter(SummaryWriter):
    """Summaries by the conversation's own provider. ``key`` names the model and the credential that can read them."""

    needs_body = True

    def __init__(self, runtime: Runtime, exchange: Exchange, api: NativeCompaction, key: tuple[str, ...]) -> None:
        self.key = key
        self._runtime = runtime
        self._exchange = exchange
        self._api = api

    async def tries(self, task: SummaryTask) -> Sequence[Writing]:
        """See ``SummaryWriter``."""
        if (body := task.body) is None:
            return ()
        try:
            model = await self._model(task.request.max_tokens)
            work = partial(compact_request, task, body, model, self._api)
            asked = await self._runtime.stores.facts.run(work, *task.job.place)
        except (SummaryUnasked, ConfigurationError, BadBody) as error:
            log.info("summary.not_native", reason=str(error))
            return ()
        return (Writing((model.name, "native"), partial(self._summary, task, model, asked)),)

    async def _model(self, max_tokens: int) -> UpstreamSummaryModel:
        """Return the model to ask. Raises ``ConfigurationError`` or ``SummaryUnasked`` if there is none."""
        exchange, route, dialect, api = self._exchange, self._exchange.route, self._exchange.dialect, self._api
        transport = await exchange.configuration.upstreams.native(route.upstream, dialect.path, exchange.asker)
        if transport is None:
            raise SummaryUnasked("the upstream doesn't have the API of the conversation")
        headers = for_other_request(for_upstream(exchange.scope["headers"]))
        return dataclasses.replace(
            await summary_model(self._runtime, exchange, route, max_tokens, api.read_usage),
            transport=transport,
            form=FORMS[dialect.name],
            others=(),
            headers=with_beta([*headers, (VIA, exchange.via)], api.beta),
            query=client_query(exchange.scope),
            path=api.path,
        )

    async def _summary(self, task: SummaryTask, model: UpstreamSummaryModel, asked: CompactRequest) -> StoredSummary:
        """Return the provider's result as an entry to store. Raises ``SummaryFailed``."""
        case, format, facts = task.job.case, task.job.case.counter.format, self._runtime.stores.facts
        made = self._api.read(await model.compacted(asked.body, asked.tokens, asked.most))
        if made is None:
            raise SummaryFailed("the provider returned no compaction")
        covers: tuple[bytes, ...] = ()
        if format.binds_reasoning == "always":
            turns = await facts.turns([piece.raw for piece in asked.sent], case.counter, case.tenant)
            covers = tuple(turn.facts.digest for turn in turns)

        def entry() -> StoredSummary:
            before = task.previous.found if task.previous else None
            found = collect_names(task.job.body[task.start : task.position], before, format, task.start)
            native = NativeResult(self._api.beta, covers)
            return StoredSummary(made.text, made.unit, found, native=native)

        return await facts.run(entry, *task.job.place)


@dataclass(frozen=True, slots=True)
class CompactRequest:
    """A body that asks an API to compact ``sent``. ``tokens`` is its size, ``most`` its output."""

    body: bytes
    tokens: int
    most: int
    sent: Sequence[OutgoingMessage]


def compact_request(
    task: SummaryTask, body: Request, model: UpstreamSummaryModel, api: NativeCompaction
) -> CompactRequest:
    """Return the request to compact the messages up to a checkpoint.

    Raises ``SummaryUnasked`` if the provider's result can't replace these messages.
    """
    job, max_tokens = task.job, task.request.max_tokens
    if not _replaceable(job, task.position):
        raise SummaryUnasked("a message before the checkpoint must be kept")
    sent = last_prompt(task)
    if not sent:
        raise SummaryUnasked("the last prompt doesn't hold all messages to summarize")
    tokens = job.fixed + sum(piece.tokens for piece in sent)
    if model.input_limit is not None and tokens > model.input_limit:
        raise SummaryUnasked("the messages and their summary don't fit the model")
    raw = body.rewritten(units=[piece.raw for piece in sent], model=model.model if model.model != body.model else None)
    most = output_limit(model.model, max_tokens, model.max_output)
    asked = api.request(raw, native_instructions(max_tokens), most)
    if asked is None:
        raise SummaryUnasked("the request's options rule out compaction by the provider")
    return CompactRequest(asked, tokens, most, sent)


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
    following = body[position].facts.role if position < len(body) else "assistant"  # the answer to this request
    return not bound or body[position - 1].facts.role != following
