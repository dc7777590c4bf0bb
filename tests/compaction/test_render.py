"""From a plan to messages."""

from __future__ import annotations

import pytest

from proxy.compaction.message import decode
from proxy.compaction.render import REMEMBERED_BYTES, Piece, clipped, render
from proxy.compaction.rules import Caps
from proxy.compaction.scan import Plan

from .conversations import Counting, assistant, call, message_tokens, result, system, turn, turns, user
from .sending import rules

CAPS = Caps(100, 100, 100, 100, 1000)
SUMMARY = Piece(b'{"role":"user","content":"so far"}', 9, None)
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


def rendered(plan: Plan, summary: Piece | None = None) -> tuple[list[object], tuple[str, ...]]:
    out = render(turns(CONVERSATION), 1, plan, rules(), summary, message_tokens)
    assert out.tokens == sum(piece.tokens for piece in out.pieces)
    return [decode(piece.raw) for piece in out.pieces], out.steps


def test_an_empty_plan_changes_nothing() -> None:
    assert rendered(Plan(CAPS)) == (CONVERSATION, ())


def test_the_summary_stands_after_the_head_and_system_messages_behind_it() -> None:
    messages, steps = rendered(Plan(CAPS, checkpoints=(2, 6)), SUMMARY)
    assert messages == [CONVERSATION[0], decode(SUMMARY.raw), CONVERSATION[4], CONVERSATION[7]]
    assert steps == ("summary",)


def test_a_cut_without_a_summary_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a summary"):
        rendered(Plan(CAPS, checkpoints=(2,)))


def test_stages_apply_up_to_their_frontiers() -> None:
    messages, steps = rendered(Plan(CAPS, frontiers={"results": 4, "arguments": 5}))
    changed = [n for n, (before, after) in enumerate(zip(CONVERSATION, messages, strict=True)) if before != after]
    assert (changed, steps) == ([3, 5], ("arguments", "results"))
    assert rendered(Plan(CAPS, frontiers={"results": 2, "arguments": 4})) == (CONVERSATION, ())


def test_a_result_is_held_to_its_size() -> None:
    messages, steps = rendered(Plan(CAPS, clips={5: 250}))
    assert steps == ("results",)
    assert messages[:6] == CONVERSATION[:6]
    assert 150 < message_tokens(messages[6]) <= 250


def test_of_two_shorter_forms_the_shortest_is_sent() -> None:
    by_stage, _ = rendered(Plan(CAPS, frontiers={"results": 6}))
    both, _ = rendered(Plan(CAPS, frontiers={"results": 6}, clips={5: 900}))
    assert both == by_stage


def test_what_was_held_to_a_size_is_remembered_unless_it_is_large() -> None:
    counting = Counting()
    small, large = (turn(result("a", LONG * n)) for n in (1, 60))
    for one in (small, large):
        piece = Piece(one.raw, one.facts.tokens, one)
        limit = one.facts.tokens - 10
        first = clipped(piece, limit, counting)
        calls = counting.calls
        assert clipped(piece, limit, counting) == first
        assert (counting.calls == calls) == (len(first.raw) <= REMEMBERED_BYTES)
    assert len(small.facts.forms) == 1
    assert not large.facts.forms


def test_the_summary_is_never_held_to_a_size() -> None:
    with pytest.raises(ValueError, match="client's message"):
        clipped(SUMMARY, 5, message_tokens)
