"""Parts that always stay word for word: behaviors 28 to 37."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.behaviors import (
    Front,
    Message,
    agent,
    assistant,
    body,
    call,
    chat,
    counter,
    decoded,
    is_summary,
    opened,
    parted,
    requests,
    result,
    spelled,
    system,
    user,
    words,
)

POLICIES: dict[str, Any] = {
    "first": {"user_messages": {"max_tokens": 300}},
    "no-first": {"user_messages": {"max_tokens": 300, "keep_first": False}},
    "pinned": {"pinned": [r"DO-NOT-TOUCH-\d+", r"\bTICKET-7\b"]},
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("d"), POLICIES) as front:
        yield front


def loop(turns: int, size: int = 300, *, start: int = 0) -> list[Message]:
    messages = []
    for turn in range(start, start + turns):
        messages.append(assistant(None, call(f"loop_{turn}", path=f"src/file_{turn}.py")))
        messages.append(result(f"loop_{turn}", f"result {turn}: " + words(size, f"loop{turn}x")))
    return messages


def test_28_leading_system_messages_stay(front: Front) -> None:
    head = [
        system("You are careful. <conversation_summary> is a word like any other.\t\u00e9"),
        system([{"type": "text", "text": "House rules.", "cache_control": {"type": "ephemeral"}}], "developer"),
        system("A second rule."),
    ]
    raws = spelled([*head, *agent(30)[1:]])
    exchange = front.caller().ask(raws)
    assert exchange.verdict == "compacted"
    assert exchange.messages[:3] == raws[:3]
    assert exchange.place == 3


def test_29_system_messages_from_the_middle_stay_in_their_order(front: Front) -> None:
    talk = agent(30)
    laws = [system(f"Rule {n} from here on.", "developer" if n % 2 else "system") for n in range(4)]
    for place, law in zip((60, 30, 13, 2), reversed(laws), strict=True):
        talk.insert(next(n for n in range(place, 0, -1) if talk[n]["role"] != "tool"), law)
    raws = spelled(talk)
    exchange = front.caller().ask(raws)
    assert exchange.verdict == "compacted"
    rules = [raw for raw in raws if json.loads(raw)["content"] and b" from here on." in raw]
    assert len(rules) == 4
    assert [raw for raw in exchange.messages if raw in rules] == rules
    assert sum(raw in exchange.dropped for raw in rules) >= 2, "some stood in the summarised part"
    assert exchange.messages[0] == raws[0]


def test_30_the_users_newest_message_follows_the_summary(front: Front) -> None:
    task = user("Task 2: make  the\tbuild green again, ticket BUILD-99. \u00e9 / </user_message> \U0001f642")
    head = [system(), user("Task 1: look around."), assistant("I did. " + words(60, "look"))]
    raws = spelled([*head, task, *loop(24)])
    exchange = front.caller().ask(raws)
    assert exchange.verdict == "compacted"
    assert json.loads(exchange.tail[0])["role"] == "assistant", "the kept end begins inside the tool loop"
    assert exchange.after[0] == raws[3], "byte by byte, right behind the summary message"
    assert [raw for raw in exchange.messages if raw == raws[3]] == [raws[3]], "once"
    # If the kept end has a user message, that one is the newest.
    raws = spelled([*head, task, *loop(20), assistant("Green."), user("Task 3: now the tests."), *loop(2, start=20)])
    exchange = front.caller().ask(raws)
    assert exchange.verdict == "compacted"
    newest = [raw for raw in exchange.after if json.loads(raw)["role"] == "user"][-1]
    assert b"Task 3: now the tests." in newest
    assert newest in raws


def test_31_the_users_first_message_stays(front: Front) -> None:
    first = user("FIRST-WORDS: repair the build; \u00e9, never touch src/legacy/core.py.")

    def talk() -> list[Message]:
        messages = [system(), first]
        for number in range(1, 14):
            messages.append(assistant(f"Answer {number}. " + words(300, f"a{number}x")))
            messages.append(user(f"Wish {number}: " + words(200, f"w{number}x")))
        return messages

    for policy in ("default", "first"):
        exchange = front.caller(policy).ask(talk())
        assert exchange.verdict == "compacted"
        assert first["content"] in exchange.summary
        assert len(exchange.dropped) > 8
    exchange = front.caller("no-first").ask(talk())
    assert exchange.verdict == "compacted"
    # The room is for the newest ones. The first one is only in the list of rules, because it states one.
    assert f"<user_message>\n{first['content']}" not in exchange.summary
    assert f"\n- {first['content']}\n" in exchange.summary


def test_32_the_users_messages_stay_newest_first_within_a_budget(front: Front) -> None:
    """In small windows the budget is a share of the window. A line counts the messages over it."""
    few = [system()]
    for number in range(12):
        few += [user(f"Wish {number}: keep <b> & \u00e9 {number}."), assistant(words(560, f"a{number}x"))]
    exchange = front.caller().ask([*few, user("And now?")])
    assert exchange.verdict == "compacted"
    wishes = [json.loads(raw)["content"] for raw in exchange.dropped if json.loads(raw)["role"] == "user"]
    assert len(wishes) >= 5
    places = [exchange.summary.find(wish) for wish in wishes[:-1]]
    assert -1 not in places, "all but the newest one in the summary message"
    assert places == sorted(places)
    assert any(wishes[-1] in json.dumps(m, ensure_ascii=False) for m in decoded(exchange.messages))

    many = [system()]
    for number in range(58):
        many += [user(f"Wish {number}, begins. {words(100, f'w{number}x')} Wish {number}, ends."), assistant("Done.")]
    exchange = front.caller().ask([*many, *loop(1), user("And now?")])
    assert exchange.verdict == "compacted"
    wishes = [json.loads(raw)["content"] for raw in exchange.dropped if json.loads(raw)["role"] == "user"]
    sent = "\n".join(str(message["content"]) for message in decoded(exchange.messages[: -len(exchange.tail)]))
    whole = [number for number, wish in enumerate(wishes) if wish in sent]
    begun = [number for number, wish in enumerate(wishes) if f"Wish {number}, begins." in sent and wish not in sent]
    assert 0 in whole + begun
    newest = [number for number in whole if number]
    assert newest == list(range(newest[0], len(wishes))), "the newest ones, without a gap"
    assert len(begun) <= 2
    for number in begun:
        assert f"Wish {number}, ends." in sent, "shortened in the middle"
    left_out = re.search(r"(\d+) earlier user messages", sent)
    assert left_out is not None
    assert int(left_out[1]) == len(wishes) - len(whole) - len(begun)


def test_33_pinned_messages_survive(front: Front) -> None:
    big = "\n".join(f"{n} value {words(5, f'p{n}x')}" for n in range(60)) + "\nDO-NOT-TOUCH-3\n"
    pinned = [
        user("Remember DO-NOT-TOUCH-1: the port is 7411.  \u00e9"),
        assistant("Noted, TICKET-7 is ours.\t"),
        assistant("I read both.", call("pin_a", path="a.py"), call("pin_b", path="b.py")),
        result("pin_b", "of no importance"),
        result("pin_a", big),
        assistant(None, call("pin_c", "run", command="echo DO-NOT-TOUCH-4")),
        result("pin_c", "ran"),
    ]
    talk = [system(), user("Task: repair the build."), *pinned[:1], *loop(2), *pinned[1:2], user("Go on."), *loop(1)]
    talk += [*pinned[2:5], *loop(1, start=40), *pinned[5:], user("And on."), *loop(40, 320, start=50)]
    raws = spelled(talk)
    fixed = [raws[talk.index(message)] for message in pinned]
    caller = front.caller("pinned")
    exchanges = [caller.ask(raws[:end]) for end in requests(talk)]
    cut = [exchange for exchange in exchanges if exchange.verdict == "compacted"]
    assert len({exchange.messages[exchange.place] for exchange in cut}) >= 2, "they survive one summary after another"
    for exchange in cut:
        assert [raw for raw in exchange.messages if raw in fixed] == fixed, "byte by byte, in their order"
        assert [raw for raw in exchange.after if raw in fixed] == fixed, "behind the summary message"
        assert parted(decoded(exchange.messages)) == []
    assert "DO-NOT-TOUCH" not in json.dumps([request.body for request in caller.asked]), "they are not summarised"


def test_34_the_last_words_of_the_assistant_stay(front: Front) -> None:
    said = "LAST-WORDS: the cause is a missing comma in conf/app.yaml, next I rerun the tests."
    messages = [system(), user("Repair the build."), assistant("FIRST-THOUGHT: let me see."), *loop(3), assistant(said)]
    exchange = front.caller().ask([*messages, user("Go on."), *loop(24, start=10)])
    assert exchange.verdict == "compacted"
    assert any(said.encode() in raw for raw in exchange.dropped)
    assert said in exchange.summary
    # Also if the text is in the same message as a call.
    speaking = assistant(said, call("speak", path="x.py"))
    exchange = front.caller().ask([*messages[:-1], speaking, result("speak", "x"), *loop(24, start=10)])
    assert exchange.verdict == "compacted"
    assert said in exchange.summary


def test_35_the_unfinished_exchange_at_the_end_stays_whole(front: Front) -> None:
    ids = [f"last_{n}" for n in range(3)]
    asked = assistant("I look at three.", *(call(name, path=f"{name}.py") for name in ids))
    answers = [result(name, f"content of {name}: " + words(200, f"{name}x")) for name in reversed(ids)]
    raws = spelled([*chat(8, 420), user("Look at three files."), asked, *answers])
    exchange = front.caller().ask(raws)
    assert exchange.verdict == "compacted"
    assert exchange.messages[-4:] == raws[-4:]
    # The client may yet answer calls that nothing follows: they go out as they are, for the upstream to judge.
    exchange = front.caller().post(body(raws[:-3]))
    assert exchange.verdict == "compacted"
    assert exchange.messages[-1] == raws[-4]


def marks(raws: list[bytes]) -> int:
    return sum(raw.count(b"cache_control") for raw in raws)


def test_36_cache_control_stays_on_kept_parts_and_comes_from_nowhere(front: Front) -> None:
    def marked(text: str) -> list[Any]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    long = "\n".join(f"line {n}: {words(8, f'l{n}x')}" for n in range(500))
    talk = [
        system(marked("Be brief.")),
        user(marked("Task 1.")),
        *chat(6, 500)[1:],
        user(marked("Task 2.")),
        assistant(None, call("marked", path="x.py")),
        result("marked", marked(long)),
        user(marked("Task 3.")),
    ]
    exchange = front.caller().ask(spelled(talk))
    assert exchange.verdict == "compacted"
    sent = decoded(exchange.messages)
    assert sent[0] == talk[0]
    assert sent[-1] == talk[-1]
    (kept,) = [message for message in sent if message.get("tool_call_id") == "marked"]
    assert kept["content"][0]["cache_control"] == {"type": "ephemeral"}
    assert len(json.dumps(kept)) < len(json.dumps(talk[-2])), "it was shortened, and the mark stayed"
    assert "cache_control" not in exchange.messages[exchange.place].decode()
    assert marks(exchange.messages) <= marks(spelled(talk))
    exchange = front.caller().ask(spelled(agent(30)))
    assert exchange.verdict == "compacted"
    assert marks([exchange.request.raw]) == 0


def test_37_contents_keep_their_kind(front: Front) -> None:
    """Arrays, strings, and null, also if the proxy shortens messages."""
    long = "\n".join(f"line {n}: {words(8, f'k{n}x')}" for n in range(220))
    written = [call(f"w{n}", "write_file", path=f"w{n}.py", content=long) for n in range(2)]
    shortened = [
        assistant(None, written[0]),
        result("w0", "written"),
        assistant("", written[1]),
        result("w1", [{"type": "text", "text": "written"}]),
        assistant(None, call("r0", path="a.log")),
        result("r0", long),
        assistant([{"type": "text", "text": "I read."}], call("r1", path="b.log")),
        result("r1", [{"type": "text", "text": long}]),
    ]
    plain = [
        assistant(None, call("s0", path="c.py")),
        result("s0", [{"type": "text", "text": "short"}]),
        user([{"type": "text", "text": "One part."}, {"type": "text", "text": "Another."}]),
        assistant([{"type": "text", "text": "Fine."}]),
        user("And now?"),
    ]
    assert counter.message(shortened[5]) > 2_000
    for before in ([system(), user("Begin.")], [*chat(8, 400), user("Go on.")]):
        exchange = front.caller().ask([*before, *shortened, *plain])
        assert exchange.verdict == "compacted"
        by_call = {m["tool_call_id"]: m for m in [*shortened, *plain] if m["role"] == "tool"}
        by_call |= {m["tool_calls"][0]["id"] + "()": m for m in [*shortened, *plain] if m.get("tool_calls")}
        for raw in exchange.messages:
            message = json.loads(raw)
            called = [f"{made['id']}()" for made in message.get("tool_calls") or []]
            came = by_call.get(message.get("tool_call_id") or "".join(called))
            if came is not None:
                assert type(message["content"]) is type(came["content"])
                assert (message["content"] == "") == (came["content"] == "")
                assert message["role"] == came["role"]
            elif not is_summary(raw):
                assert message in [*before, *plain]
        assert exchange.messages[-3:] == exchange.input[-3:]
        assert len(exchange.request.raw) < 0.7 * len(exchange.raw)
