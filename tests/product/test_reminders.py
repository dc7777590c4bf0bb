"""System messages from inside the conversation: one per turn."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripted import protected
from tests.kit.upstream import StandIn

TURNS = 90


def words(seed: object, count: int) -> str:
    chosen = random.Random(str(seed))
    return " ".join(f"w{chosen.randrange(999)}" for _ in range(count))


def session(reminder: int, *, same: bool = False) -> list[list[Any]]:
    """Return the requests of a session with a system message of this many words in each turn."""
    history: list[Any] = [{"role": "system", "content": "Be brief."}]
    requests = []
    for turn in range(TURNS):
        said = words("always" if same else f"r{turn}", reminder)
        history.append({"role": "system", "content": f"Reminder: {said}"})
        history.append({"role": "user", "content": f"Question {turn}: {words(f'q{turn}', 60)}"})
        requests.append(list(history))
        history.append({"role": "assistant", "content": f"Answer {turn}: {words(f'a{turn}', 60)}"})
    return requests


@pytest.mark.parametrize(("reminder", "same"), [(120, False), pytest.param(120, True, marks=pytest.mark.full)])
def test_a_reminder_in_each_turn_never_ends_the_session(reminder: int, same: bool, tmp_path: Path) -> None:
    upstream = StandIn(window=8_000)
    requests = session(reminder, same=same)
    with protected(upstream, tmp_path, 8_000) as caller:
        for messages in requests:
            # The client transforms ``messages``, which takes time. It sends ``extra_body`` unchanged.
            extra = {"messages": messages}
            raw = caller.chat.completions.with_raw_response.create(model="m", messages=[], extra_body=extra)
            assert raw.headers["x-compaction-retries"] == "0"
    assert {received.status for received in upstream.requests} == {200}
    prompts = [received.body["messages"] for received in upstream.conversations]
    summaries = sum(received.summary for received in upstream.requests)
    broken = sum(new[: len(old)] != old for old, new in itertools.pairwise(prompts))
    assert summaries <= TURNS / 5, "as many as the same text would need in user messages"
    assert broken <= summaries
    for messages, prompt in zip(requests, prompts, strict=True):
        newest = [message for message in messages if message["role"] == "system"][-1]
        assert newest in prompt, "the newest one always stays"
        if same:
            assert prompt.count(newest) < 40
    assert "earlier system messages are only in the summary" in str(prompts[-1]) or same
