"""Test the limits on messages and bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.fit import NAME as FIT
from proxy.compaction.planning import Plan, make_plan
from proxy.compaction.render import SUMMARY
from proxy.compaction.rules import Envelope, Rules
from proxy.compaction.settings import Bounds, Clause
from proxy.compaction.stages import evict_results
from proxy.compaction.turn import Turn
from tests.kit.compacting import Sent, rules, send
from tests.kit.conversations import (
    FORMAT,
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
