"""Decide whether to forward a response or to retry."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from proxy.overflow import Overflow
from proxy.pipeline.budget import TokenBudget
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.telemetry.record import ACCEPTED, OVERFLOW


class Attempt(msgspec.Struct, eq=False, frozen=True):
    """One way to send a request: its limits, the input of its compaction, and the outcome."""

    budget: TokenBudget
    case: CompactionInput
    outcome: Outcome


class Accept(msgspec.Struct, eq=False, frozen=True):
    """Forward the response."""


class Retry(msgspec.Struct, eq=False, frozen=True):
    """Send another attempt.

    ``cause`` is ``overflow``, or the part that the upstream refused: ``reasoning``, ``compaction``, or ``tool``. It's
    ``empty`` for the same request again. Each of these four happens at most once per request.
    """

    attempt: Attempt
    cause: str


class Reject(msgspec.Struct, eq=False, frozen=True):
    """Forward the upstream's refusal. ``parts`` are the sizes of the request's parts in tokens."""

    parts: Mapping[str, int]


Decision = Accept | Retry | Reject

ACCEPT = Accept()


def result_of(decision: Decision, start: ResponseStart) -> str:
    """Return the name of an attempt's result in the record."""
    if isinstance(decision, Retry):
        return decision.cause
    if start.overflow is not None:
        return OVERFLOW
    return ACCEPTED if start.answer.status < 400 else "error"


def ended_early(
    context: ConversationContext, case: CompactionInput, start: ResponseStart, overflow: Overflow | None
) -> bool:
    """Return whether to retry once unchanged, because the upstream ended a stream before it wrote anything.

    It turned to another request, or failed. If it fails again, the prompt may be too long.
    """
    if "empty" in context.retries or case.mode != "enforce" or not case.policy.overflow_retries:
        return False
    ended = overflow is not None and start.silence
    return start.interrupted or (ended and start.overflow is None)


def may_retry(context: ConversationContext, overflow: Overflow) -> bool:
    """Return whether the proxy may retry after an overflow. It retries once after an empty response without a limit."""
    empty = overflow.kind == "silent" and overflow.limit is None
    return context.retries.count("overflow") < context.caller.policy.overflow_retries and not (
        empty and (context.silent_overflow or context.contradicted)
    )
