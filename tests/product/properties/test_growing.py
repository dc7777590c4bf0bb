"""A conversation that grows turn by turn: the same bytes as all at once, stable prefixes, and nothing lost."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import Outcome
from proxy.store import open_store
from tests.kit.conversations import requests
from tests.kit.engine import Engine, Request, request, run, sent
from tests.kit.generator import BUDGETS, GROWN, SETTINGS, Batch, batches, conversation, encoded
from tests.kit.judging import Judged, in_archive, judge

GROWING, GROWING_FULL = 4, 64
"""Batches, without ``--full`` and with it."""
SIZE = 5
"""Conversations in a batch."""
MOST_TURNS = 40

REMEMBERED = FactsCache()


@dataclass
class Seen:
    """The totals of the batches."""

    conversations: int = 0
    requests: int = 0
    checkpoints: int = 0
    dropped: int = 0
    stubs: int = 0
    breaks: Counter[bool] = field(default_factory=Counter)


async def replay(raws: list[bytes], batch: Batch, seen: Seen) -> None:
    """Send every request of a conversation, and compare each with the previous one."""
    setting = SETTINGS[batch.setting]
    engine = Engine(REMEMBERED, open_store("sqlite://"))
    ends = requests([json.loads(raw) for raw in raws])[-MOST_TURNS:]
    epochs: set[object] = set()
    summaries: set[object] = set()
    places: set[tuple[int, tuple[int, ...] | None]] = set()
    previous: tuple[object, Outcome, list[bytes]] | None = None
    latest: tuple[Request, Outcome, Judged] | None = None
    digests = False
    for end in ends:
        asked = request(raws[:end], setting, batch.budget)
        outcome = await engine.send(asked)
        judged = await judge(asked, outcome, REMEMBERED, clean=True)
        plan = (await engine.compactor.explain(engine.case(asked))).plan
        cuts = [*plan.checkpoints, *([plan.upcoming] if plan.upcoming else [])]
        places |= {(cut, plan.current_user_message.get(cut)) for cut in cuts}
        epoch: object = None
        if outcome.messages is not None:
            frontiers = sorted((name, place.position, place.seen) for name, place in plan.frontiers.items())
            epoch = plan.checkpoints, tuple(frontiers)
        # A summary may take the place of a digest once enough requests have asked for it.
        regained = previous is not None and previous[1].summary.origin == "digest" != outcome.summary.origin
        fitted = previous is not None and "fit" in (*previous[1].steps, *outcome.steps)
        if previous is not None and previous[0] == epoch and not regained and not fitted:
            # Under strict alternation the last message may still take up what the user says next.
            before = previous[2][:-1] if setting.strict else previous[2]
            assert judged.out[: len(before)] == before, "between two checkpoints the prompt's beginning changed"
            assert len(judged.out) > len(before)
        elif previous is not None:
            seen.breaks[previous[0] == epoch] += 1
        if judged.summary is not None:
            summaries.add(judged.summary)
        digests |= outcome.summary.origin == "digest"
        epochs.add(epoch)
        previous = epoch, outcome, judged.out
        latest = asked, outcome, judged
        seen.requests += 1
    assert len(summaries) <= len(places) * (1 + digests), "there are more summary messages than checkpoints"
    if not digests:
        assert engine.asked <= len(places), f"{engine.asked} summaries were asked for, {len(places)} checkpoints"
    if latest is not None:
        asked, outcome, judged = latest
        fresh = Engine(REMEMBERED)
        at_once = sent(asked, await fresh.send(asked))
        if not digests:
            assert at_once == judged.out, "all at once it is another body than turn by turn"
        assert fresh.asked <= 2 or digests, "more was asked for than this checkpoint's summary and the next one's"
        dropped, stubs = await in_archive(engine, asked, judged)
        seen.dropped += dropped
        seen.stubs += stubs
    seen.conversations += 1
    seen.checkpoints += len(summaries)
    await engine.aclose()


def replayed(drawn: Any, batches_: int) -> Seen:
    seen = Seen()

    @settings(max_examples=batches_, phases=[Phase.generate], database=None)
    @given(drawn)
    def every(batch: Batch) -> None:
        rng = batch.rng

        async def all_of_it() -> None:
            for _ in range(SIZE):
                raws = encoded(conversation(rng, batch.budget, rooms=GROWN))
                try:
                    await replay(raws, batch, seen)
                except AssertionError as error:
                    asked = request(raws, SETTINGS[batch.setting], batch.budget)
                    pytest.fail(f"{error}\n{asked.printed()}", pytrace=False)

        run(all_of_it())

    every()
    return seen


@pytest.mark.long
def test_turn_by_turn(full: bool) -> None:
    count = GROWING_FULL if full else GROWING
    seen = replayed(batches(BUDGETS), count)
    assert seen.conversations >= count * SIZE
    assert seen.requests >= 5 * seen.conversations
    assert seen.checkpoints >= seen.conversations // 2
    assert seen.dropped >= seen.conversations
    assert seen.stubs >= 0.8 * count
