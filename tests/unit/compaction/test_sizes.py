"""Test sizes of messages and groups, triggers, and loose ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.settings import Clause, any_met, lowest_level
from proxy.compaction.sizes import RetainedGroups, Sizes, clip_results
from proxy.compaction.turn import Facts, Links, Rare, Turn, faults
from proxy.dialects.chat.units import KINDS
from tests.kit.conversations import Counting, assistant, call, result, turns, user


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


@pytest.mark.parametrize(
    ("clause", "tokens", "messages", "budget", "met"),
    [
        (Clause(tokens=100), 99, 5, 1000, False),
        (Clause(tokens=100), 100, 5, None, True),
        (Clause(messages=6), 10**9, 5, 1000, False),
        (Clause(messages=6), 0, 6, None, True),
        (Clause(fraction=0.85), 849, 5, 1000, False),
        (Clause(fraction=0.85), 850, 5, 1000, True),
        (Clause(fraction=0.85), 10**9, 5, None, False),
        (Clause(fraction=0.001), 0, 5, 100, False),
        (Clause(fraction=0.001), 1, 5, 100, True),
        (Clause(tokens=100, messages=6), 100, 5, 1000, False),
        (Clause(tokens=100, messages=6), 99, 6, 1000, False),
        (Clause(tokens=100, messages=6), 100, 6, 1000, True),
        (Clause(tokens=100, fraction=0.5), 499, 1, 1000, False),
        (Clause(tokens=100, fraction=0.5), 500, 1, 1000, True),
        (Clause(messages=6, fraction=0.5), 500, 6, None, False),
        (Clause(), 10**9, 10**9, 1, False),
    ],
)
def test_all_parts_of_a_clause_hold_and_bounds_are_inclusive(
    clause: Clause, tokens: int, messages: int, budget: int | None, met: bool
) -> None:
    assert clause.met(tokens, messages, budget) is met


clauses = st.builds(
    Clause,
    tokens=st.none() | st.integers(1, 2000),
    messages=st.none() | st.integers(1, 20),
    fraction=st.none() | st.floats(0.01, 1.0),
)


@given(st.lists(clauses, max_size=3), st.integers(0, 2500), st.integers(0, 25), st.none() | st.integers(1, 2000))
def test_more_never_stops_a_trigger_and_its_level_is_where_tokens_alone_fire(
    trigger: list[Clause], tokens: int, messages: int, budget: int | None
) -> None:
    fired = any_met(tuple(trigger), tokens, messages, budget)
    if fired:
        assert any_met(tuple(trigger), tokens + 1, messages + 1, budget)
    level = lowest_level(tuple(trigger), budget)
    if level is not None:
        assert any_met(tuple(trigger), level, 0, budget)
        assert not any_met(tuple(trigger), level - 1, 0, budget)


def hashed(*sizes: tuple[str, int, bytes]) -> list[list[Turn]]:
    return [[Turn(b"{}", Facts(KINDS.get(role, ""), role, tokens, digest))] for role, tokens, digest in sizes]


def retained(groups: list[list[Turn]], most: int | None, newest: int | None = None) -> RetainedGroups:
    made = RetainedGroups(most, newest)
    for group, members in enumerate(groups):
        if members[0].facts.role == "user":
            made.skip()
        else:
            made.add(group, members, members[0].facts.tokens, pinned=members[0].facts.role == "pinned")
    return made


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("system", "user", "pinned")), st.integers(1, 50), st.sampled_from((b"a", b"b", b"c"))
        )
    ),
    st.integers(1, 120),
)
def test_each_cut_depends_on_what_comes_before_it_alone(drawn: list[tuple[str, int, bytes]], most: int) -> None:
    groups = hashed(*drawn)
    whole = retained(groups, most)
    sizes = [members[0].facts.tokens for members in groups]
    assert whole.totals(sizes) == whole.tokens
    for cut in range(len(groups) + 1):
        assert retained(groups[:cut], most).groups(cut) == whole.groups(cut)
        system = [group for group in whole.groups(cut) if drawn[group][0] == "system"]
        assert sum(sizes[group] for group in system) <= most or len(system) == 1
        newest = [group for group in range(cut) if drawn[group][0] == "system"][-1:]
        assert system[-1:] == newest


LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], 0),
        ([user("go"), assistant("done")], 0),
        ([assistant(None, call("a"), call("b")), result("b", ""), result("a", "")], 0),
        ([assistant(None, call("a")), result("a", ""), assistant(None, call("a")), result("a", "")], 0),
        ([assistant(None, call("ls", "ls")), result("ls", "")], 0),
        ([LEGACY, {"role": "function", "name": "f", "content": ""}], 0),
        ([assistant(None, call("a"))], 1),
        ([assistant(None, call("a"), call("b")), result("a", ""), user("go")], 1),
        ([result("a", "")], 1),
        ([assistant(None, call("a")), result("a", ""), result("a", "")], 1),
        ([assistant(None, call("a")), user("go"), result("a", "")], 2),
        ([LEGACY, user("go")], 1),
        ([{"role": "function", "name": "f", "content": ""}], 1),
        ([assistant(None, call("a")), {"role": "tool", "content": "no id"}], 2),
    ],
)
def test_each_loose_end_counts(messages: list[Any], found: int) -> None:
    assert faults([turn.facts for turn in turns(messages)]) == found
