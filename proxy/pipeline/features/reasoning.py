"""Keep reasoning valid that a model binds to the prompt before it, and keep what an upstream demands.

Newer models refuse or drop reasoning if earlier messages change, and other models demand it with the calls after it.
The proxy removes what it knows to be invalid. If an upstream still refuses a prompt that the proxy changed, the proxy
sends the request once without any bound reasoning, or once with all of it.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import CompactionInput, Outcome
from proxy.pipeline.response_start import ResponseStart, readable
from proxy.pipeline.sent_prompts import SentPrompts
from proxy.upstream.traits import WITH_REASONING, Memory

_REFUSES_REASONING = re.compile(
    rb"bound to a different conversation|(?:invalid|corrupted) [^\w\s]{0,4}(?:thought[ _])?signature"
    rb"|thinking[^.]{0,60} blocks [^.]{0,40}cannot be modified"
    rb"|without its required (?:following|'reasoning') item|encrypted content .{0,200}could not be verified",
    re.IGNORECASE,
)
"""The wordings for reasoning whose prefix or neighbors changed, by Anthropic, Bedrock, Google, and OpenAI.

Relays pass them on, so neither the API nor the model's name decides which can come.
"""

_NAMES_REASONING = re.compile(rb"(?<![-\w/])(?:reasoning(?:_content|_text|_details)?|thinking)(?![-\w]|\.\w)", re.I)
"""A part of a message, rather than a model or a parameter such as ``reasoning.effort``."""


class Reasoning:
    """The reasoning in conversations. ``prompts`` are those that were sent last."""

    def __init__(self, prompts: SentPrompts, compactor: Compactor, traits: Memory) -> None:
        self._prompts = prompts
        self._compactor = compactor
        self._traits = traits

    def demanded(self, exchange: Exchange) -> bool:
        """Return whether the upstream is known to demand all reasoning. What it refused itself goes nevertheless."""
        return WITH_REASONING in exchange.edits and not self.stale(exchange)

    def stale(self, exchange: Exchange) -> int:
        """Return the number of units whose reasoning is known to be invalid."""
        if not self._prompts.stale(exchange.conversation):
            return 0
        self._prompts.verify(exchange.conversation, exchange.mark)
        return self._prompts.stale(exchange.conversation)

    async def newly_stale(self, exchange: Exchange, case: CompactionInput, outcome: Outcome) -> int:
        """Return how many units have reasoning that became invalid; 0 if the outcome has none of it."""
        if outcome.messages is None or outcome.prompt is None or case.keeps_reasoning:
            return 0
        await self._prompts.find(exchange.conversation, outcome.prompt)
        self._prompts.verify(exchange.conversation, exchange.mark)
        if not self._prompts.continues(exchange.conversation, outcome.prompt):
            self._expire(exchange)
        stale = self._prompts.stale(exchange.conversation)
        return stale if stale > case.stale_reasoning else 0

    def stale_after_overflow(self, exchange: Exchange, case: CompactionInput) -> int:
        """Return the units whose reasoning is invalid after a change that the conversation alone doesn't explain."""
        if exchange.binding != "always" or case.keeps_reasoning:
            return case.stale_reasoning
        self._expire(exchange)
        return len(exchange.body.units)

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt without the reasoning that the upstream refused, or with the reasoning that it demands.

        ``None`` if it refused something else, or if the proxy changed neither this prompt nor the one before. Then the
        client caused the refusal.
        """
        exchange, outcome = run.exchange, attempt.outcome
        shown = await readable(start.answer, start.first) if start.answer.status == 400 else b""
        if not _REFUSES_REASONING.search(shown):
            named = start.overflow is None and _NAMES_REASONING.search(shown)
            return await self._complete(run, attempt) if named else None
        if outcome.messages is None:
            await self._prompts.find(exchange.conversation)
            self._prompts.verify(exchange.conversation, exchange.mark)
            if not self._prompts.changed(exchange.conversation):
                return None
        self._expire(exchange)
        self._traits.unlearn(exchange.place, WITH_REASONING)
        stale, number = len(exchange.body.units), run.next_number
        case = replace(attempt.case, stale_reasoning=stale, keeps_reasoning=False, attempt=number)
        stripped = await run.attempt(attempt.budget, case, may_ask=False)
        if stripped.outcome.messages is None:
            outcome = await self._compactor.without_reasoning(case)
            stripped = replace(stripped, outcome=outcome, output=None, tool=None)
        return stripped

    async def _complete(self, run: Run, attempt: Attempt) -> Attempt | None:
        """Return an attempt with the reasoning that the proxy removed; ``None`` if it removed none."""
        case = attempt.case
        removes = not case.keeps_reasoning and (run.exchange.binding != "never" or case.stale_reasoning)
        if attempt.outcome.messages is None or not removes:
            return None
        case = replace(case, stale_reasoning=0, keeps_reasoning=True, attempt=run.next_number)
        return await run.attempt(attempt.budget, case, may_ask=False)

    def succeeded(self, exchange: Exchange, outcome: Outcome, *, kept: bool = False) -> None:
        """Remember a prompt that was answered. ``kept``: with all reasoning, because the upstream demands it."""
        if kept:
            self._traits.learn(exchange.place, (WITH_REASONING,))
            self._prompts.expire(exchange.conversation, 0, exchange.mark(0))
        if exchange.binding == "always":
            messages, changed = len(exchange.body.units), outcome.messages is not None
            mark = exchange.mark(messages)
            self._prompts.sent(exchange.conversation, messages, mark, outcome.prompt, changed=changed)

    def _expire(self, exchange: Exchange) -> None:
        messages = len(exchange.body.units)
        self._prompts.expire(exchange.conversation, messages, exchange.mark(messages))
