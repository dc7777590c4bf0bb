"""Test building the outgoing messages from a plan."""

from __future__ import annotations

import pytest

from proxy.compaction.planning import Frontier, Plan
from proxy.compaction.render import REMEMBERED_BYTES, OutgoingMessage, render
from proxy.compaction.rules import SectionLimits
from proxy.dialects.units import decode
from tests.kit.compacting import rules
from tests.kit.conversations import FORMAT, Counting, assistant, call, message_tokens, result, system, turn, turns, user

CAPS = SectionLimits(100, 100, 100, 100, 100, 100, 1000)
SUMMARY = OutgoingMessage(b'{"role":"user","content":"so far"}', 9, None)
LONG = "\n".join(f"line {n} of a long output" for n in range(300))
CONVERSATION = [
    system("head"),
    user("go"),
    assistant(None, call("a", "t")),
    result("a", LONG),
    system("mind the gap"),
    assistant(None, call("b", "write_file", content="x" * 3000)),
    result("b", LONG),
    user("and now?"),
]


def rendered(plan: Plan, summary: OutgoingMessage | None = None) -> tuple[list[object], tuple[str, ...]]:
    out = render(turns(CONVERSATION), 1, plan, rules(), summary, FORMAT)
    assert out.tokens == sum(piece.tokens for piece in out.pieces)
    return [decode(piece.raw) for piece in out.pieces], out.steps


def test_an_empty_plan_changes_nothing() -> None:
    assert rendered(Plan(CAPS)) == (CONVERSATION, ())


def test_the_summary_stands_after_the_head_and_system_messages_behind_it() -> None:
    messages, steps = rendered(Plan(CAPS, checkpoints=(2, 6), retained=(3,)), SUMMARY)
    assert messages == [CONVERSATION[0], decode(SUMMARY.raw), CONVERSATION[4], CONVERSATION[7]]
    assert steps == ("summary",)


def test_a_cut_without_a_summary_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a summary"):
        rendered(Plan(CAPS, checkpoints=(2,)))


def test_stages_apply_up_to_their_frontiers() -> None:
    messages, steps = rendered(Plan(CAPS, frontiers={"evict_results": Frontier(4, 7), "truncate_args": Frontier(5, 7)}))
    changed = [n for n, (before, after) in enumerate(zip(CONVERSATION, messages, strict=True)) if before != after]
    assert (changed, steps) == ([3, 5], ("truncate_args", "evict_results"))
    nearer = Plan(CAPS, frontiers={"evict_results": Frontier(2, 7), "truncate_args": Frontier(4, 7)})
    assert rendered(nearer) == (CONVERSATION, ())


def test_a_result_is_held_to_its_size() -> None:
    messages, steps = rendered(Plan(CAPS, clips={5: 250}))
    assert steps == ("evict_results",)
    assert messages[:6] == CONVERSATION[:6]
    assert 150 < message_tokens(messages[6]) <= 250


def test_a_form_that_is_small_enough_is_not_held_to_a_size() -> None:
    by_stage, _ = rendered(Plan(CAPS, frontiers={"evict_results": Frontier(6, 7)}))
    both, _ = rendered(Plan(CAPS, frontiers={"evict_results": Frontier(6, 7)}, clips={5: 900}))
    assert both == by_stage


def test_a_copy_is_left_out_only_where_the_later_one_has_been_seen() -> None:
    messages, steps = rendered(Plan(CAPS, frontiers={"duplicates": Frontier(3, 6)}))
    assert steps == ("duplicates",)
    assert "a later call" in str(messages[3])
    assert rendered(Plan(CAPS, frontiers={"duplicates": Frontier(3, 5)})) == (CONVERSATION, ())


def test_the_carried_message_and_pinned_ones_stand_after_the_summary_as_they_came() -> None:
    plan = Plan(
        CAPS, checkpoints=(4,), current_user_message={4: 0}, retained=(1, 2, 3), pinned=frozenset({2}), clips={2: 30}
    )
    messages, _ = rendered(plan, SUMMARY)
    assert messages[:2] == [CONVERSATION[0], decode(SUMMARY.raw)]
    assert messages[2:] == CONVERSATION[1:5] + CONVERSATION[5:]


def test_what_is_carried_is_held_to_its_part_of_the_budget() -> None:
    long = [user("word " * 2000), assistant(None, call("a", "t")), result("a", "x")]
    plan = Plan(CAPS, checkpoints=(1,), current_user_message={1: 0}, clips={0: 300})
    out = render(turns(long), 0, plan, rules(), SUMMARY, FORMAT)
    assert 200 < out.pieces[1].tokens <= 300
    assert out.pieces[1].turn is not None
    assert out.pieces[1].turn.facts.id in str(decode(out.pieces[1].raw))


def test_what_was_held_to_a_size_is_remembered_unless_it_is_large() -> None:
    counting = Counting()
    small, large = (turn(result("a", LONG * n)) for n in (1, 60))
    for one in (small, large):
        plan = Plan(CAPS, clips={0: one.facts.tokens - 10})
        first = render([one], 0, plan, rules(), None, counting).pieces
        calls = counting.counts
        assert render([one], 0, plan, rules(), None, counting).pieces == first
        assert (counting.counts == calls) == (len(first[0].raw) <= REMEMBERED_BYTES)
    assert len(small.facts.forms) == 1
    assert not large.facts.forms
