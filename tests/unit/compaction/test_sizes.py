"""Test running totals, ``keep``, and oversized results."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.settings import Clause
from proxy.compaction.sizes import Sizes, clip_results
from proxy.compaction.turn import Facts, Links, Rare, Turn
from proxy.dialects.chat.units import KINDS
from tests.kit.conversations import Counting


def of(*sizes: tuple[str, int]) -> list[Turn]:
    return [Turn(b"{}", Facts(KINDS.get(role, ""), role, tokens, b"")) for role, tokens in sizes]


BODY = of(("user", 100), ("assistant", 10), ("tool", 300), ("tool", 90), ("system", 5), ("assistant", 20), ("user", 40))


def paused(*sizes: int) -> list[Turn]:
    """Return a turn that paused: each message has the result of the provider's call in the one before."""
    links = [Links((f"s{n}",), (f"s{n - 1}",) if n else ()) for n in range(len(sizes))]
    return [
        Turn(b"{}", Facts("assistant", "assistant", size, b"", rare=Rare(links=link)))
        for size, link in zip(sizes, links, strict=True)
    ]


def test_the_oldest_results_of_a_paused_turn_are_shortened_first() -> None:
    class Frames(Counting):
        def frame_tokens(self, raw: bytes, facts: Facts) -> int:
            return 30

    def sizes(end: int) -> Sizes:
        return Sizes(body[:end], 2000, format=Frames())

    body = paused(50, 900, 800, 700, 10, 2000)
    whole = sizes(6)
    assert whole.clips == {1: 230, 2: 230, 3: 230}
    assert whole.total == [0, 50, 950, 1750, 1210, 1220, 2750]
    assert whole.eased == {4, 6}
    for end in range(len(body)):
        assert sizes(end).total == whole.total[: end + 1]


@pytest.mark.parametrize(
    ("keep", "first"),
    [
        (Clause(messages=1), 4),
        (Clause(messages=2), 3),
        (Clause(messages=4), 1),
        (Clause(messages=100), 0),
        (Clause(tokens=1), 4),
        (Clause(tokens=40), 4),
        (Clause(tokens=41), 3),
        (Clause(tokens=66), 1),
        (Clause(tokens=10**6), 0),
        (Clause(fraction=0.06), 3),
    ],
)
def test_at_least_keep_stays_rounded_outward_to_a_group(keep: Clause, first: int) -> None:
    assert Sizes(BODY, None).boundary(keep, 5, 1000) == first


@given(
    st.lists(st.tuples(st.sampled_from(("user", "assistant", "tool", "tool")), st.integers(0, 500)), min_size=1),
    st.integers(1, 3000),
)
def test_the_kept_end_is_large_enough_and_one_group_less_would_not_be(
    drawn: list[tuple[str, int]], wanted: int
) -> None:
    sizes = Sizes(of(*drawn), None)
    end = len(sizes)
    first = sizes.boundary(Clause(tokens=wanted), end, None)
    assert 0 <= first < end
    assert first == 0 or sizes.total[end] - sizes.total[first] >= wanted
    assert sizes.total[end] - sizes.total[first + 1] < wanted
    by_count = sizes.boundary(Clause(messages=wanted), end, None)
    assert by_count == 0 or len(drawn) - sizes.starts[by_count] >= wanted


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=6), st.integers(100, 20_000))
def test_the_largest_results_are_held_to_one_size_so_that_the_group_fits(results: list[int], cap: int) -> None:
    body = of(("assistant", 30), *(("tool", tokens) for tokens in results))
    clips = clip_results(body, range(len(body)), cap)
    held = [clips.get(i, body[i].facts.tokens) for i in range(len(body))]
    assert len(set(clips.values())) <= 1
    assert all(level >= keeps.SMALLEST_RESULT and body[i].facts.tokens > level for i, level in clips.items())
    if clips:
        level = next(iter(clips.values()))
        assert all(body[i].facts.tokens <= level for i in range(1, len(body)) if i not in clips)
        assert sum(held) <= cap or level == keeps.SMALLEST_RESULT
        assert sum(held) > cap - len(results) or level == keeps.SMALLEST_RESULT
    else:
        assert sum(held) <= cap or max(results) <= keeps.SMALLEST_RESULT
