"""Let the model read archived messages through a tool that the client never sees.

The proxy adds the tool to a compacted request, answers its calls, and continues the response. When the client sends the
conversation again, the proxy puts the hidden rounds back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog
from cachetools import TTLCache

from proxy.compaction.turn import Turn
from proxy.dialects.hidden_tool import HiddenRound, HiddenTool
from proxy.pipeline.context import ConversationContext, RecallState, conversation_key
from proxy.pipeline.decision import Attempt
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.recall_rounds import RecallRounds, Resend, Room
from proxy.pipeline.response_start import ResponseStart, is_encoded
from proxy.recall.rounds import HiddenRounds, prefixes
from proxy.recall.tool import DESCRIPTION, NAME, PARAMETERS, Reader
from proxy.store.tenants import UNSTORED_TENANT

log = structlog.get_logger(__name__)

REFUSED_SECONDS = 3_600.0
"""Seconds for which a model gets no tool after its upstream refused a request with it."""

REFUSALS = frozenset({400, 404, 415, 422, 501})
"""Statuses with which servers refuse a tool."""

MODELS = 1_000
"""Models that refused the tool and are remembered."""

Turns = Callable[[], Awaitable[Sequence[Turn]]]


class Recall:
    """The hidden tool, for the requests of one process."""

    def __init__(self, reader: Reader, rounds: HiddenRounds) -> None:
        self._reader = reader
        self._rounds = rounds
        self._refusing: TTLCache[tuple[str, str], bool] = TTLCache(MODELS, REFUSED_SECONDS)

    async def prepare(self, context: ConversationContext, turns: Turns) -> None:
        """Decide whether a request may get the tool, and put back the rounds that its client didn't see.

        ``turns`` returns the units of the conversation with their facts.
        """
        hidden, counter, policy = context.dialect.hidden_tool, context.counter, context.caller.policy
        if hidden is None or counter is None or policy.recall.tool == "off" or policy.archive is None:
            return
        if policy.summary.native and context.dialect.native is not None:
            return  # the provider's own block is valid with the client's tools only
        body = context.body
        if context.caller.tenant == UNSTORED_TENANT or not context.caller.kept or not body.units or body.references:
            return
        if (context.route.upstream, context.route.model) in self._refusing or not hidden.accepts(body.raw, NAME):
            return
        conversation, units = conversation_key(context), await turns()
        answers = [place for place, turn in enumerate(units) if turn.facts.kind == "assistant"]
        rounds = await self._rounds.of(conversation, answers) if answers else []
        chain = prefixes([turn.facts.digest for turn in units])
        restored, used = _restored(hidden, units, rounds, chain)
        tool = hidden.definition(body.raw, NAME, DESCRIPTION, PARAMETERS)
        tokens = counter.text(tool.decode())
        context.recall = RecallState(body, conversation, used, chain[-1], len(units), tool, tokens)
        if used:
            context.body = await context.dialect.parse(body.rewritten(units=restored))
            await context.memory.more(context.body.size)

    def refused(self, context: ConversationContext, outcome: Outcome, start: ResponseStart) -> bool:
        """Return whether an upstream refused a request that may be valid without the tool, and remember it."""
        if not outcome.tool or start.answer.status not in REFUSALS or start.overflow is not None:
            return False
        self._refusing[context.route.upstream, context.route.model] = True
        log.warning("recall.refused", status=start.answer.status)
        return True

    async def response(
        self, context: ConversationContext, start: ResponseStart, attempt: Attempt, sent: bytes, resend: Resend
    ) -> ResponseStart:
        """Return a response without the tool's calls. It continues after them. ``sent`` is the request's body."""
        state, hidden, outcome = context.recall, context.dialect.hidden_tool, attempt.outcome
        if state is None or hidden is None or not outcome.tool:
            return start
        if start.answer.status != 200 or is_encoded(start.answer):
            return start
        self._rounds.answered(state.conversation, state.messages, state.rounds)
        settings = context.caller.policy.recall
        room = Room(settings.max_tokens * (settings.max_rounds + 1), settings.max_tokens)
        if attempt.case.budget is not None and outcome.after is not None:
            room = room.within(attempt.case.budget, outcome.after)
        rounds = RecallRounds(context, state, hidden, self._rounds, self._reader, outcome.archive, room, sent, resend)
        return rounds.stream(start) if start.is_stream else await rounds.whole(start)


def _restored(
    hidden: HiddenTool, turns: Sequence[Turn], rounds: Sequence[HiddenRound], chain: Sequence[str]
) -> tuple[list[bytes], list[HiddenRound]]:
    """Return the units with their hidden rounds, and these rounds."""
    known = {round.prefix: round for round in rounds}
    restored: list[bytes] = []
    used = []
    for turn, prefix in zip(turns, chain, strict=False):
        round = known.get(prefix)
        if round is None or not _is_seen(hidden.visible(bytes(turn.raw)), round):
            restored.append(turn.raw)  # the same object, because an API may split and join its messages
            continue
        used.append(round)
        restored += [*round.before, hidden.restored(bytes(turn.raw), round), *round.results]
    return restored, used


def _is_seen(visible: tuple[str, list[str]] | None, round: HiddenRound) -> bool:
    """Return whether a message is what the client saw of a round. Some clients trim its text."""
    return visible is not None and visible[0].strip() == round.text.strip() and visible[1] == round.calls
