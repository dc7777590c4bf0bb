"""Let the model read archived messages through a tool that the client never sees.

The proxy adds the tool to a compacted request, answers its calls, and continues the response. When the client sends the
conversation again, the proxy puts the hidden rounds back.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import structlog
import xxhash
from cachetools import TTLCache

from proxy.compaction.turn import Turn
from proxy.dialects.rounds import HiddenRound, HiddenTool
from proxy.pipeline.context import ConversationContext, RecallState
from proxy.pipeline.decision import Attempt
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.recall_rounds import RecallRounds, Resend, Room
from proxy.pipeline.response_start import ResponseStart, is_encoded
from proxy.pipeline.sending import REFUSALS
from proxy.recall.rounds import HiddenRounds, prefixes
from proxy.recall.tool import DESCRIPTION, NAME, PARAMETERS, TOKENS, Reader
from proxy.store.tenants import UNSTORED_TENANT

log = structlog.get_logger(__name__)

REFUSED_SECONDS = 3_600.0
"""Seconds for which a model gets no tool after its upstream refused a request with it."""

MODELS = 10_000
"""Models of tenants that refused the tool and are remembered."""

Turns = Callable[[], Awaitable[Sequence[Turn]]]


class Recall:
    """The hidden tool, for the requests of one process."""

    def __init__(self, reader: Reader, rounds: HiddenRounds) -> None:
        self._reader = reader
        self._rounds = rounds
        self._refusing: TTLCache[tuple[str, str, str], bool] = TTLCache(MODELS, REFUSED_SECONDS)

    async def prepare(self, context: ConversationContext, turns: Turns) -> None:
        """Decide whether a request may get the tool, and put back the rounds that its client didn't see.

        A request that can't get the tool, such as one with another ``tool_choice``, gets its rounds back, too.
        ``turns`` returns the units of the conversation with their facts.
        """
        hidden, counter, body = context.dialect.hidden_tool, context.counter, context.body
        if hidden is None or counter is None or not reserved(context) or body.references or body.continues:
            return
        if context.place in self._refusing:
            return
        offered, units = hidden.accepts(body.raw, NAME), await turns()
        if not offered and not _may_have_calls(hidden.tool_names(body.raw), units):
            return
        answers = [place for place, turn in enumerate(units) if turn.facts.kind == "assistant"]
        chain = prefixes([turn.facts.digest for turn in units])
        conversation = _key(context, chain[answers[0] + 1] if answers else chain[-1])
        rounds = await self._rounds.of(conversation, answers) if answers else []
        restored, found = _restored(hidden, units, rounds, chain)
        if not offered and not found:
            return
        tool = hidden.definition(body.raw, NAME, DESCRIPTION, PARAMETERS) if offered else b""
        tokens = counter.text(tool.decode())
        context.recall = RecallState(body, conversation, rounds, found, chain[-1], len(units), tool, tokens)
        if found:
            context.body = await context.dialect.parse(body.rewritten(units=restored))
            await context.memory.more(context.body.size)

    def refused(self, context: ConversationContext, outcome: Outcome, start: ResponseStart) -> bool:
        """Return whether to send a request again without the tool, and remember it.

        The upstream refused the request, which may be valid without the tool. Or it compressed the response unasked, so
        the calls in it can't be read.
        """
        status = start.answer.status
        if status == 200:
            refused = outcome.tool and is_encoded(start.answer)
        else:
            refused = status in REFUSALS and start.overflow is None
        if not refused:
            return False
        if not outcome.tool:
            if context.recall is not None and context.recall.tool and not context.recall.found:
                self._refusing.pop(context.place, None)  # it refuses the request without the tool, too
            return False
        self._refusing[context.place] = True
        log.warning("recall.refused", status=status)
        return True

    async def response(
        self, context: ConversationContext, start: ResponseStart, attempt: Attempt, sent: bytes, resend: Resend
    ) -> ResponseStart:
        """Return a response without the tool's calls. It continues after them. ``sent`` is the request's body."""
        state, hidden, outcome = context.recall, context.dialect.hidden_tool, attempt.outcome
        if state is None or hidden is None or start.answer.status != 200:
            return start
        self._rounds.answered(state.conversation, state.messages, state.rounds)
        if not outcome.tool:
            return start
        settings = context.caller.policy.recall
        room = Room(settings.max_tokens * (settings.max_rounds + 1), settings.max_tokens)
        if attempt.case.budget is not None and outcome.after is not None:
            room = room.within(attempt.case.budget, outcome.after)
        archive = self._reader.conversation(context.caller.tenant, outcome.archive)
        rounds = RecallRounds(context, state, hidden, self._rounds, archive, room, sent, resend)
        return rounds.stream(start) if start.is_stream else await rounds.whole(start)


def reserved(context: ConversationContext) -> int:
    """Return the tokens that every prompt of a policy leaves free for the tool.

    Requests with and without the tool have the same room, so that they share their summaries.
    """
    policy, counter = context.caller.policy, context.counter
    if policy.recall.tool == "off" or policy.archive is None or counter is None or context.dialect.hidden_tool is None:
        return 0
    if policy.summary.native and context.dialect.native is not None:
        return 0  # the provider's own block is valid with the client's tools only
    if context.caller.tenant == UNSTORED_TENANT or not context.caller.kept or not context.body.units:
        return 0
    return math.ceil(TOKENS * counter.profile.token_ratio)


def _key(context: ConversationContext, beginning: str) -> tuple[str, str]:
    """Return the tenant, and a digest of the conversation's messages up to the first answer."""
    upstream, model, tenant = context.place
    return tenant, xxhash.xxh3_128_hexdigest("\0".join((upstream, model, beginning)).encode())


def _may_have_calls(tools: Sequence[str], turns: Sequence[Turn]) -> bool:
    """Return whether hidden calls are valid in a request. Some APIs refuse calls in a request without any tool."""
    return NAME not in tools and (bool(tools) or any(turn.facts.calls for turn in turns))


def _restored(
    hidden: HiddenTool, turns: Sequence[Turn], rounds: Sequence[HiddenRound], chain: Sequence[str]
) -> tuple[list[bytes], bool]:
    """Return the units with their hidden rounds, and whether there are any."""
    known: dict[str, list[HiddenRound]] = {}
    for round in rounds:
        known.setdefault(round.prefix, []).insert(0, round)
    restored: list[bytes] = []
    found = False
    for turn, prefix in zip(turns, chain, strict=False):
        visible = hidden.visible(bytes(turn.raw)) if prefix in known else None
        seen = [round for round in known.get(prefix, ()) if _is_seen(visible, round)]
        if not seen:
            restored.append(turn.raw)  # the same object, because an API may split and join its messages
            continue
        found = True
        restored += [*seen[0].before, hidden.restored(bytes(turn.raw), seen[0]), *seen[0].results]
    return restored, found


def _is_seen(visible: tuple[str, list[str]] | None, round: HiddenRound) -> bool:
    """Return whether a message is what the client saw of a round. Some clients trim its text."""
    return visible is not None and visible[0].strip() == round.text.strip() and visible[1] == round.calls
