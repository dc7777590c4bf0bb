"""The memory of sent prompts."""

from __future__ import annotations

from proxy.pipeline.sent_prompts import SentPrompts

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def test_a_prompt_continues_the_one_before_if_it_begins_with_it() -> None:
    prompts = SentPrompts()
    assert prompts.continues(1, [A])
    prompts.sent(1, [A, B])
    assert prompts.continues(1, [A, B])
    assert prompts.continues(1, [A, B, C])
    assert not prompts.continues(1, [A])
    assert not prompts.continues(1, [A, C, B])
    assert prompts.continues(2, [C])


def test_a_changed_prompt_never_continues_the_clients_own() -> None:
    prompts = SentPrompts()
    prompts.sent(1, None)
    assert not prompts.continues(1, [A])


def test_expired_reasoning_is_remembered_by_conversation() -> None:
    prompts = SentPrompts()
    assert prompts.stale(1) == 0
    prompts.expire(1, 7)
    assert (prompts.stale(1), prompts.stale(2)) == (7, 0)
