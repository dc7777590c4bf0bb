"""Test the conversion of checkpoints into a plan."""

from __future__ import annotations

from proxy.compaction.planning import Frontier, Plan, assemble_plan
from proxy.compaction.rules import SectionLimits
from proxy.compaction.sizes import RetainedGroups, Sizes
from tests.kit.conversations import assistant, call, result, system, turns, user

LIMITS = SectionLimits(summary=100, users=100, newest=50, system=100, words=40, index=40, group=None)
BODY = turns(
    [
        user("task " * 200),
        system("rule"),
        assistant(None, call("a")),
        result("a", "done"),
        assistant(None, call("b")),
        result("b", "done"),
    ]
)


def assembled(checkpoints: list[int], pending: int | None = None, pinned: frozenset[int] = frozenset()) -> Plan:
    sizes = Sizes(BODY, None, pinned, RetainedGroups(LIMITS.system, LIMITS.newest))
    made = {checkpoint: len(sizes) for checkpoint in checkpoints}
    return assemble_plan(BODY, sizes, {}, LIMITS, pinned, made, pending)


def test_without_checkpoints_the_plan_is_empty() -> None:
    plan = assembled([])
    assert plan.empty
    assert plan.cut == 0


def test_group_indexes_become_message_indexes() -> None:
    plan = assembled([2], pending=3)
    assert plan.checkpoints == (2,)
    assert plan.upcoming == 4
    assert plan.cut == 2
    assert not plan.empty
    assert plan.seen == {2: len(BODY)}
    assert plan.replaced == {at: sum(turn.facts.tokens for turn in BODY[:at]) for at in (2, 4)}


def test_the_newest_user_message_is_kept_and_its_text_is_limited() -> None:
    plan = assembled([2])
    assert plan.current_user_message == {2: 0}
    assert plan.retained == (1,)
    assert plan.clips == {0: LIMITS.newest}


def test_pinned_messages_are_kept_without_a_limit() -> None:
    plan = assembled([2], pinned=frozenset({0}))
    assert plan.retained == (0, 1)
    assert plan.current_user_message == {}
    assert plan.clips == {}


def test_a_plan_with_only_a_frontier_is_not_empty() -> None:
    assert not Plan(LIMITS, frontiers={"evict_results": Frontier(2, 4)}).empty


def test_limits_shrink_with_the_replaced_tokens() -> None:
    plan = Plan(LIMITS, checkpoints=(4,), replaced={4: 80})
    assert plan.limits_at(4) == LIMITS.for_span(80)
    assert plan.limits_at(4).summary == 40
