"""The memory of sent prompts."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proxy.pipeline.job import PromptDigests
from proxy.pipeline.sent_prompts import SentPrompts
from proxy.store import Guarded, open_store

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
TALK = ("team", "talk")


def prompt(*digests: bytes, answers: tuple[int, ...] = (1, 3)) -> PromptDigests:
    return PromptDigests(digests, answers)


def with_store(test: Callable[[SentPrompts, Guarded], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        store = Guarded(open_store(f"sqlite:///{folder}/store.db"))
        prompts = SentPrompts(store)
        try:
            await test(prompts, store)
        finally:
            await prompts.aclose()
            await store.aclose()

    asyncio.run(run())


def test_a_prompt_continues_the_one_before_if_it_begins_with_it(tmp_path: Path) -> None:
    async def check(prompts: SentPrompts, store: Guarded) -> None:
        assert prompts.continues(TALK, prompt(A))
        prompts.sent(TALK, 3, "mark", prompt(A, B), changed=True)
        assert prompts.continues(TALK, prompt(A, B))
        assert prompts.continues(TALK, prompt(A, B, C))
        assert not prompts.continues(TALK, prompt(A))
        assert not prompts.continues(TALK, prompt(A, C, B))
        assert prompts.continues(("other", "talk"), prompt(C))

    with_store(check, tmp_path)


@pytest.mark.parametrize("measured", [True, False])
def test_a_changed_prompt_does_not_continue_the_clients_own(measured: bool, tmp_path: Path) -> None:
    async def check(prompts: SentPrompts, store: Guarded) -> None:
        prompts.sent(TALK, 3, "mark", prompt(A, B) if measured else None, changed=False)
        assert not prompts.changed(TALK)
        assert not prompts.continues(TALK, prompt(C))
        assert prompts.continues(TALK, prompt(A, B)) is measured

    with_store(check, tmp_path)


def test_a_prompt_that_another_process_sent_is_not_known(tmp_path: Path) -> None:
    """Two answers came since this process sent a prompt, or none did."""

    async def check(prompts: SentPrompts, store: Guarded) -> None:
        prompts.sent(TALK, 3, "mark", prompt(A, B), changed=True)
        assert prompts.continues(TALK, prompt(C, answers=(1, 3, 5)))
        assert prompts.continues(TALK, prompt(C, answers=(1,)))

    with_store(check, tmp_path)


def test_what_another_process_sent_is_read_from_the_store(tmp_path: Path) -> None:
    async def check(prompts: SentPrompts, store: Guarded) -> None:
        prompts.expire(TALK, 2, "mark")
        prompts.sent(TALK, 3, "mark", prompt(A, B), changed=True)
        await prompts.aclose()
        other = SentPrompts(store)
        assert other.continues(TALK, prompt(C))
        await other.find(TALK, prompt(C))
        assert not other.continues(TALK, prompt(C))
        assert other.changed(TALK)
        assert other.stale(TALK) == 2
        other.sent(TALK, 5, "mark", prompt(A, B, C, answers=(1, 3, 5)), changed=True)
        await other.aclose()
        await prompts.find(TALK, prompt(A, answers=(1, 3, 5)))
        assert not prompts.continues(TALK, prompt(A, B, answers=(1, 3, 5)))

    with_store(check, tmp_path)


def test_expired_reasoning_is_remembered_by_conversation_until_the_tenant_is_forgotten(tmp_path: Path) -> None:
    async def check(prompts: SentPrompts, store: Guarded) -> None:
        assert prompts.stale(TALK) == 0
        prompts.expire(TALK, 7, "mark")
        assert (prompts.stale(TALK), prompts.stale(("team", "other"))) == (7, 0)
        assert prompts.forget(lambda tenant: tenant == "team") == {"team"}
        assert prompts.stale(TALK) == 0

    with_store(check, tmp_path)
