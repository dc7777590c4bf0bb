"""Test the projected size of a conversation with a cut."""

from __future__ import annotations

from proxy.compaction import keeps
from proxy.compaction.gains import Gains
from proxy.compaction.rules import Envelope, SectionLimits
from proxy.compaction.sizes import Projection, Sizes
from tests.kit.conversations import assistant, turns

LIMITS = SectionLimits(summary=10, users=100, newest=50, system=100, words=2, index=3, group=None)
BODY = turns([assistant("word " * 50) for _ in range(10)])
EACH = BODY[0].facts.tokens
SIZES = Sizes(BODY, None)


def projection(level: int | None = 1000, saved: int = 0) -> Projection:
    gains = Gains([saved] * len(SIZES))
    gains.apply(4, 10)
    return Projection(Envelope(2000, 30, 2, 500), LIMITS, SIZES, {"stage": gains}, level)


def test_without_a_cut_the_size_is_the_overhead_and_the_body() -> None:
    assert projection().size(0, 10) == 30 + 10 * EACH
    assert projection().messages(0, 10) == 2 + 10


def test_a_cut_replaces_groups_by_a_summary_at_its_limit() -> None:
    assert projection().size(6, 10) == 30 + keeps.SUMMARY_FRAME_TOKENS + 10 + 2 + 3 + 4 * EACH
    assert projection().messages(6, 10) == 2 + 1 + 4


def test_savings_count_only_after_the_cut() -> None:
    assert projection(saved=5).size(0, 10) == projection().size(0, 10) - 4 * 5
    assert projection(saved=5).size(6, 10) == projection().size(6, 10)


def test_room_to_grow_is_relative_to_the_trigger() -> None:
    most = int(1000 * keeps.ROOM_TO_GROW)
    assert projection().leaves_room(most, 0)
    assert not projection().leaves_room(most + 1, 0)
    assert projection(level=None).leaves_room(10**9, 0)


def test_message_pressure_counts_the_head_and_the_summary() -> None:
    pressure = projection().message_pressure(100)
    assert pressure.at(0, 10) == 12
    assert pressure.at(6, 10) == 7


def test_byte_pressure_falls_with_a_cut() -> None:
    pressure = projection().byte_pressure(100_000, BODY, frozenset(), {})
    assert pressure.at(0, 10) >= 500 + sum(len(turn.raw) for turn in BODY)
    assert pressure.grown[10] - pressure.grown[6] < pressure.at(6, 10)
