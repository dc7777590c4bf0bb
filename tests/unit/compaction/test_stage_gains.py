"""Test the savings that stages report to the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from proxy.compaction.gains import Gains, LateGains, stage_gains
from proxy.compaction.sizes import Sizes
from proxy.compaction.stages import ArgumentRules
from proxy.compaction.turn import Turn
from tests.kit.compacting import rules
from tests.kit.conversations import FORMAT, assistant, call, result, turns, user

LONG = "word " * 2000
BODY = turns([user("go"), assistant(None, call("a")), result("a", LONG), assistant(None, call("b")), result("b", "ok")])


def gains_of(
    body: Sequence[Turn], pinned: frozenset[int] = frozenset(), *, duplicates: bool = False
) -> tuple[dict[str, Gains], dict[str, list[int]]]:
    policy = rules(duplicates=duplicates)
    return stage_gains(policy.applied_to(body, FORMAT), body, Sizes(body, None), pinned)


def test_savings_are_reported_by_stage_and_group() -> None:
    gains, lighter = gains_of(BODY)
    assert isinstance(gains["evict_results"], Gains)
    saved = gains["evict_results"].potential(0, 3, 3)
    assert 0 < saved < BODY[2].facts.tokens
    assert gains["evict_results"].potential(1, 2, 3) == saved
    assert lighter["evict_results"][0] == lighter["evict_results"][2] == 0
    assert 0 < lighter["evict_results"][1] < len(BODY[2].raw)


def test_pinned_messages_save_nothing() -> None:
    gains, lighter = gains_of(BODY, frozenset({2}))
    assert gains["evict_results"].potential(0, 3, 3) == 0
    assert lighter["evict_results"] == [0, 0, 0]


def test_a_repeated_result_saves_tokens_once_its_copy_has_arrived() -> None:
    gains, lighter = gains_of(repeated("word " * 150), duplicates=True)
    late = gains["duplicates"]
    assert isinstance(late, LateGains)
    assert not any(lighter["duplicates"])
    assert late.potential(0, 2, 2) == 0
    assert late.potential(0, 2, 3) > 0


def test_a_repeated_result_counts_only_savings_beyond_other_stages() -> None:
    body = repeated(LONG)
    gains, _ = gains_of(body, duplicates=True)
    shortened = body[2].facts.tokens - gains["evict_results"].potential(1, 2, 4)
    assert gains["duplicates"].potential(0, 2, 4) < shortened


def repeated(text: str) -> list[Turn]:
    exchanges = [message for id_ in "ab" for message in (assistant(None, call(id_)), result(id_, text))]
    return turns([user("go"), *exchanges, user("on")])


def test_a_plan_saves_tokens_once_there_is_a_newer_one() -> None:
    plans = [(assistant(None, call(id_, "TodoWrite", text=LONG)), result(id_, "ok")) for id_ in "ab"]
    body = turns(
        [user("go"), *plans[0], assistant(None, call("c", "write_file", text=LONG)), result("c", "ok"), *plans[1]]
    )
    policy = replace(rules(), stages=(ArgumentRules(tools=("*",)),))
    gains, lighter = stage_gains(policy.applied_to(body, FORMAT), body, Sizes(body, None), frozenset())
    late = gains["truncate_args"]
    assert isinstance(late, LateGains)
    other = late.potential(0, 3, 3)
    assert other > 0
    assert late.potential(1, 2, 3) == 0
    assert late.potential(1, 2, 4) > 0
    assert late.potential(3, 4, 4) == 0, "the newest plan stays"
    assert [bool(saved) for saved in lighter["truncate_args"]] == [False, False, True, False]
    stage = policy.applied_to(body, FORMAT)[0]
    assert stage.later() == {1: 5}
    assert [stage.reduce(index, body[index]) is None for index in (1, 3, 5)] == [False, False, True]
