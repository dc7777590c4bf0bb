"""Test the repair of conversations that a strict server rejects."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.compaction.turn import Facts, Turn, faults, head_length
from proxy.dialects.chat.units import text_of
from proxy.dialects.repair import NO_RESULT, STRAY_RESULT, needs_repair, repaired
from proxy.dialects.units import decode, encode
from tests.kit.conversations import (
    FORMAT,
    Counting,
    Message,
    assistant,
    call,
    conversations,
    expand,
    result,
    system,
    turns,
    user,
)
from tests.kit.conversations import turn as turn_of
from tests.kit.upstream import faults as chat_faults

LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
EXAMPLES = settings().max_examples * 3
"""Examples of each property test here. They take less time than others."""


def legacy(text: str, name: str = "f") -> Message:
    return {"role": "function", "name": name, "content": text}


def calling(*calls: Any) -> Message:
    """Return an assistant message with calls of any shape."""
    return {**assistant(None), "tool_calls": list(calls)}


def note(text: str) -> Message:
    return {"role": "assistant", "content": STRAY_RESULT + text}


def fix(messages: Sequence[Any]) -> list[Any]:
    return [msgspec.json.decode(turn.raw) for turn in repaired(turns(messages), FORMAT)]


GO = user("go")
A, B = call("a"), call("b")
LOST = result("a", NO_RESULT)

CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "nothing": ([], []),
    "head only": ([system("x")], [system("x")]),
    "answered twice": (
        [assistant(None, A), result("a", "1"), result("a", "2"), GO],
        [assistant(None, A), result("a", "1"), GO],
    ),
    "trailing": ([GO, assistant(None, A)], [GO, assistant(None, A)]),
    "trailing, a stray result behind it": (
        [GO, assistant(None, A), result("z", "z")],
        [GO, assistant(None, A), LOST, note("z")],
    ),
    "empty": (
        [GO, assistant(None), assistant(""), {"role": "assistant"}, {"role": "assistant", "content": []}, GO],
        [GO, GO],
    ),
    "legacy": ([LEGACY, legacy("1"), GO], [LEGACY, legacy("1"), GO]),
    "legacy late": ([LEGACY, GO, legacy("1")], [LEGACY, legacy("1"), GO]),
    "nothing but calls that are no objects": ([calling(5), GO], [calling(5), GO]),
    "no objects": ([GO, 5, None, "x", [1], GO], [GO, 5, None, "x", [1], GO]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_repaired(name: str) -> None:
    given_, wanted = CASES[name]
    assert fix(given_) == wanted
    assert fix(wanted) == wanted


@given(conversations, st.integers(0, 2))
def test_a_valid_conversation_comes_back_as_it_is(drawn: Any, head: int) -> None:
    count = Counting()
    before = turns(expand(drawn, 2000, head=head))
    after = repaired(before, count)
    assert len(after) == len(before)
    assert all(new is old for new, old in zip(after, before, strict=True))
    assert count.counts == 0


def _drop(messages: list[Any], rng: random.Random) -> None:
    place = rng.randrange(len(messages))
    if messages[place]["role"] != "user":
        del messages[place]


def _move(messages: list[Any], rng: random.Random) -> None:
    place = rng.randrange(len(messages))
    if messages[place]["role"] in ("tool", "function"):
        messages.insert(rng.randrange(len(messages)), messages.pop(place))


def _repeat(messages: list[Any], rng: random.Random) -> None:
    messages.insert(rng.randrange(len(messages)), rng.choice(messages))


def _change_id(messages: list[Any], rng: random.Random) -> None:
    place = rng.randrange(len(messages))
    message = messages[place] = msgspec.json.decode(encode(messages[place]))
    bad = rng.choice(("", None, 7, "call_0", "w"))
    if message["role"] == "tool":
        message["tool_call_id"] = bad
    for asked in message.get("tool_calls") or []:
        if rng.random() < 0.5:
            asked["id"] = bad


def _insert(messages: list[Any], rng: random.Random) -> None:
    stray = (user("wait"), assistant(None), assistant(""), result("zzz", "stray"), result("call_0", ""), LEGACY)
    messages.insert(rng.randrange(len(messages)), rng.choice(stray))


def _cut(messages: list[Any], rng: random.Random) -> None:
    first = next((i for i, message in enumerate(messages) if message["role"] in ("tool", "function")), 0)
    del messages[:first]


DAMAGES = (_drop, _move, _repeat, _change_id, _insert)


def damaged(messages: list[Any], seed: int, times: int) -> list[Any]:
    rng = random.Random(seed)
    if seed % 7 == 0:
        _cut(messages, rng)
    for _ in range(times):
        if messages:
            rng.choice(DAMAGES)(messages, rng)
    return messages


def unanswered_at_the_end(after: Sequence[Turn]) -> int:
    """Return the number of calls in the last message, which the client may still answer. Results have no calls."""
    return len(after[-1].facts.calls) if after and after[-1].facts.kind != "result" else 0


def without_order(after: Sequence[Turn]) -> list[Any]:
    """Return the messages without an open group at the end."""
    messages = [msgspec.json.decode(turn.raw) for turn in after]
    return messages[:-1] if unanswered_at_the_end(after) else messages


@settings(max_examples=EXAMPLES)
@given(conversations, st.integers(0, 2), st.integers(0, 10**6), st.integers(1, 12))
def test_what_was_damaged_comes_out_valid(drawn: Any, head: int, seed: int, times: int) -> None:
    before = turns(damaged(expand(drawn[:12], 500, head=head), seed, times))
    after = repaired(before, FORMAT)
    if not needs_repair([turn.facts for turn in before]):
        assert all(new is old for new, old in zip(after, before, strict=True)), "nothing was to be put right"
    assert faults([turn.facts for turn in after]) == unanswered_at_the_end(after)
    messages = without_order(after)
    assert not messages or chat_faults({"messages": messages}) == []

    again = repaired(after, FORMAT)
    assert all(new is old for new, old in zip(again, after, strict=True))
    assert repaired(turns([msgspec.json.decode(t.raw) for t in before]), FORMAT) == after

    places = {id(turn): place for place, turn in enumerate(before)}
    fixed = [places[id(turn)] for turn in after if id(turn) in places and turn.facts.kind != "result"]
    assert fixed == sorted(fixed)
    assert [t for t in after if t.facts.role == "user"] == [t for t in before if t.facts.role == "user"]
    length = head_length(before)
    assert [id(turn) for turn in after[:length]] == [id(turn) for turn in before[:length]]
    seen = "\n".join(text_of(decode(turn.raw)) for turn in after)
    answers = Counter(turn.facts.answers or "" for turn in before)
    for turn in before:
        text = text_of(decode(turn.raw))
        if turn.facts.kind == "result" and text.strip() and text not in seen:
            assert answers[turn.facts.answers or ""] > 1, "dropped, though its call has no other answer"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
ids = st.sampled_from(("a", "b", "f", "")) | anything
wild_call = anything | st.fixed_dictionaries(
    {}, optional={"id": ids, "type": anything, "function": anything | st.fixed_dictionaries({"name": ids})}
)
wild_message = anything | st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "assistant", "tool", "function", "system", "model")) | anything},
    optional={
        "content": anything | st.sampled_from(("text", "")),
        "tool_calls": anything | st.lists(wild_call, max_size=3),
        "function_call": anything | st.fixed_dictionaries({"name": ids}),
        "tool_call_id": ids,
        "name": ids,
    },
)


def is_odd(facts: Facts) -> bool:
    """Return whether a message needs a repair because of its own fields."""
    ids = [call.id for call in facts.calls]
    if ids and (facts.kind != "assistant" or len(set(ids)) < len(ids) or "" in ids):
        return True
    return facts.role == "function" or facts.rare.empty


@settings(max_examples=EXAMPLES)
@given(st.lists(wild_message, max_size=12), conversations, st.integers(0, 10**6), st.integers(0, 3))
def test_a_repair_is_needed_for_each_fault(messages: list[Any], drawn: Any, seed: int, times: int) -> None:
    for before in (messages, damaged(expand(drawn[:12], 500), seed, times)):
        facts = [turn.facts for turn in turns(before)]
        assert needs_repair(facts) == (faults(facts) > 0 or any(map(is_odd, facts)))


@settings(max_examples=EXAMPLES)
@given(st.lists(wild_message, max_size=12))
@example([{"role": None, "function_call": {"name": "a"}}, {"role": "function", "function_call": {}}])
def test_nothing_that_a_client_sends_raises(messages: list[Any]) -> None:
    before = turns(messages)
    after = repaired(before, FORMAT)
    head = head_length(before)
    called_in_head = [turn for turn in before[:head] if turn.facts.calls]
    if not called_in_head:
        assert faults([turn.facts for turn in after]) == unanswered_at_the_end(after)
    if not needs_repair([turn.facts for turn in before]):
        assert all(new is old for new, old in zip(after, before, strict=True)), "nothing was to be put right"
    again = repaired(after, FORMAT)
    assert [turn.raw for turn in again] == [turn.raw for turn in after]
    kept = [turn.raw for turn in after]
    foreign = [t.raw for t in before if t.facts.role not in ("assistant", "tool", "function") and not t.facts.calls]
    assert [raw for raw in kept if raw in set(foreign)] == foreign


@pytest.mark.parametrize("raw", [b'{"role":"assistant","tool_calls":[{"id":"","x":"\\ud800"}]}', b'"\\ud800"', b"\xff"])
def test_json_that_strict_parsers_refuse_is_repaired_or_left(raw: bytes) -> None:
    broken = Turn(raw, FORMAT.read(raw))
    after = repaired([broken, turn_of(GO)], FORMAT)
    assert faults([turn.facts for turn in after]) == 0
    assert after[-1].facts.role == "user"


@pytest.mark.long
@pytest.mark.parametrize("shape", ["late", "orphans", "one id", "wide", "dangling"])
def test_thousands_of_messages_take_no_longer_than_their_number(shape: str) -> None:
    """Comparing each result with each open call would take minutes."""
    number = 2_500
    many = range(number)
    shapes: dict[str, list[Message]] = {
        "late": [*(assistant(None, call(f"c{n}")) for n in many), GO, *(result(f"c{n}", "x") for n in reversed(many))],
        "orphans": [result("z", "x") for _ in range(2 * number)],
        "one id": [message for _ in many for message in (assistant(None, A), GO, result("a", "x"))],
        "wide": [assistant(None, *(A for _ in many)), GO, *(result("a", "x") for _ in many)],
        "dangling": [message for _ in many for message in (assistant(None, A), GO)],
    }
    before = turns(shapes[shape])
    started = time.process_time()
    after = repaired(before, FORMAT)
    assert time.process_time() - started < 5
    assert faults([turn.facts for turn in after]) == 0
