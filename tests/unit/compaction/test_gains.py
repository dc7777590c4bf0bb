"""Test the running totals of savings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.gains import Gains, LateGains


def test_plain_gains_count_from_the_cut_to_the_frontier() -> None:
    gains = Gains([5, 0, 7, 1])
    assert gains.potential(0, 3, 4) == 12
    assert gains.potential(2, 2, 4) == 0
    assert gains.applied(0) == 0
    gains.apply(3, 4)
    assert (gains.frontier, gains.seen, gains.applied(0), gains.applied(1), gains.applied(3)) == (3, 4, 12, 7, 0)


def test_a_late_gain_counts_once_the_later_message_is_there() -> None:
    gains = LateGains(4, {(0, 2): 30, (1, 3): 4})
    assert gains.potential(0, 2, 2) == 0
    assert gains.potential(0, 2, 3) == 30
    gains.apply(1, 3)
    assert gains.potential(0, 2, 4) == 34
    assert (gains.applied(0), gains.applied(1)) == (30, 0)
    gains.apply(2, 4)
    assert (gains.applied(0), gains.applied(1), gains.applied(2)) == (34, 4, 0)


pairs = st.dictionaries(
    st.tuples(st.integers(0, 8), st.integers(0, 9)).filter(lambda pair: pair[0] < pair[1]), st.integers(1, 50)
)


@given(pairs, st.lists(st.tuples(st.integers(0, 10), st.integers(1, 10), st.booleans()), max_size=8))
def test_late_gains_are_those_of_a_plain_sum(
    late: dict[tuple[int, int], int], asked: list[tuple[int, int, bool]]
) -> None:
    gains = LateGains(10, late)
    for frontier, end, apply in sorted(asked, key=lambda item: item[1]):
        if frontier > end:
            continue
        there = {pair: gain for pair, gain in late.items() if pair[1] < end}
        for start in range(frontier + 1):
            expected = sum(gain for (group, _), gain in there.items() if start <= group < frontier)
            assert gains.potential(start, frontier, end) == expected
        if apply:
            gains.apply(frontier, end)
            for start in range(11):
                expected = sum(gain for (group, _), gain in there.items() if start <= group < frontier)
                assert gains.applied(start) == expected
