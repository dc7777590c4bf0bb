"""Test when a clause is met."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.settings import Clause, any_met, lowest_level


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
