"""Name the condition that made the proxy compact a request."""

from __future__ import annotations

from proxy.compaction.pressure import PRESSING, part
from proxy.compaction.triggers import Clause, lowest_level, share_of
from proxy.pipeline.job import CompactionInput
from proxy.telemetry.record import Reason


def reason_for(case: CompactionInput, tokens: int, messages: int) -> Reason | None:
    """Return the condition that a request of this size meets; ``None`` if it meets none."""
    rules, budget = case.rules, case.budget
    for clause in rules.trigger:
        if clause.met(tokens, messages, budget):
            return _met(clause, tokens, messages, budget)
    bounds, size = rules.bounds, len(case.body.raw)
    if bounds.messages is not None and messages >= part(PRESSING, bounds.messages):
        return Reason("messages", bounds.messages, messages)
    if bounds.bytes is not None and size >= part(PRESSING, bounds.bytes):
        return Reason("bytes", bounds.bytes, size)
    for stage in rules.stages:
        if any(clause.met(tokens, messages, budget) for clause in stage.trigger):
            return Reason("stage", lowest_level(stage.trigger, budget), tokens)
    return None


def _met(clause: Clause, tokens: int, messages: int, budget: int | None) -> Reason:
    if clause.price_step:
        return Reason("price_step", clause.tokens, tokens)
    if clause.fraction is not None and budget is not None:
        return Reason("fraction", share_of(clause.fraction, budget), tokens, clause.fraction)
    if clause.tokens is not None:
        return Reason("tokens", clause.tokens, tokens)
    return Reason("messages", clause.messages, messages)
