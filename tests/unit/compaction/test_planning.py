"""Test at which positions the planner compacts a conversation, and at which size."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.fit import NAME as FIT
from proxy.compaction.planning import Frontier, Plan, make_plan
from proxy.compaction.render import SUMMARY
from proxy.compaction.rules import Envelope, Rules, section_limits
from proxy.compaction.settings import UNBOUNDED, Bounds, Clause
from proxy.compaction.stages import evict_results
from proxy.compaction.turn import Call, Facts, Links, Rare, Turn
from proxy.dialects.chat.units import KINDS
from tests.kit.compacting import Sent, budgets, policies, rules, send
from tests.kit.conversations import (
    FORMAT,
    Counting,
    Episode,
    Message,
    assistant,
    bytes_of,
    call,
    conversations,
    expand,
    requests,
    result,
    system,
    turns,
    user,
)
from tests.kit.upstream import faults as chat_faults

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


WIDE = 1_000_000
"""Tokens. In a window of this size, only a limit on messages or bytes triggers compaction."""


def planned(messages: list[Message], policy: Rules, budget: int | None = WIDE) -> Plan:
    return make_plan(turns(messages), policy, Envelope(budget, 0, 0), FORMAT)


def chatter(count: int) -> list[Message]:
    return [(assistant if number % 2 else user)(f"Line {number}.") for number in range(count)]


def test_what_the_policy_keeps_stays_where_the_bound_leaves_room_for_it() -> None:
    policy = rules(bounds=Bounds(messages=100), keep=Clause(messages=10), prepare=())
    assert 95 - planned(chatter(95), policy).cut == 10


def test_the_next_cut_is_fixed_ahead_and_then_taken() -> None:
    policy = rules(bounds=Bounds(messages=100))
    ahead = planned(chatter(90), policy)
    assert ahead.checkpoints == ()
    assert ahead.upcoming is not None
    assert planned(chatter(96), policy).checkpoints == (ahead.upcoming,)
    assert planned(chatter(90), rules(bounds=Bounds(messages=100), prepare=())).upcoming is None


def test_messages_that_must_stay_cost_no_checkpoint_at_every_turn() -> None:
    """System messages are kept with the summary. If there are too many, a checkpoint doesn't help."""
    firm: list[Message] = [user("go"), *[system(f"Rule {number}") for number in range(120)]]
    messages = [*firm, *chatter(60)]
    plan = planned(messages, rules(bounds=Bounds(messages=100)))
    assert len(plan.checkpoints) <= 6


def test_then_results_then_a_summary() -> None:
    lines = "\n".join(f"line {number} of the log" for number in range(500))
    messages: list[Message] = [user("go")]
    for number in range(20):
        messages += [assistant(None, call(f"c{number}", "read")), result(f"c{number}", f"{number} {lines}")]
    sent = send(turns(messages), rules(bounds=Bounds(bytes=150_000)), WIDE)
    assert sent.steps == (evict_results.NAME,)
    assert bytes_of(sent.messages) <= 150_000
    words = [user("go"), *[assistant(f"{number} {lines}") for number in range(20)], user("and?")]
    sent = send(turns(words), rules(bounds=Bounds(bytes=150_000)), WIDE)
    assert sent.steps == (SUMMARY,)
    assert bytes_of(sent.messages) <= keeps.ROOM * 150_000


def test_a_result_that_is_held_to_a_size_does_not_count_with_all_its_bytes() -> None:
    huge = "\n".join(f"line {number}" for number in range(40_000))
    messages = [user("go"), assistant(None, call("c", "read")), result("c", huge), assistant("well"), user("and?")]
    policy = rules(bounds=Bounds(bytes=200_000), results=False)
    plan = make_plan(turns(messages), policy, Envelope(10_000, 0, 0), FORMAT)
    assert plan.clips
    unbounded = make_plan(turns(messages), rules(results=False), Envelope(10_000, 0, 0), FORMAT)
    assert plan.checkpoints == unbounded.checkpoints


BOUNDED = (
    rules(bounds=Bounds(messages=20)),
    rules(bounds=Bounds(messages=40), keep=Clause(messages=50)),
    rules(bounds=Bounds(messages=30, bytes=9_000), prepare=()),
    rules(bounds=Bounds(bytes=12_000)),
    rules(bounds=Bounds(bytes=6_000), media=False, results=False),
)
bounded = st.sampled_from(BOUNDED)
windows = st.sampled_from((3584, 15_000, WIDE))


def steps_of(drawn: Any, budget: int, policy: Rules, head: int) -> Iterator[tuple[list[Turn], Sent]]:
    """Yield each request of a conversation that grows turn by turn, and the messages sent."""
    messages = expand(drawn, min(budget, 15_000), head=head)
    grown = turns(messages)
    for end in requests(messages):
        yield grown[:end], send(grown[:end], policy, budget)


@settings(max_examples=settings().max_examples // 2)
@given(conversations, windows, bounded, st.integers(0, 2))
def test_between_two_checkpoints_each_request_begins_with_the_one_before(
    drawn: Any, budget: int, policy: Rules, head: int
) -> None:
    previous: Sent | None = None
    checkpoints: tuple[int, ...] = ()
    for before, sent in steps_of(drawn, budget, policy, head):
        assert chat_faults({"messages": sent.messages}) == []
        if sent.plan is not None:
            assert sent.plan.checkpoints[: len(checkpoints)] == checkpoints, "a checkpoint moved"
            checkpoints = sent.plan.checkpoints
        if previous and previous.epoch == sent.epoch and FIT not in (*previous.steps, *sent.steps):
            assert sent.raws[: len(previous.raws)] == previous.raws
            assert len(sent.raws) > len(previous.raws)
        most = policy.bounds.messages
        if most is not None and len(sent.raws) > most:
            pytest.fail(f"{len(sent.raws)} of {len(before)} messages were sent, {most} are allowed")
        previous = sent
    messages = expand(drawn, min(budget, 15_000), head=head)
    assert send(turns(messages)[: requests(messages)[-1]], policy, budget).raws == sent.raws
