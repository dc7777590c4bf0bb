"""Properties of what leaves the engine, over 600 generated conversations, or 20,000 with ``--full``.

Hypothesis draws small numbers; each draw is a batch of conversations. A failing request is made
smaller, message by message, while it fails in the same way. Then it's printed as JSON.
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings

from proxy.compaction.settings import lowest_level
from proxy.pipeline.budget import rules_for
from proxy.pipeline.facts_cache import FactsCache
from tests.kit.engine import Engine, Request, request, run, sent
from tests.kit.generator import ANY_DIRT, DIRT, LARGE_BUDGETS, SETTINGS, Batch, batches, conversation, encoded
from tests.kit.judging import judge
from tests.product.properties.test_growing import GROWING, GROWING_FULL, SIZE

BATCH = 20
LARGE_BATCH = 4
EACH, EACH_FULL = 15, 490
"""Batches of sound conversations, and of damaged ones, without ``--full`` and with it."""
LARGE, LARGE_FULL = 4, 20
"""Batches of conversations in larger windows."""


class Seen:
    """The totals of a test's batches."""

    def __init__(self) -> None:
        self.conversations = 0
        self.verdicts: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()


REMEMBERED = FactsCache()


async def check(asked: Request, *, clean: bool, afresh: bool, seen: Seen | None = None) -> None:
    engine = Engine(REMEMBERED)
    outcome = await engine.send(asked)
    judged = await judge(asked, outcome, REMEMBERED, clean=clean)
    again = await (Engine(REMEMBERED) if afresh else engine).send(asked)
    assert sent(asked, again) == judged.out, "the same request came out differently"
    if outcome.messages is not None:
        further = request(judged.out, asked.setting, asked.budget, tenant=asked.tenant)
        second = await engine.send(further)
        if below_every_trigger(asked, judged.tokens, len(judged.out)):
            assert second.messages is None, "what was compacted is below the trigger, and was compacted again"
        else:
            await judge(further, second, REMEMBERED, clean=False)
    if seen is not None:
        seen.conversations += 1
        seen.verdicts[outcome.verdict] += 1
        seen.steps.update(outcome.steps)


def below_every_trigger(asked: Request, tokens: int, messages: int) -> bool:
    rules = rules_for(asked.setting.policy, window_known=True)
    for trigger in (rules.trigger, *(stage.trigger for stage in rules.stages)):
        level = lowest_level(trigger, asked.budget)
        if (level is not None and tokens >= level) or any(messages >= (c.messages or math.inf) for c in trigger):
            return False
    return True


async def reported(asked: Request, hold: Callable[[Request], Awaitable[None]]) -> None:
    """Check a request. Report a failure with the smallest failing request."""
    try:
        await hold(asked)
    except AssertionError as error:
        smallest, words = await smaller(asked, hold, _first_line(error))
        pytest.fail(f"{words}\n{smallest.printed()}", pytrace=False)


async def smaller(asked: Request, hold: Callable[[Request], Awaitable[None]], words: str) -> tuple[Request, str]:
    """The request with as many messages left out as it still fails without, in the same words but for figures."""
    span = len(asked.messages) // 2
    while span:
        start = 0
        while start < len(asked.messages):
            fewer = [*asked.messages[:start], *asked.messages[start + span :]]
            attempt = request(fewer, asked.setting, asked.budget, tenant=asked.tenant)
            try:
                if fewer:
                    await hold(attempt)
                start += span
            except AssertionError as error:
                if _kind(_first_line(error)) == _kind(words):
                    asked, words = attempt, _first_line(error)
                else:
                    start += span
        span //= 2
    return asked, words


def _first_line(error: AssertionError) -> str:
    return str(error).split("\nassert", 1)[0]


def _kind(words: str) -> str:
    return "".join(c for c in words.split(":")[0] if not c.isdigit())


def judged_batch(batch: Batch, seen: Seen, size: int) -> None:
    rng = batch.rng

    async def all_of_it() -> None:
        for number in range(size):
            raws = encoded(conversation(rng, batch.budget, batch.dirt))
            asked = request(raws, SETTINGS[batch.setting], batch.budget)
            afresh = number % 10 == 0

            async def hold(asked: Request, afresh: bool = afresh) -> None:
                await check(asked, clean=not batch.dirt, afresh=afresh)

            try:
                await check(asked, clean=not batch.dirt, afresh=afresh, seen=seen)
            except AssertionError:
                await reported(asked, hold)
                raise

    run(all_of_it())


def judged_batches(batches_: Any, count: int, size: int, part: int = 0) -> Seen:
    seen = Seen()

    # Shrinking the numbers wouldn't help: ``reported`` makes the failing request smaller.
    @seed(part)  # without it, every part would draw the same batches
    @settings(max_examples=count, phases=[Phase.generate], database=None)
    @given(batches_)
    def every(batch: Batch) -> None:
        judged_batch(batch, seen, size)

    every()
    assert seen.conversations >= count * size
    return seen


@pytest.mark.long
def test_sound_conversations(full: bool) -> None:
    seen = judged_batches(batches(), EACH_FULL if full else EACH, BATCH)
    assert seen.verdicts["compacted"] >= seen.conversations // 3
    assert seen.verdicts["none"] >= seen.conversations // 20
    assert {*seen.steps} == {"duplicates", "truncate_args", "evict_results", "media", "summary", "fit"}


@pytest.mark.long
def test_damaged_conversations(full: bool) -> None:
    drawn = batches(dirt=(*DIRT, ANY_DIRT, ANY_DIRT))
    seen = judged_batches(drawn, EACH_FULL if full else EACH, BATCH, 1)
    assert seen.verdicts["compacted"] >= seen.conversations // 3


def test_conversations_in_larger_windows(full: bool) -> None:
    seen = judged_batches(batches(LARGE_BUDGETS), LARGE_FULL if full else LARGE, LARGE_BATCH)
    assert seen.verdicts["compacted"] >= seen.conversations // 4


def test_there_are_hundreds_of_conversations_and_thousands() -> None:
    """Count the conversations. Each test above asserts that it saw its part."""
    assert 2 * BATCH * EACH + LARGE_BATCH * LARGE + SIZE * GROWING >= 600
    assert 2 * BATCH * EACH_FULL + LARGE_BATCH * LARGE_FULL + SIZE * GROWING_FULL >= 20_000
