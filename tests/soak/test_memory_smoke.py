"""``scripts/soak memory`` with a few conversations, and its check of growth."""

import asyncio
from pathlib import Path

import pytest

from soak.memory.command import LEVEL_AFTER, MOST, Sample, grown, loaded


@pytest.mark.full
def test_conversations_are_answered_and_half_of_them_compacted(tmp_path: Path) -> None:
    load = asyncio.run(loaded(tmp_path, 60, 0, 24))
    assert (load.sent, load.compacted, load.failed) == (24, 12, [])
    assert load.samples


def series(memory: float, growth: float, cpu: float = 0.01, dearer: float = 0.0) -> list[Sample]:
    """Samples that grow by shares of the first one."""
    return [
        Sample(5_000 * step, int(memory * (1 + growth * step / 30)), cpu * (1 + dearer * step / 30))
        for step in range(1, 31)
    ]


@pytest.mark.parametrize(
    ("samples", "problems"),
    [
        (series(300e6, 0), []),
        (series(300e6, 0.4), ["memory grew after it should be level"]),
        (series(460e6, 0), ["memory reached 460 MB, target: 450 MB"]),
        (series(300e6, 0, dearer=1.0), ["the CPU time of a request grew"]),
        (series(300e6, 9)[: LEVEL_AFTER // 5_000], [f"memory reached 1200 MB, target: {MOST / 1e6:.0f} MB"]),
        ([], []),
    ],
)
def test_growth_is_a_problem_once_memory_should_be_level(samples: list[Sample], problems: list[str]) -> None:
    assert grown(samples) == problems
