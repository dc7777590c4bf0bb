"""Recover from overflows: learn the limit, lower the output or compact further, and send the request again.

An overflow is stated, or shows in an empty response. If nothing helps, the client gets the upstream's error with the
sizes of the parts of its request.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
from collections.abc import Callable, Mapping

import msgspec
from cachetools import TTLCache
from msgspec.structs import replace

from proxy.constants import DAY, UNDECODABLE
from proxy.errors import ConfigurationError
from proxy.limits.budget import CAUTION_PART, enough, output_reserve
from proxy.limits.learned import BLIND_FACTOR, GUESS_SECONDS, LEARNED_ENTRIES, SMALLEST_PART
from proxy.overflow import MediaLimit, Overflow, media_limit, refuses_bytes
from proxy.overflow.errors import message_site
from proxy.overflow.patterns import TIER_LIMIT
from proxy.overflow.silent import empty_stream
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.budget import TokenBudgets, request_rules
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import CompactionInput, around_messages
from proxy.pipeline.response_start import ResponseStart, readable
from proxy.store.forgetting import drop

EMPTY, OVERFLOW = "empty", "overflow"  # the causes of retries in records

OUTPUT_PART = "output asked for (max_tokens)"

BLIND_PART = 4  # divides the requested output if the upstream counts more than the proxy, or names no limit
GATE_DOUBT = 0.9  # Share of a plan's limit. Smaller prompts weren't refused for their length, even if counts differ.

StaleAfter = Callable[[Exchange, CompactionInput], int]
"""Returns the number of units whose reasoning is invalid once the request is compacted further."""


class Overflows:
    """Find and recover from overflows."""

    def __init__(self, budgets: TokenBudgets, compactor: Compactor, stale_after: StaleAfter) -> None:
        self._budgets = budgets
        self._compactor = compactor
        self._stale_after = stale_after
        self._bytes: TTLCache[tuple[str, str, str], int] = TTLCache(LEARNED_ENTRIES, GUESS_SECONDS)
        self._media: TTLCache[tuple[str, str, str], tuple[MediaLimit, ...]] = TTLCache(LEARNED_ENTRIES, DAY)

    def apply(self, exchange: Exchange) -> None:
        """Keep a request below the bytes that its upstream refused within the last hour."""
        place = exchange.place
        if place in self._bytes and (known := self._bytes.get(place)):
            _limit_bytes(exchange, known)

    def media(self, exchange: Exchange) -> tuple[MediaLimit, ...]:
        """Return the limits on images and files that the upstream named, and those guessed for the conversation."""
        if next(iter(self._media), None) is None:  # a conversation's key takes time
            return ()
        return (*self._media.get(exchange.place, ()), *self._media.get(_conversation(exchange), ()))

    def succeeded(self, exchange: Exchange, sent: CompactionInput) -> None:
        """Remember the limits that the upstream refused, because a request within them succeeded."""
        if exchange.refused_bytes is not None:
            self._bytes[exchange.place] = exchange.refused_bytes
        for limit in sent.media:
            key = _conversation(exchange) if limit.guessed else exchange.place
            known = self._media.get(key, ())
            if limit not in known:
                self._media[key] = _with(known, limit)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._bytes, forgotten, 2) | drop(self._media, forgotten, 2)

    async def early_end(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return the same attempt once, because the upstream ended a stream before it wrote anything.

        It turned to another request, or failed. If it fails again, the prompt may be too long.
        """
        if attempt.case.mode != "enforce" or not attempt.case.policy.overflow_retries:
            return None
        if start.interrupted:
            return attempt
        silent = start.overflow is None and start.silence and await self._silent(run.exchange, attempt, start)
        return attempt if silent else None

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt with less output or fewer messages; ``None`` if neither would help."""
        exchange = run.exchange
        overflow = start.overflow or await self._silent(exchange, attempt, start)
        if overflow is not None and overflow.gate:
            counted = await self._size(attempt) * attempt.budget.factor
            if counted < GATE_DOUBT * TIER_LIMIT:
                start.overflow = overflow = None
        refused = overflow is None and start.answer.status == 413
        refused = refused and refuses_bytes(await readable(start.answer, start.first))
        crowd = None if overflow or refused else await self._media_limit(attempt, start)
        if not (overflow or refused or crowd) or not _enforced(attempt) or exchange.body.continues:
            return None
        if run.retries.count(OVERFLOW) >= exchange.caller.policy.overflow_retries:
            return None
        if crowd is not None:
            return await self._less(run, attempt, replace(attempt.case, media=_with(attempt.case.media, crowd)))
        if overflow is None:
            return await self._fewer_bytes(run, attempt)
        # The request already keeps to a limit from an empty response, or to one that an earlier answer contradicts.
        # One more empty response without a limit doesn't show that a smaller prompt would help.
        doubtful = exchange.provisional is not None and (
            exchange.provisional.silent or exchange.provisional.contradicted
        )
        if overflow.kind == "silent" and overflow.limit is None and doubtful:
            return None
        return await self._smaller(run, attempt, overflow)

    async def explain(self, run: Run, attempt: Attempt, start: ResponseStart) -> None:
        """Tell the client which parts of its request are too large, if the upstream refused it as too long."""
        exchange = run.exchange
        if start.overflow is None or not _enforced(attempt) or exchange.body.continues:
            return
        try:
            parts = await self._compactor.parts(attempt.case, attempt.outcome)
        except ConfigurationError:  # reported when the recoveries were asked
            return
        parts |= {OUTPUT_PART: attempt.output or exchange.body.max_output or 0}
        if exchange.dialect.errors == "anthropic":  # clients match Anthropic's own wording
            run.advice = _sentence(parts).strip("()").encode("ascii", "replace").decode()
        else:
            await add_sizes(start, parts)

    async def _silent(self, exchange: Exchange, attempt: Attempt, start: ResponseStart) -> Overflow | None:
        """Return the overflow that an empty response indicates, or ``None``."""
        if not start.empty or not exchange.body.units or not _enforced(attempt):
            return None
        counted = int(await self._size(attempt) * attempt.budget.factor)
        if start.silence:
            return empty_stream(counted, window=attempt.budget.window)
        asked = attempt.output or exchange.body.max_output
        return self._budgets.silent(exchange, attempt.budget.window, start.usage, counted, asked)

    async def _smaller(self, run: Run, attempt: Attempt, overflow: Overflow) -> Attempt | None:
        """Return an attempt within the limit that an overflow indicates. A later one may ask a summary model."""
        exchange, case = run.exchange, attempt.case
        sent = await self._size(attempt)
        reserved = attempt.output or attempt.budget.reserved
        lowered = self._less_output(exchange, attempt, overflow, sent)
        if lowered is not None:
            reserved = max(reserved, self._budgets.of(exchange).default or 0)
            if overflow.limit is not None:
                self._budgets.overflowed(exchange, overflow, sent, reserved)
            return replace(attempt, budget=self._budgets.of(exchange), output=lowered)
        limit = self._budgets.overflowed(exchange, overflow, sent, reserved)
        budget = self._budgets.of(exchange)
        # The default reserve is smaller in the window that the overflow indicates.
        body, output = exchange.body, attempt.output or budget.reserved
        largest = exchange.profile.max_output_tokens
        free = output_reserve(budget.shared_window, output, largest, body.thinking, body.fixed_thinking)
        if limit.total is not None and limit.total - free < limit.total // SMALLEST_PART:
            return None  # no prompt is small enough
        lowered = await self._budgets.output(budget, case, attempt.outcome, attempt.after)
        if lowered is not None and lowered < reserved and budget.input is not None and sent <= budget.input:
            return replace(attempt, budget=budget, output=lowered)
        fitting = run.case(budget)  # less the room for the tool, as in the first attempt and the next request
        room, most = fitting.budget, min(sent, case.budget or sent)
        if room is None or room >= most:
            # By our count, the request fit the indicated or the known limit, so our count is too low.
            room = int(most * BLIND_FACTOR)
        smaller = replace(
            case,
            budget=room,
            largest_budget=fitting.largest_budget,
            rules=request_rules(exchange, budget, refused=True),
            stale_reasoning=self._stale_after(exchange, case),
            attempt=run.next_number,
        )
        again = await run.attempt(budget, smaller, may_ask=OVERFLOW in run.retries)
        after = again.after
        return None if again.outcome.messages is None or after is None or after >= sent else again

    async def _fewer_bytes(self, run: Run, attempt: Attempt) -> Attempt | None:
        exchange, case, sent = run.exchange, attempt.case, attempt.outcome.messages
        size = len(case.body.raw) if sent is None else sum(map(len, sent)) + around_messages(case.body)
        if size > (exchange.profile.max_bytes or size):
            return None  # the proxy couldn't keep to the known bound
        exchange.refused_bytes = size
        _limit_bytes(exchange, size)
        return await self._less(
            run, attempt, replace(case, rules=request_rules(exchange, attempt.budget, refused=True))
        )

    async def _media_limit(self, attempt: Attempt, start: ResponseStart) -> MediaLimit | None:
        body, status = attempt.case.body, start.answer.status
        if start.error is None or not body.has_remote_media():
            return None
        sent = await self._compactor.media(attempt.case, attempt.outcome)
        return await asyncio.to_thread(media_limit, status, await readable(start.answer, start.first), body.raw, sent)

    async def _less(self, run: Run, attempt: Attempt, less: CompactionInput) -> Attempt | None:
        less = replace(less, stale_reasoning=self._stale_after(run.exchange, attempt.case), attempt=run.next_number)
        again = await run.attempt(attempt.budget, less, may_ask=OVERFLOW in run.retries)
        return None if again.outcome.messages is None else again

    def _less_output(self, exchange: Exchange, attempt: Attempt, overflow: Overflow, sent: int) -> int | None:
        """Return an output with which the prompt of ``sent`` tokens may fit; ``None`` if only a smaller prompt may."""
        body, asked = exchange.body, attempt.output or exchange.body.max_output
        if overflow.kind == "silent" or overflow.scope == "input":
            return None
        prompt = overflow.counted or int(sent * attempt.budget.factor)
        if asked is None:
            return self._budgets.without_default(exchange, overflow, prompt, overflow.limit or attempt.budget.window)
        if exchange.caller.policy.output == "keep":
            return None
        usable = output_reserve(overflow.limit or prompt, asked, None, body.thinking, body.fixed_thinking)
        if overflow.limit is not None and prompt + asked > overflow.limit:
            margin = 0 if overflow.counted else prompt // CAUTION_PART
            lowered = min(overflow.limit - prompt - margin, asked - 1)
        elif overflow.remedy == "compact" and (overflow.kind != "input" or asked <= prompt // 2):
            return None
        else:
            lowered = max(asked // BLIND_PART, min(usable, asked - 1))
        if lowered < min(usable, (body.max_output or asked) // 2 + body.fixed_thinking):
            return None
        return enough(lowered, body.thinking, body.fixed_thinking)

    async def _size(self, attempt: Attempt) -> int:
        """Return the tokens of a request as the proxy sent it."""
        if attempt.after is not None:
            return attempt.after
        return await self._compactor.size(attempt.case.body, attempt.case.counter, attempt.case.tenant)


def _limit_bytes(exchange: Exchange, most: int) -> None:
    exchange.profile = dataclasses.replace(exchange.profile, max_bytes=min(most, exchange.profile.max_bytes or most))


def _with(known: tuple[MediaLimit, ...], limit: MediaLimit) -> tuple[MediaLimit, ...]:
    """Return the limits with a new one, which replaces an earlier one on the same kinds."""
    return (*(one for one in known if one.kinds != limit.kinds), limit)


def _conversation(exchange: Exchange) -> tuple[str, str, str]:
    tenant, tag = exchange.conversation
    return tag, "", tenant


def _enforced(attempt: Attempt) -> bool:
    return attempt.case.mode == "enforce" and attempt.outcome.verdict != "failed"


async def add_sizes(start: ResponseStart, parts: Mapping[str, int]) -> None:
    """Add the sizes of the request's parts, in tokens, to the message of the upstream's refusal."""
    added = _sentence(parts)
    body = await readable(start.answer, start.first)
    first = _error_with(body, added) or b"\n".join(_line_with(line, added) for line in body.split(b"\n"))
    if first == body:
        return
    start.first = first
    start.answer.headers = [
        pair for pair in start.answer.headers if pair[0] not in ("content-length", "content-encoding")
    ]
    if start.complete:
        start.answer.headers.append(("content-length", str(len(first))))


def _line_with(line: bytes, added: str) -> bytes:
    """Return a line of a stream. If it has the data of an error, add a sentence to its message."""
    name, separator, data = line.partition(b":")
    changed = _error_with(data.strip(), added) if name in (b"data", b"error") else None
    return line if changed is None else name + separator + b" " + changed


def _error_with(body: bytes, added: str) -> bytes | None:
    """Return an error with a sentence added to its message, or ``None`` for anything else."""
    try:
        value: object = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))
    except UNDECODABLE:
        return None
    found = message_site(value)
    if found is None:
        return None
    found.holder[found.key] = f"{found.text} {added}"
    return msgspec.json.encode(value)


def _sentence(parts: Mapping[str, int]) -> str:
    """Return one sentence about the parts of a request, with sizes in tokens."""
    sized = sorted(((tokens, name) for name, tokens in parts.items() if tokens), reverse=True)
    if not sized:
        return "(The compaction proxy can't shorten any part of this request.)"
    listed = ", ".join(f"{name} {tokens:,}" for tokens, name in sized)
    return (
        f"(The compaction proxy couldn't make the request small enough. It still has these parts, in tokens: {listed}. "
        f"Shorten the {sized[0][1]}, or use a model with a larger window.)"
    )
