"""Determinism and the prompt cache: behaviours 89 to 96."""

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.behaviors import (
    BUDGET,
    SUMMARY,
    Caller,
    Exchange,
    Front,
    Message,
    agent,
    assistant,
    body,
    chat,
    counter,
    is_summary,
    opened,
    requests,
    spelled,
    user,
    words,
)
from tests.kit.upstream import Reply, Responder

POLICIES: dict[str, Any] = {
    # Without anything made ahead, so that summaries can be counted.
    "counted": {"trigger": {"tokens": 5_000}, "keep": {"tokens": 700}},
    "stages": {
        "truncate_args": {"tools": ["*"], "max_length": 300},
        "evict_results": {"max_tokens": 200, "exclude": []},
    },
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("k"), POLICIES) as front:
        yield front


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("fresh"), POLICIES) as front:
        yield front


@functools.cache
def session() -> list[Message]:
    """Some forty turns of an agent, now and then with a large result, and once with one as large as the window."""
    conversation = agent(40, 130)
    results = [message for message in conversation if message["role"] == "tool"]
    for number, message in enumerate(results):
        lines = 700 if number == 50 else 80 if number % 8 == 3 else 0
        message["content"] += "".join(f"\nline {n}: {words(6, f's{number}n{n}x')}" for n in range(lines))
    assert counter.message(results[50]) > BUDGET
    return conversation


@pytest.fixture(scope="module", params=["default", "stages"])
def grown(request: pytest.FixtureRequest, front: Front) -> list[Exchange]:
    """Return the result of each turn of the session, under the default policy and under one with small stages."""
    caller = front.caller(request.param)
    raws = spelled(session())
    return [caller.ask(raws[:end]) for end in requests(session())]


def always(text: str) -> Responder:
    return lambda _: Reply(content=text)


def numbered() -> Responder:
    numbers = itertools.count(1)
    return lambda _: Reply(content=f"Goal: NUMBER-{next(numbers)}-, the user asks numbered questions.")


def made(exchange: Exchange) -> bytes | None:
    return next((raw for raw in exchange.messages if is_summary(raw)), None)


def test_89_the_same_input_gives_the_same_bytes(front: Front, fresh: Front) -> None:
    raw = body(spelled(session()), temperature=0.5)
    caller = front.caller()
    exchanges = [caller.post(raw), caller.post(raw), front.caller().post(raw), fresh.caller().post(raw)]
    assert {exchange.verdict for exchange in exchanges} == {"compacted"}
    assert len({exchange.request.raw for exchange in exchanges}) == 1


def test_90_between_checkpoints_each_prompt_begins_the_next(grown: list[Exchange]) -> None:
    changed = []
    for number, (before, after) in enumerate(itertools.pairwise(grown), start=1):
        if after.messages[: len(before.messages)] == before.messages:
            assert len(after.messages) > len(before.messages)
            continue
        changed.append(number)
        assert after.request.tokens < before.request.tokens, "the beginning changes only where that makes room"
    compacted = [exchange for exchange in grown if exchange.verdict == "compacted"]
    assert len(compacted) >= len(grown) // 2
    summaries = len({made(exchange) for exchange in compacted} - {None})
    assert summaries >= 2
    # New conversation comes to some four windows; each checkpoint makes room for half of one at least.
    assert summaries <= len(changed) <= 8, f"the beginning changed at {changed}"
    assert max(exchange.request.tokens for exchange in grown) <= BUDGET


@pytest.mark.parametrize("policy", ["default", "stages"])
def test_91_the_whole_history_at_once_gives_the_same_body(front: Front, fresh: Front, policy: str) -> None:
    caller = front.caller(policy)
    raws = spelled(session())
    ends = requests(session())
    turn_by_turn = {end: caller.ask(raws[:end]) for end in ends}
    for end in (ends[-1], ends[len(ends) * 2 // 3], ends[len(ends) // 2]):
        grew, came = turn_by_turn[end], fresh.caller(policy).ask(raws[:end])
        assert came.verdict == grew.verdict == "compacted"
        assert (made(came) is None) == (made(grew) is None)
        places = [[raw for raw in exchange.messages if not is_summary(raw)] for exchange in (came, grew)]
        assert places[0] == places[1], "the same messages are kept"
        assert came.messages == grew.messages, "the same bytes stand for the others"


def test_branches_with_the_same_checkpoint_have_indexes_of_their_own(front: Front, fresh: Front) -> None:
    turns = [(assistant(f"I read src/part_{n}.py. {words(60, f'p{n}x')}"), user("Next")) for n in range(100, 180)]
    history = [user("Read all parts."), *itertools.chain(*turns)]
    grown = front.caller("counted")
    seen = next(end for end in range(1, len(history), 2) if grown.ask(history[:end]).verdict == "compacted")

    def sent(caller: Caller, file: int) -> bytes:
        text = history[seen - 4]["content"].split(". ", 1)[1]
        other = assistant(f"I read src/part_{file}.py. {text}")
        branch = [*history[: seen - 4], other, *history[seen - 3 : seen]]
        exchange = caller.ask(branch)
        assert exchange.verdict == "compacted"
        return exchange.request.raw

    caller = front.caller("counted")
    first, second = sent(caller, 105), sent(caller, 110)
    assert second.replace(b"part_110", b"part_105") != first, "the index depends on the kept messages"
    assert sent(fresh.caller("counted"), 110) == second


def test_92_what_was_compacted_passes_through_unchanged(front: Front, grown: list[Exchange]) -> None:
    compacted = [exchange for exchange in grown if exchange.verdict == "compacted"]
    caller = front.caller()
    for exchange in compacted[:: max(1, len(compacted) // 8)]:
        again = caller.post(exchange.request.raw)
        assert again.verdict == "none"
        assert again.untouched


def test_93_a_summary_is_made_once_and_then_brought_up_to_date(front: Front) -> None:
    caller = front.caller("counted")
    talk = chat(7, 380)
    first = caller.ask([*talk, user("What now?")])
    assert first.verdict == "compacted"
    assert len(caller.asked) == 1
    assert caller.ask([*talk, user("What now?")]).messages == first.messages
    assert len(caller.asked) == 1, "the second request asks no model"
    last = first
    while len(caller.asked) < 2:
        number = len(talk)
        assert number < 40
        talk += [user(f"Question n{number}: {words(300, f'n{number}x')}"), assistant(f"Answer n{number}.")]
        last = caller.ask([*talk, user("What now?")])
    assert caller.ask([*talk, user("What now?")]).messages == last.messages
    assert len(caller.asked) == 2, "one more turn past a checkpoint asks once"
    earlier, later = (json.dumps(request.body["messages"]) for request in caller.asked)
    assert "SUMMARY-TEXT" not in earlier
    assert "SUMMARY-TEXT" in later, "the summary made before"
    summarised = {raw for raw in first.dropped if b"Question" in raw or b"Answer" in raw}
    for raw in summarised:
        opening = json.loads(raw)["content"].split(":")[0]
        assert f"{opening}:" in earlier
        assert f"{opening}:" not in later, "not what it stands for"
    block = [json.loads(raw)["content"] for raw in last.dropped if raw not in summarised]
    # The user's newest words before a checkpoint stay as they are although they are summarised, too.
    block = [text for text in block if text.split(":")[0] not in earlier]
    assert block
    for text in block:
        assert text.split(":")[0] in later, "the new block"


def test_94_an_edited_history_gets_no_stale_summary(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(tmp_path_factory.mktemp("edited"), POLICIES, summariser=numbered()) as front:
        caller = front.caller("counted")
        talk = [*chat(7, 380), user("What now?")]
        assert "NUMBER-1-" in caller.ask(talk).summary
        edited = [dict(message) for message in talk]
        edited[3]["content"] = edited[3]["content"].replace("Question 1:", "Question one:")
        exchange = caller.ask(edited)
        assert "NUMBER-2-" in exchange.summary
        assert "NUMBER-1-" not in exchange.request.raw.decode()
        rewound = [*talk[:7], user("Let us begin again.")]
        exchange = caller.ask(rewound)
        assert exchange.verdict == "none"
        assert exchange.untouched
        branch = [*talk[:9], *chat(4, 300, seed="other")[1:], user("And now?")]
        exchange = caller.ask(branch)
        assert exchange.verdict == "compacted"
        assert "NUMBER-2-" not in exchange.request.raw.decode()
        assert "NUMBER-1-" in caller.ask(talk).summary, "the old history has its own still"


def test_95_callers_share_no_summary(tmp_path_factory: pytest.TempPathFactory) -> None:
    with opened(tmp_path_factory.mktemp("shared"), POLICIES, summariser=numbered()) as front:
        talk = [*chat(7, 380), user("What now?")]
        callers = [front.caller("counted"), front.caller("counted"), front.caller("default")]
        for number, caller in enumerate(callers, start=1):
            asked = [*talk, *chat(2, 300, seed="more")[1:], user("And?")] if number == 3 else talk
            assert f"NUMBER-{number}-" in caller.ask(asked).summary
            assert len(caller.asked) == 1, "made for this caller, with this caller's key"
        assert "NUMBER-1-" in callers[0].ask(talk).summary
        assert "NUMBER-2-" in callers[1].ask(talk).summary


def test_96_a_lost_cache_costs_no_validity(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A proxy without what the one before knew cuts at the same places; only the summary's words may differ."""
    raws = spelled(session())
    ends = requests(session())
    seen: list[list[Exchange]] = []
    for text in (SUMMARY, "Goal: OTHER-WORDS for the same thing, and some more of them than the other model found."):
        with opened(tmp_path_factory.mktemp("lost"), POLICIES, summariser=always(text)) as front:
            caller = front.caller()
            seen.append([caller.ask(raws[:end]) for end in ends[len(ends) // 2 :: 5]])
    for before, after in zip(*seen, strict=True):
        assert before.verdict == after.verdict == "compacted"
        assert before.place == after.place
        assert [*before.messages[: before.place], *before.after] == [*after.messages[: after.place], *after.after]
        assert before.summary != after.summary
        assert "OTHER-WORDS" in after.summary
