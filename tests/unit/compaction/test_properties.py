"""Test properties of every conversation, for any length, window, and policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.planning import Frontier, Plan
from proxy.compaction.render import SUMMARY
from proxy.compaction.rules import Rules
from proxy.compaction.settings import share_of
from proxy.compaction.summary_message import TAG
from proxy.compaction.turn import Turn, faults, head_length
from tests.kit.compacting import FIXED, POLICIES, Sent, budgets, policies, rules, send
from tests.kit.conversations import FORMAT, Episode, conversations, expand, message_tokens, requests, turns
from tests.kit.upstream import faults as chat_faults

heads = st.integers(0, 2)

EXAMPLES = settings().max_examples
"""Examples of each test. ``--full`` draws more."""

FEW, MANY = EXAMPLES * 2 // 5, EXAMPLES * 12 // 5
"""Examples of tests that send every turn of a conversation, and of the test with arbitrary JSON."""


def sent_of(drawn: Any, budget: int, policy: Rules, head: int) -> tuple[list[Turn], Sent]:
    messages = expand(drawn, budget, head=head)
    before = turns(messages[: requests(messages)[-1]])
    return before, send(before, policy, budget)


def is_summary(raw: bytes) -> bool:
    return f"<{TAG}>\\n".encode() in raw and raw.startswith(b'{"role":"user","content":"<' + TAG.encode())


@given(conversations, budgets, policies, heads)
def test_the_outcome_is_a_valid_conversation(drawn: Any, budget: int, policy: Rules, head: int) -> None:
    before, sent = sent_of(drawn, budget, policy, head)
    assert chat_faults({"messages": [msgspec.json.decode(t.raw) for t in before]}) == []
    assert chat_faults({"messages": [msgspec.json.decode(raw) for raw in sent.raws]}) == []


@given(conversations, budgets, policies, heads)
def test_what_is_not_compacted_keeps_its_bytes_and_its_order(drawn: Any, budget: int, policy: Rules, head: int) -> None:
    before, sent = sent_of(drawn, budget, policy, head)
    places = {id(turn): place for place, turn in enumerate(before)}
    kept = [(places[id(piece.turn)], piece) for piece in sent.pieces if piece.turn is not None]
    assert [place for place, _ in kept] == sorted({place for place, _ in kept})
    assert sent.raws[: head_length(before)] == [turn.raw for turn in before[: head_length(before)]]
    shortened = [piece for _, piece in kept if piece.turn and piece.raw != piece.turn.raw]
    assert all(piece.turn and piece.tokens < piece.turn.facts.tokens for piece in shortened)
    assert all(piece.tokens == message_tokens(msgspec.json.decode(piece.raw)) for piece in sent.pieces)
    if "fit" not in sent.steps:
        held = sent.plan.current_user_message.get(sent.plan.cut, ()) if sent.plan is not None else ()
        may_change = [p.turn for p in shortened if p.turn and places[id(p.turn)] - head_length(before) not in held]
        assert all(t.facts.calls or t.facts.answers or t.facts.media or legacy(t.raw) for t in may_change)
    dropped = [turn for place, turn in enumerate(before) if place not in dict(kept)]
    # Of identical system messages, one is enough. The oldest are dropped if all of them take too much.
    known = {piece.turn.facts.digest for _, piece in kept if piece.turn}
    body = before[head_length(before) :]
    omitted = set() if sent.plan is None else {body[i].facts.digest for i in sent.plan.omitted.get(sent.plan.cut, ())}
    assert all(turn.facts.digest in known | omitted for turn in dropped if turn.facts.kind == "system")
    if sent.plan is None:
        assert sent.raws == [turn.raw for turn in before]
    else:
        assert sent.tokens < sum(turn.facts.tokens for turn in before)


def legacy(raw: bytes) -> bool:
    return bool(msgspec.json.decode(raw)["role"] == "function")


@given(conversations, budgets, policies, heads)
def test_there_is_one_summary_right_after_the_head(drawn: Any, budget: int, policy: Rules, head: int) -> None:
    before, sent = sent_of(drawn, budget, policy, head)
    places = [place for place, piece in enumerate(sent.pieces) if piece.turn is None]
    if sent.plan is not None and sent.plan.cut:
        assert places == [head_length(before)]
        assert SUMMARY in sent.steps
        assert is_summary(sent.raws[places[0]])
    else:
        assert places == []
        assert SUMMARY not in sent.steps


@given(conversations, budgets, policies, heads)
def test_the_last_words_of_the_user_are_sent_as_they_are(drawn: Any, budget: int, policy: Rules, head: int) -> None:
    """This includes a message before the checkpoint, unless it exceeds its share of the budget."""
    before, sent = sent_of(drawn, budget, policy, head)
    last = [turn for turn in before if turn.facts.role == "user"][-1]
    if last.facts.rare.foreign:
        return  # it looks like another tool's summary, so the proxy merges it into its own
    (piece,) = [piece for piece in sent.pieces if piece.turn is last]
    held = sent.plan is not None and last.facts.tokens > sent.plan.limits.newest
    assert policy.shorten_last_user_message or held or piece.raw == last.raw


# Exchanges that fill the window several times, as in a long agent run.
sessions = st.lists(
    st.builds(
        Episode,
        kind=st.sampled_from(("tools", "tools", "tools", "write", "ask", "say")),
        size=st.sampled_from((20, 60, 60, 100, 150)),
        calls=st.integers(1, 3),
        flavour=st.integers(0, 6),
        seed=st.integers(0, 99),
    ),
    min_size=12,
    max_size=45,
)


def position(plan: Plan, name: str) -> int:
    return plan.frontiers[name].position if name in plan.frontiers else 0


narrow = st.sampled_from((1792, 3584, 7168))


def steps_of(drawn: Any, budget: int, policy: Rules, head: int) -> Iterator[tuple[list[Turn], Sent]]:
    """Yield each request of a conversation that grows turn by turn."""
    messages = expand(drawn, budget, head=head)
    grown = turns(messages)
    for end in requests(messages):
        yield grown[:end], send(grown[:end], policy, budget)


@settings(max_examples=FEW)
@given(sessions | conversations, narrow, policies, heads)
def test_between_two_checkpoints_each_request_begins_with_the_one_before(
    drawn: Any, budget: int, policy: Rules, head: int
) -> None:
    """The fit ladder changes a single request and doesn't affect later ones."""
    previous: Sent | None = None
    for _, sent in steps_of(drawn, budget, policy, head):
        if previous and previous.epoch == sent.epoch and "fit" not in (*previous.steps, *sent.steps):
            assert sent.raws[: len(previous.raws)] == previous.raws
            assert len(sent.raws) > len(previous.raws)
        previous = sent


@settings(max_examples=FEW)
@given(sessions | conversations, narrow, policies, heads)
def test_checkpoints_never_move_and_do_not_depend_on_how_the_conversation_came(
    drawn: Any, budget: int, policy: Rules, head: int
) -> None:
    checkpoints: tuple[int, ...] = ()
    frontiers: dict[str, Frontier] = {}
    for _, sent in steps_of(drawn, budget, policy, head):
        if sent.plan is not None:
            assert sent.plan.checkpoints[: len(checkpoints)] == checkpoints
            assert list(sent.plan.checkpoints) == sorted(set(sent.plan.checkpoints))
            assert all(max(position(sent.plan, n), sent.plan.cut) >= f.position for n, f in frontiers.items())
            checkpoints, frontiers = sent.plan.checkpoints, sent.plan.frontiers
    messages = expand(drawn, budget, head=head)
    assert send(turns(messages)[: requests(messages)[-1]], policy, budget).raws == sent.raws


@settings(max_examples=FEW)
@given(sessions | conversations, narrow, heads)
def test_old_messages_change_only_where_the_trigger_is_reached(drawn: Any, budget: int, head: int) -> None:
    """A checkpoint is made only if the request without it would reach the trigger.

    The summary counts with its limit. The planner rounds sizes in steps of 1 %. The stage for duplicates is off here,
    because the planner underestimates its savings.
    """
    previous: tuple[int, Sent] | None = None
    for before, sent in steps_of(drawn, budget, rules(duplicates=False), head):
        if previous is not None and previous[1].epoch != sent.epoch and "fit" not in previous[1].steps:
            length, last = previous
            size = FIXED + sum(piece.tokens for piece in last.pieces if piece.turn is not None)
            # A message that is shortened to a size may be slightly smaller.
            if last.plan is not None:
                start = head_length(before)
                shown = {id(piece.turn): piece.tokens for piece in last.pieces}
                held = last.plan.clips.items()
                size += sum(tokens - shown[id(before[start + index])] for index, tokens in held)
            size += sum(turn.facts.tokens for turn in before[length:])
            if last.plan is not None and last.plan.cut:
                limits = last.plan.limits_at(last.plan.cut)
                size += keeps.SUMMARY_FRAME_TOKENS + limits.summary + limits.users
                size += limits.newest + limits.words + limits.index
            assert size + 2 * max(32, budget // 128) >= share_of(0.85, budget)
        previous = (len(before), sent)


@given(conversations, budgets, policies, heads)
def test_what_the_head_and_the_user_leave_room_for_fits(drawn: Any, budget: int, policy: Rules, head: int) -> None:
    """The parts that the proxy doesn't change must use at most half of the budget.

    These are the head, tools, later system messages, calls, pinned messages, and the user's last message.
    """
    before, sent = sent_of(drawn, budget, policy, head)
    last = [turn for turn in before if turn.facts.role == "user"][-1]
    firm = [t for t in before if t.facts.role == "system" or t is last or policy.pins.holds(t, FORMAT)]
    if FIXED + sum(turn.facts.tokens for turn in firm) <= budget // 2:
        assert sent.tokens + FIXED <= budget


@given(conversations, budgets, policies, heads)
def test_an_outcome_below_the_trigger_is_left_as_it_is(drawn: Any, budget: int, policy: Rules, head: int) -> None:
    _, sent = sent_of(drawn, budget, policy, head)
    again = send(turns(sent.messages), policy, budget)
    if policy is POLICIES[0] and sent.tokens + FIXED < share_of(0.85, budget):
        assert again.plan is None
    assert again.tokens <= sent.tokens


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=5) | st.sampled_from((1.5, "x" * 4000)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(("user", "assistant", "tool", "function", "system", "developer", "", "critic")) | anything
ids = st.sampled_from(("a", "b", "", "a b")) | anything
dirty_call = anything | st.fixed_dictionaries(
    {},
    optional={
        "id": ids,
        "type": anything,
        "function": anything
        | st.fixed_dictionaries(
            {}, optional={"name": st.sampled_from(("write_file", "ls")) | anything, "arguments": anything}
        ),
        "custom": anything,
    },
)
dirty_content = anything | st.lists(
    anything | st.fixed_dictionaries({"type": anything}, optional={"text": anything, "refusal": anything}), max_size=3
)
dirty_message = anything | st.fixed_dictionaries(
    {},
    optional={
        "role": roles,
        "content": dirty_content,
        "tool_calls": anything | st.lists(dirty_call, max_size=3),
        "tool_call_id": ids,
        "function_call": anything | st.fixed_dictionaries({"name": anything, "arguments": anything}),
        "name": anything,
    },
)
dirty = st.lists(
    dirty_message
    | st.builds(
        lambda role, id_, size: {"role": role, "tool_call_id": id_, "content": "long line\n" * size},
        st.sampled_from(("user", "assistant", "tool", "tool")),
        st.sampled_from(("a", "b")),
        st.sampled_from((1, 40, 400)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=MANY)
@given(dirty, st.sampled_from((600, 1792)), policies)
def test_nothing_that_a_client_sends_raises(messages: list[Any], budget: int, policy: Rules) -> None:
    before = turns(messages)
    sent = send(before, policy, budget)
    after = [FORMAT.read(piece.raw) for piece in sent.pieces]
    assert faults(after) <= faults([turn.facts for turn in before])
    assert sent.tokens <= sum(turn.facts.tokens for turn in before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_far_over_the_window_is_compacted_at_all(policy: Rules) -> None:
    """Check that the conversations trigger compaction, so that the tests above aren't vacuous."""
    drawn = [Episode("tools", 80, 2, 1, n) for n in range(40)]
    _, sent = sent_of(drawn, 15_000, policy, 1)
    assert sent.plan is not None
    assert sent.tokens < 0.9 * 15_000
    assert sent.steps
