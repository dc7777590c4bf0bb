"""Test the conversion of a policy to compaction rules."""

from typing import Any

from proxy.compaction.settings import UNBOUNDED, Bounds, Clause, any_met
from proxy.compaction.stages import ArgumentRules, ResultRules
from proxy.config import Policy
from proxy.limits.profiles import Profile
from proxy.pipeline.budget import AFTER_REFUSAL, MUST_FIT, bounds_of, rules_for


def policy(**stated: Any) -> Policy:
    return Policy.build("p", stated)


def test_the_default_policy() -> None:
    rules = rules_for(policy(), window_known=True)
    assert rules.trigger == (Clause(fraction=0.85), MUST_FIT)
    assert rules.keep == Clause(fraction=0.10)
    assert rules.prepare == (Clause(fraction=0.75),)
    arguments, results = rules.stage(ArgumentRules), rules.stage(ResultRules)
    assert arguments is not None
    assert results is not None
    # The stages have no trigger of their own, so a summary waits for them.
    assert arguments.trigger == results.trigger == rules.trigger
    assert (arguments.max_length, results.max_tokens) == (2000, 2000)
    assert "write_file" in arguments.tools
    assert "ls" in results.exclude
    assert (rules.summary_tokens, rules.user_messages.max_tokens, rules.index.max_tokens) == (4000, 20_000, 4000)
    assert not rules.shorten_last_user_message


def test_every_setting_of_a_policy_reaches_the_core() -> None:
    rules = rules_for(
        policy(
            trigger={"tokens": 500},
            keep={"messages": 3},
            prepare={"tokens": 400},
            truncate_args={"max_length": 9, "truncation_text": "~", "tools": ["t"], "keep": {"messages": 1}},
            evict_results={"max_tokens": 8, "exclude": ["x"], "trigger": {"tokens": 100}},
            summary={"max_tokens": 1},
            user_messages={"max_tokens": 2},
            index={"max_tokens": 3},
            shorten_last_user_message=True,
        ),
        window_known=True,
    )
    assert (rules.keep, rules.prepare) == (Clause(messages=3), (Clause(tokens=400),))
    arguments, results = rules.stage(ArgumentRules), rules.stage(ResultRules)
    assert arguments is not None
    assert results is not None
    assert (arguments.max_length, arguments.truncation_text, arguments.tools) == (
        9,
        "~",
        ("t",),
    )
    assert (arguments.trigger, arguments.keep) == (rules.trigger, Clause(messages=1))
    assert (results.max_tokens, results.exclude) == (8, ("x",))
    assert (results.trigger, results.keep) == ((Clause(tokens=100),), Clause(messages=3))
    assert (rules.summary_tokens, rules.user_messages.max_tokens, rules.index.max_tokens) == (1, 2, 3)
    assert rules.shorten_last_user_message


def test_a_policy_without_a_trigger_never_compacts_until_a_refusal() -> None:
    never = policy(trigger=[])
    assert rules_for(never, window_known=True).trigger == ()
    assert rules_for(never, window_known=True, refused=True).trigger == AFTER_REFUSAL


def test_where_the_window_is_unknown_the_policys_figures_for_that_case_hold() -> None:
    rules = rules_for(policy(), window_known=False)
    assert rules.trigger == (Clause(tokens=170_000),)
    assert rules.keep == Clause(messages=6)
    arguments, results = rules.stage(ArgumentRules), rules.stage(ResultRules)
    assert arguments is not None
    assert results is not None
    assert arguments.trigger == results.trigger == rules.trigger
    assert arguments.keep == results.keep == rules.keep


def test_after_a_refusal_there_is_a_trigger_that_fires() -> None:
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"trigger": []},
        {"trigger": {"messages": 1000}},
        {"trigger": {"tokens": 10**9}},
    )
    for stated in cases:
        rules = rules_for(policy(**stated), window_known=True, refused=True)
        assert any_met(rules.trigger, 10_001, 3, 10_000)
        assert rules.stage(ArgumentRules) is not None


def test_bounds_hold_under_every_policy_that_compacts_at_all() -> None:
    bounds = bounds_of(Profile("m", max_bytes=1000, max_messages=10))
    assert bounds == Bounds(messages=10, bytes=1000)
    assert rules_for(policy(), window_known=True, bounds=bounds).bounds == bounds
    assert rules_for(policy(), window_known=False, bounds=bounds).bounds == bounds
    assert rules_for(policy(), window_known=True).bounds == UNBOUNDED
    never = policy(trigger=None)
    assert rules_for(never, window_known=True, bounds=bounds).bounds == UNBOUNDED
    assert rules_for(never, window_known=True, refused=True, bounds=bounds).bounds == bounds


def test_a_price_step_stands_for_tokens_and_for_nothing_without_one() -> None:
    stated = policy(trigger=[{"price_step": True}, {"fraction": 0.8}])
    rules = rules_for(stated, window_known=True, price_step=97_000)
    assert any_met(rules.trigger, 97_000, 3, 1_000_000)
    assert not any_met(rules.trigger, 96_999, 3, 1_000_000)
    assert any_met(rules.prepare, 97_000 * 15 // 17, 3, 1_000_000)
    results = rules.stage(ResultRules)
    assert results is not None
    assert results.trigger == rules.trigger
    without = rules_for(stated, window_known=True)
    assert without.trigger == (Clause(fraction=0.8), MUST_FIT)
    alone = rules_for(policy(trigger={"price_step": True}), window_known=True)
    assert (alone.trigger, alone.prepare) == ((MUST_FIT,), ())
    both = rules_for(policy(trigger={"price_step": True, "messages": 5}), window_known=True, price_step=100)
    assert not any_met(both.trigger, 100, 4, 1_000)
    assert any_met(both.trigger, 100, 5, 1_000)
