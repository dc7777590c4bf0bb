"""Test the positions at which the planner compacts a conversation."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.planning import Frontier, Plan, make_plan
from proxy.compaction.rules import Envelope, Rules, section_limits
from proxy.compaction.settings import UNBOUNDED, Bounds, Clause
from proxy.compaction.turn import Call, Facts, Links, Rare, Turn
from proxy.dialects.chat.units import KINDS
from tests.kit.compacting import budgets, policies, rules
from tests.kit.conversations import (
    FORMAT,
    Counting,
    Episode,
    assistant,
    call,
    conversations,
    expand,
    requests,
    result,
    turns,
    user,
)

PLAIN = rules(arguments=False, results=False)


def of(*sizes: tuple[str, int]) -> list[Turn]:
    return [Turn(b"{}", Facts(KINDS.get(role, ""), role, tokens, b"")) for role, tokens in sizes]


def plan_of(body: list[Turn], policy: Rules = PLAIN, budget: int | None = 10_000, overhead: int = 0) -> Plan:
    return make_plan(body, policy, Envelope(budget, overhead, 1), Counting())


def steps(number: int, tokens: int) -> list[tuple[str, int]]:
    return [("assistant", tokens)] * number


def test_nothing_is_done_below_the_trigger_and_a_checkpoint_is_made_at_it() -> None:
    """The planner rounds to steps of 64 tokens, so the budget is 9,984 and the trigger's level 8,486."""
    below = plan_of(of(*steps(8, 1000), ("user", 485)))
    assert below.empty
    at = plan_of(of(*steps(8, 1000), ("user", 486)))
    assert at.checkpoints == (7,)
    assert at.cut == 7


def test_tools_and_head_count() -> None:
    body = of(*steps(7, 1000), ("user", 800))
    assert plan_of(body).empty
    assert not plan_of(body, overhead=1000).empty


def test_messages_fire_inclusively_with_the_head_and_the_summary_counted() -> None:
    policy = rules(trigger=(Clause(messages=6),), keep=Clause(messages=2), prepare=(), arguments=False, results=False)
    assert plan_of(of(*steps(4, 300)), policy).empty
    assert plan_of(of(*steps(5, 300)), policy, budget=3000).checkpoints == (3,)
    # The checkpoint leaves the head, the summary, and two messages. Two more make six.
    assert plan_of(of(*steps(6, 300)), policy, budget=3000).checkpoints == (3,)
    assert plan_of(of(*steps(7, 300)), policy, budget=3000).checkpoints == (3, 5)


def test_without_a_known_budget_fractions_never_fire_and_tokens_do() -> None:
    body = of(*steps(30, 1000))
    assert plan_of(body, PLAIN, budget=None).empty
    by_tokens = rules(trigger=(Clause(tokens=20_000),), keep=Clause(messages=6), arguments=False, results=False)
    assert plan_of(body, by_tokens, budget=None).checkpoints


def test_a_checkpoint_leaves_room_to_grow_even_if_less_than_keep_stays() -> None:
    greedy = rules(keep=Clause(fraction=0.80), prepare=(), arguments=False, results=False)
    body = of(*steps(9, 1000))
    plan = plan_of(body, greedy)
    limits = section_limits(greedy, Envelope(10_000, 0, 1).rounded())
    kept = sum(turn.facts.tokens for turn in body[plan.cut :])
    assert plan.cut
    assert kept + limits.summary + limits.index <= keeps.ROOM_TO_GROW * 8486


def test_cheap_stages_come_first_and_a_summary_only_where_they_are_not_enough() -> None:
    exchange = [assistant(None, call("a", "t")), result("a", "word " * 1600)]
    body = turns([user("go")] + exchange * 5)
    plan = plan_of(body, rules(duplicates=False))
    assert plan.checkpoints == ()
    assert plan.frontiers == {"evict_results": Frontier(9, 11)}
    talk = turns([user("go"), *[assistant("word " * 1600), user("on")] * 5])
    assert plan_of(talk, rules()).cut > 0


def test_a_frontier_stays_until_the_trigger_is_met_again() -> None:
    exchange = [assistant(None, call("a", "t")), result("a", "word " * 1600)]
    body = turns([user("go")] + exchange * 9)
    policy = rules(duplicates=False)
    plans = [plan_of(body[:end], policy) for end in range(1, len(body) + 1, 2)]
    frontiers = [plan.frontiers["evict_results"].position if plan.frontiers else 0 for plan in plans]
    assert frontiers == sorted(frontiers)
    assert len(set(frontiers)) == 3


def test_results_of_one_exchange_that_no_prompt_could_hold_are_held_to_a_size() -> None:
    calls = [call(f"c{n}", "t") for n in range(3)]
    body = turns([user("go"), assistant(None, *calls), *(result(f"c{n}", "word " * 9000) for n in range(3))])
    plan = plan_of(body, rules())
    assert set(plan.clips) == {2, 3, 4}
    assert sum(plan.clips.values()) <= (plan.limits.group or 0)


@settings(max_examples=settings().max_examples * 2 // 3)
@given(conversations, policies, budgets, st.sampled_from([UNBOUNDED, Bounds(messages=20), Bounds(bytes=30_000)]))
def test_a_growing_conversation_has_the_plans_that_its_parts_have_alone(
    drawn: list[Episode], policy: Rules, budget: int, bounds: Bounds
) -> None:
    messages, policy = expand(drawn, budget), replace(policy, bounds=bounds)
    growing, envelope = turns(messages), Envelope(budget, 0, 0)
    for end in requests(messages):
        alone = make_plan(turns(messages[:end]), policy, envelope, FORMAT)
        assert make_plan(growing[:end], policy, envelope, FORMAT) == alone


def program(name: str, calls: int, tokens: int) -> list[Turn]:
    """Return a program that calls the client several times, each with a result of this size."""
    body = []
    for number in range(calls):
        rare = Rare(links=Links(refers=(name,)) if number else Links(names=(name,)))
        body.append(Turn(b"{}", Facts("assistant", "assistant", 30, b"", calls=(Call("c", "f"),), rare=rare)))
        body.append(Turn(b"{}", Facts("result", "tool", tokens, b"", answers="c")))
    return body


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(10, 1500)), min_size=2, max_size=12))
def test_a_request_inside_a_program_has_the_checkpoints_that_the_whole_has(drawn: list[tuple[int, int]]) -> None:
    body = of(("user", 40))
    for number, (calls, tokens) in enumerate(drawn):
        body += program(str(number), calls, tokens)
    plans = [plan_of(body[:end]) for end in range(1, len(body) + 1, 2)]
    for earlier, later in pairwise(plans):
        assert [*later.seen.items()][: len(earlier.seen)] == [*earlier.seen.items()]
