"""A few seconds of ``scripts/soak chaos``."""

import asyncio
from pathlib import Path

import pytest

from soak.chaos.command import Found, examined, report
from soak.chaos.upstream import Tally
from soak.chaos.watching import Sample

FLAT = [Sample(at, 100_000_000 + at * 7919 % 4_000, 20, 5, 4) for at in range(0, 1_800, 5)]
GROWING = [Sample(sample.at, sample.memory + int(sample.at * 500), 20, 5, 4) for sample in FLAT]


@pytest.mark.full
@pytest.mark.long
def test_nothing_is_lost_and_nothing_is_left_over(tmp_path: Path) -> None:
    found = asyncio.run(examined(tmp_path, seconds=9, rate=20, every=2.5, rest=2))
    assert found.tally.wrong == []
    assert found.seen.wrong == []
    assert found.crashes == []
    assert found.tally.compacted["compacted"] > 0
    assert {"reset", "reset before", "summary"} <= {name for name, count in found.seen.done.items() if count}
    assert found.edits["wrong"] >= 1
    assert found.reported == found.edits["wrong"], found.log
    before, after = found.before, found.after
    assert after.in_flight <= before.in_flight, (before, after)
    # Idle connections stay open for a minute.
    assert after.others <= before.others, (before, after)


@pytest.mark.parametrize(("steady", "status"), [(FLAT, 0), (GROWING, 1)], ids=["flat", "growing"])
def test_memory_that_grows_is_an_error(steady: list[Sample], status: int) -> None:
    found = Found(Tally(), Tally(), steady, FLAT[0], FLAT[0], {"right": 1, "wrong": 0}, "")
    assert report(found, 30) == status
