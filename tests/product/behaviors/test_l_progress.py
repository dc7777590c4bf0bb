"""Progress: behaviours 97 to 100."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.behaviors import (
    BUDGET,
    LEVEL,
    SUMMARY,
    WINDOW,
    Caller,
    Exchange,
    Front,
    agent,
    assistant,
    chat,
    is_summary,
    opened,
    padded,
    requests,
    spelled,
    system,
    tokens,
    user,
    words,
)
from tests.kit.upstream import Reply

LEAST_GAIN = 0.10
BROKEN = "broken"
"""A model that answers conversations, and never with a summary."""

FAILURE = {"error": {"message": "NO-SUMMARY-TODAY", "type": "server_error", "param": None, "code": None}}

POLICIES: dict[str, Any] = {
    "many-messages": {"trigger": {"messages": 12}, "keep": {"messages": 4}},
    "nothing-ahead": {"prepare": None},
}


def summarise(body: dict[str, Any]) -> Reply:
    return Reply(status=500, error=FAILURE) if body["model"] == BROKEN else Reply(content=SUMMARY)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("l"), POLICIES, summariser=summarise) as front:
        yield front


def test_97_a_compaction_gains_a_tenth_or_is_left_out(front: Front) -> None:
    caller = front.caller()
    conversation = agent(30, 130)
    raws = spelled(conversation)
    for end in requests(conversation):
        exchange = caller.ask(raws[:end])
        if exchange.verdict == "compacted":
            before, after = (int(exchange.headers[f"x-compaction-tokens-{when}"]) for when in ("before", "after"))
            assert after <= (1 - LEAST_GAIN) * before
    assert exchange.verdict == "compacted"
    # All but 400 tokens are in the one message that must stay, or all but 1,300, of which a summary may take 700.
    for talk in (chat(1, 190), [*chat(1, 5)[:2], assistant(words(1_300, "long")), *chat(1, 5)[1:]]):
        caller = front.caller("nothing-ahead")
        exchange = caller.ask(padded([*talk, user("Next.")], LEVEL + 100))
        assert exchange.verdict == "none"
        assert exchange.untouched
        assert caller.asked == []


@pytest.mark.parametrize("fixed", [4_600, 5_600], ids=["over-the-target", "near-the-trigger"])
def test_98_fixed_parts_over_the_target_raise_it(front: Front, fixed: int) -> None:
    """The sections share the little room that is left: no summary at every turn, and nothing over the window."""
    caller = front.caller()
    messages = [system(words(fixed, "law"))]
    turns = 30
    for number in range(turns):
        messages.append(user(f"Question {number}: {words(60, f'q{number}x')}"))
        exchange = caller.ask(messages)
        assert exchange.request.tokens <= BUDGET < WINDOW
        assert exchange.messages[0] == exchange.input[0]
        assert exchange.messages[-1] == exchange.input[-1]
        messages.append(assistant(f"Answer {number}: {words(60, f'a{number}x')}"))
    assert tokens(messages) > WINDOW
    assert 1 <= len(caller.asked) <= turns // 3


def test_99_what_is_smaller_than_a_summary_is_not_summarised(front: Front) -> None:
    caller = front.caller("many-messages")
    messages = [system()]
    for number in range(8):
        messages += [user(f"Ping {number}?"), assistant(f"Pong {number}.")]
        exchange = caller.ask([*messages, user("And?")])
        assert exchange.verdict == "none"
        assert exchange.untouched
    assert caller.asked == []
    exchange = caller.ask([*chat(8, 200), user("And?")])
    assert exchange.verdict == "compacted", "larger messages are worth it"
    assert len(caller.asked) == 1


def grown(caller: Caller) -> list[tuple[Exchange, int]]:
    """A long conversation sent turn by turn, and how often a model had been asked for a summary after each turn."""
    messages = [system("You are patient.")]
    exchanges = []
    for number in range(40):
        messages.append(user(f"Question {number}: {words(500, f'q{number}x')}"))
        exchanges.append((caller.ask(messages), len(caller.asked)))
        messages.append(assistant(f"Answer {number}: {words(500, f'a{number}x')}"))
    return exchanges


def test_100_after_failed_summaries_no_model_is_asked_until_the_prefix_changes(front: Front) -> None:
    """A checkpoint whose summary failed has its digest; after three failures the model is left alone. (One attempt asks
    several times if the conversation is longer than the model's window.)"""
    caller = front.caller(model=BROKEN)
    exchanges, asked = zip(*grown(caller), strict=True)
    compacted = [exchange for exchange in exchanges if exchange.verdict == "compacted"]
    checkpoints = {raw for exchange in compacted for raw in exchange.messages if is_summary(raw)}
    assert len(checkpoints) > 4, "more checkpoints than attempts"
    states = [exchange.headers.get("x-compaction-breaker") for exchange in exchanges]
    assert states[0] is None
    opened_at = states.index("open")
    assert set(states[:opened_at]) == {None}
    assert set(states[opened_at:]) == {"open"}
    assert 3 <= asked[opened_at] == asked[-1] <= 6
    assert opened_at < len(states) // 2
    for exchange in exchanges:
        assert exchange.request.tokens <= BUDGET
        assert "NO-SUMMARY-TODAY" not in exchange.request.raw.decode()
        assert "breaker" not in exchange.request.raw.decode()
        assert json.loads(exchange.answer)["choices"]
