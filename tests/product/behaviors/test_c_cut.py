"""Cut: behaviours 19 to 27."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.behaviors import (
    BUDGET,
    Caller,
    Exchange,
    Front,
    Message,
    agent,
    assistant,
    call,
    chat,
    counter,
    decoded,
    opened,
    padded,
    parted,
    requests,
    result,
    spelled,
    system,
    tokens,
    user,
    words,
)

LEVEL = 4_000
POLICIES: dict[str, Any] = {
    "cut": {"trigger": {"tokens": LEVEL}, "keep": {"messages": 3}},
    "keep-messages": {"trigger": {"tokens": LEVEL}, "keep": {"messages": 6}},
    "keep-tokens": {"trigger": {"tokens": LEVEL}, "keep": {"tokens": 700}},
    "keep-fraction": {"trigger": {"tokens": LEVEL}, "keep": {"fraction": 0.1}},
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("c"), POLICIES) as front:
        yield front


def compacted(caller: Caller, conversation: list[Message], least: int = 8) -> list[Exchange]:
    """Send the conversation at each turn, as an application does, and return the results."""
    raws = spelled(conversation)
    exchanges = [caller.ask(raws[:end]) for end in requests(conversation)]
    cut = [exchange for exchange in exchanges if exchange.verdict == "compacted"]
    assert len(cut) >= least
    return cut


def test_19_the_first_kept_message_is_never_a_result(front: Front) -> None:
    for policy in ("cut", "default"):
        for exchange in compacted(front.caller(policy), agent(40)):
            roles = [message["role"] for message in decoded(exchange.messages)]
            following = next(role for role in roles[exchange.place + 1 :] if role != "system")
            assert following in ("user", "assistant")
            assert exchange.tail


def test_20_calls_and_results_are_kept_together(front: Front) -> None:
    for policy in ("cut", "default"):
        for exchange in compacted(front.caller(policy), agent(40, 90)):
            messages = decoded(exchange.messages)
            assert parted(messages) == []
            assert any(message["role"] == "tool" for message in messages)


def test_21_parallel_calls_stay_or_go_as_one(front: Front) -> None:
    """In any order of the results. ``agent`` reverses it every other time."""
    sizes = set()
    conversation = agent(40)
    for exchange in compacted(front.caller("cut"), conversation):
        sent = decoded(exchange.messages)
        answered = {message["tool_call_id"] for message in sent if message["role"] == "tool"}
        called = [{c["id"] for c in message["tool_calls"]} for message in conversation if message.get("tool_calls")]
        for group in called:
            assert group <= answered or not group & answered
        sizes |= {len(message["tool_calls"]) for message in sent if message.get("tool_calls")}
    assert sizes == {1, 2, 3}


def test_22_a_group_with_a_strange_id_comes_out_valid(front: Front) -> None:
    def half_strange(name: str) -> list[Message]:
        calls = [call(f"{name}_a", path="a.py"), call(f"{name}_b", path="b.py")]
        return [
            assistant(None, *calls),
            result(f"{name}_a", f"known result of {name}"),
            result(f"{name}_zzz", f"strange result of {name}"),
            assistant("Both are read."),
        ]

    old, new = half_strange("old"), half_strange("new")
    messages = [*chat(2, 200), user("Read."), *old, *chat(4, 400)[1:], user("Read again."), *new, user("And now?")]
    exchange = front.caller("keep-messages").ask(messages)
    assert exchange.verdict == "compacted"
    sent = decoded(exchange.messages)
    assert parted(sent) == []
    assert [m["content"] for m in sent if m["role"] == "tool" and m["tool_call_id"] == "new_a"] == [
        "known result of new"
    ]
    assert "strange result of new" in json.dumps(sent), "what it says is not lost"
    assert "old_b" not in json.dumps([m for m in sent if m["role"] in ("assistant", "tool")])


def test_23_ids_that_come_again_are_matched_by_occurrence(front: Front) -> None:
    conversation = agent(40, fresh_ids=False)
    for exchange in compacted(front.caller("cut"), conversation):
        sent = decoded(exchange.messages)
        assert parted(sent) == []
        asked: dict[str, Any] = {}
        for message in sent:
            for made in message.get("tool_calls") or []:
                asked[made["id"]] = json.loads(made["function"]["arguments"])
            if message["role"] == "tool":
                wanted = asked[message["tool_call_id"]]
                assert message["content"].startswith(f"turn {wanted['turn']} place {wanted['place']}:")


def test_24_reasoning_stays_with_its_tool_loop_or_goes_whole(front: Front) -> None:
    conversation = agent(40)
    for number, message in enumerate(conversation):
        if message.get("tool_calls"):
            message["reasoning_content"] = f"thought {number}: I should read that."
            thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": f"SIGNED-{number}-END"}
            message["thinking_blocks"] = [thinking]
    raws = spelled(conversation)
    for exchange in compacted(front.caller("cut"), conversation):
        thoughtful = [raw for raw in exchange.messages if b"SIGNED-" in raw]
        assert thoughtful
        for raw in thoughtful:
            assert raw in raws, "thoughts, signature and calls byte by byte"
        assert "SIGNED-" not in exchange.summary


@pytest.mark.parametrize("keep", ["messages", "tokens", "fraction"])
def test_25_the_kept_end_is_as_long_as_asked_for(front: Front, keep: str) -> None:
    """At the checkpoint. Later requests keep more, because the cut stays the same until the next one."""
    end = agent(7, 1)[2:] if keep == "messages" else chat(8, 60, seed="end")[1:]
    messages = padded([*chat(7, 190), *end], LEVEL + 60)
    exchange = front.caller(f"keep-{keep}").ask(messages)
    assert exchange.verdict == "compacted"
    kept = decoded(exchange.tail)
    groups = [place for place, message in enumerate(kept) if message["role"] != "tool"]
    assert groups[0] == 0, "whole groups"
    # If the cut is between a question and work on it, the question is kept in addition.
    on_top = kept[0]["role"] == "user" and kept[1]["role"] != "user" and keep != "messages"
    smaller = kept[groups[2 if on_top else 1] :]

    def size(part: list[Message]) -> int:
        return len(part) if keep == "messages" else sum(map(counter.message, part))

    wanted = {"messages": 6, "tokens": 700, "fraction": int(0.1 * BUDGET)}[keep]
    assert size(kept) >= wanted
    assert size(smaller) < wanted, "one group less would not do"
    assert tokens(messages[: -len(kept)]) > LEVEL // 2


def test_26_a_group_that_is_too_large_keeps_all_its_results(front: Front) -> None:
    ids = [f"call_{n}" for n in range(4)]
    results = {
        name: "\n".join(f"{name} line {n} of a long log: {words(6, f'{name}w{n}x')}" for n in range(40 * weight))
        for name, weight in zip(ids, (7, 1, 9, 8), strict=True)
    }
    asked = assistant("I read four logs.", *(call(name, path=f"{name}.log") for name in ids))
    group = [asked, *(result(name, text) for name, text in results.items())]
    assert sum(map(counter.message, group)) > 2 * BUDGET
    messages = [*chat(4, 200), user("Read the logs."), *group]
    exchange = front.caller().ask(messages)
    assert exchange.verdict == "compacted"
    assert exchange.request.tokens <= BUDGET
    sent = decoded(exchange.messages)
    assert sent[-5] == asked
    assert [message["tool_call_id"] for message in sent[-4:]] == ids
    for message in sent[-4:]:
        whole = results[message["tool_call_id"]]
        assert message["content"].splitlines()[0] == whole.splitlines()[0]
        assert message["content"].splitlines()[-1] == whole.splitlines()[-1]
        assert len(message["content"]) <= len(whole)
    assert sent[-3]["content"] == results[ids[1]], "the small one stays whole"


def test_27_nothing_before_the_cut_is_nothing_to_do(front: Front) -> None:
    for messages in (
        [system(), user(words(7_000, "long"))],
        [system(words(6_000, "law")), user("Hello. " + words(700, "long"))],
        [user(words(7_000, "long"))],
    ):
        caller = front.caller()
        exchange = caller.ask(messages)
        assert exchange.verdict == "none"
        assert exchange.untouched
