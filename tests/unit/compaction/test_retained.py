"""Test which messages are kept with a summary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.sizes import RetainedGroups
from proxy.compaction.turn import Facts, Turn
from proxy.dialects.chat.units import KINDS
from tests.kit.compacting import rules, send
from tests.kit.conversations import assistant, message_tokens, system, text_of_size, turns, user


def of(*sizes: tuple[str, int, bytes]) -> list[list[Turn]]:
    return [[Turn(b"{}", Facts(KINDS.get(role, ""), role, tokens, digest))] for role, tokens, digest in sizes]


def retained(groups: list[list[Turn]], most: int | None, newest: int | None = None) -> RetainedGroups:
    made = RetainedGroups(most, newest)
    for group, members in enumerate(groups):
        if members[0].facts.role == "user":
            made.skip()
        else:
            made.add(group, members, members[0].facts.tokens, pinned=members[0].facts.role == "pinned")
    return made


def test_the_newest_stay_within_the_budget_and_repeats_count_once() -> None:
    groups = of(
        ("system", 10, b"a"), ("user", 5, b"u"), ("pinned", 50, b"p"), ("system", 20, b"b"), ("system", 10, b"a")
    )
    made = retained([*groups, *of(("developer", 15, b"c"))], 30)
    assert [made.groups(cut) for cut in range(7)] == [[], [0], [0], [0, 2], [0, 2, 3], [2, 3, 4], [2, 4, 5]]
    assert made.tokens == [0, 10, 10, 60, 80, 80, 75]
    assert made.messages == [0, 1, 1, 2, 3, 3, 3]


def test_the_newest_stays_whatever_its_size_and_counts_as_it_is_held() -> None:
    made = retained(of(("system", 10, b"a"), ("system", 500, b"b"), ("system", 10, b"c")), 30, 100)
    assert [made.groups(cut) for cut in range(4)] == [[], [0], [1], [2]]
    assert made.tokens == [0, 10, 100, 10]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("system", "user", "pinned")), st.integers(1, 50), st.sampled_from((b"a", b"b", b"c"))
        )
    ),
    st.integers(1, 120),
)
def test_each_cut_depends_on_what_comes_before_it_alone(drawn: list[tuple[str, int, bytes]], most: int) -> None:
    groups = of(*drawn)
    whole = retained(groups, most)
    sizes = [members[0].facts.tokens for members in groups]
    assert whole.totals(sizes) == whole.tokens
    for cut in range(len(groups) + 1):
        assert retained(groups[:cut], most).groups(cut) == whole.groups(cut)
        system = [group for group in whole.groups(cut) if drawn[group][0] == "system"]
        assert sum(sizes[group] for group in system) <= most or len(system) == 1
        newest = [group for group in range(cut) if drawn[group][0] == "system"][-1:]
        assert system[-1:] == newest


@pytest.mark.parametrize("reminder", [60, 160])
@pytest.mark.parametrize("same", [False, True])
def test_a_reminder_in_each_of_400_turns_costs_no_more_summaries_than_the_same_text_from_the_user(
    reminder: int, same: bool
) -> None:
    def sent(*, reminded: bool) -> tuple[int, int]:
        history = [system("head")]
        for turn in range(400):
            text = f"Reminder {0 if same else turn}: {text_of_size(reminder, 0, 0 if same else turn)}"
            question = f"Question {turn}: {text_of_size(100, 0, turn)}"
            history += [system(text), user(question)] if reminded else [user(f"{text} {question}")]
            history.append(assistant(text_of_size(100, 1, turn)))
        outcome = send(turns([*history[:-1]]), rules(), 7168)
        assert outcome.plan is not None
        assert outcome.tokens == sum(message_tokens(message) for message in outcome.messages)
        return len(outcome.plan.checkpoints), outcome.tokens

    (summaries, tokens), (usual, _) = sent(reminded=True), sent(reminded=False)
    assert usual <= summaries <= usual * 1.4 + 1
    assert tokens < 7168
