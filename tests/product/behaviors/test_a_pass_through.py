"""Pass-through: behaviours 1 to 5."""

import json
from collections.abc import Iterator

import pytest

from tests.kit.behaviors import (
    TAG,
    Front,
    agent,
    assistant,
    body,
    call,
    chat,
    counter,
    decoded,
    fields_of,
    opened,
    result,
    spelled,
    system,
    user,
    words,
)

POLICIES = {"off": {"mode": "off"}}

# Spelled as no encoder would, with fields that nobody knows.
ODD_BODY = (
    b'{\r\n "messages" : [ {"content":"a \\u00e9 \\/ \xc3\xa9  \\t b","role":"user","x-unknown":{"z":1.10}} ,\n'
    b'{"role":"assistant","content":null,"tool_calls":[{"type":"function","id":"call_1","function":'
    b'{"arguments":"{ \\"a\\" :  1 }","name":"look"}}]},{"role":"tool","tool_call_id":"call_1","content":"  spaces  "}]'
    b' ,"temperature": 1.10,"unknown":{"b":[ ],"a":null},"seed":12345678901234567890,"model":"m"\t}\n\n'
)

FIELDS = {
    "model": b'"m"',
    "tools": b'[ {"type":"function","function":{"parameters":{"type":"object","properties":{}},"name":"look"}} ]',
    "tool_choice": b'{"function":{"name":"look"}, "type":"function"}',
    "response_format": b'{"type" :"json_object"}',
    "temperature": b"1.10",
    "top_p": b"9.99e-1",
    "stream": b" false",
    "n": b"1",
    "stop": b'["\\u0041", "\\n\\n"]',
    "seed": b"12345678901234567890",
    "logit_bias": b'{"50256":-100,"1":1e-3}',
    "metadata": b'{"z":"1", "a":"\\/"}',
    "user": b'"somebody \\u00e9"',
    "max_completion_tokens": b"64",
    "parallel_tool_calls": b"true",
    "x-unknown": b'{"b":[ 1 ],"a":null}',
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with opened(tmp_path_factory.mktemp("a"), POLICIES) as front:
        yield front


def test_01_below_every_trigger_bodies_are_byte_identical(front: Front) -> None:
    caller = front.caller()
    for raw in (ODD_BODY, body(spelled(agent(6)), **FIELDS), body(spelled(chat(2, 1_000)), stream=True)):
        exchange = caller.post(raw)
        assert exchange.verdict == "none"
        assert exchange.untouched
    assert caller.asked == []


def test_02_switched_off_bodies_are_byte_identical_at_any_size(front: Front) -> None:
    huge = body(spelled(chat(10, 2_000)))
    by_policy, by_header = front.caller("off"), front.caller()
    for exchange in (by_policy.post(huge), by_header.post(huge, x_compaction="off")):
        assert exchange.verdict == "off"
        assert exchange.untouched
    assert by_policy.asked == by_header.asked == []
    assert by_header.post(huge).verdict == "compacted", "without the header it is compacted"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_03_fields_beside_the_messages_never_change(front: Front, stream: bool) -> None:
    streaming = {"stream": b"true ", "stream_options": b'{ "include_usage":true}'} if stream else {}
    raw = body(spelled(chat(10, 400)), **{**FIELDS, **streaming})
    exchange = front.caller().post(raw)
    assert exchange.verdict == "compacted"
    before, after = fields_of(raw), fields_of(exchange.request.raw)
    assert list(after) == list(before), "the order of the fields"
    assert before.pop("messages") != after.pop("messages")
    assert after == before


def test_04_untouched_messages_keep_bytes_and_order(front: Front) -> None:
    messages = spelled([*agent(30), assistant("Done \u2013 \U0001f642 / </b>"), user("And now?  \t\u00e9\n")])
    assert len({raw[:9] for raw in messages}) > 2, "they are spelled in more than one way"
    exchange = front.caller().ask(messages)
    assert exchange.verdict == "compacted"
    came = [raw for raw in exchange.messages if raw in messages]
    assert len(exchange.messages) - len(came) == 1, "only the summary message is the proxy's"
    places = [messages.index(raw) for raw in came]
    assert places == sorted(places)
    assert len(exchange.tail) >= 4


def test_05_no_message_carries_marks_of_the_proxy(front: Front) -> None:
    """Also if the proxy shortens results and arguments and repairs damage."""
    lines = "\n".join(f"line {n}: {words(8, f'l{n}x')}" for n in range(400))
    written = call("call_w", "write_file", path="a.py", content=lines)
    messages = [
        system(),
        user("Look at the log."),
        assistant(None, written),
        result("call_w", "written"),
        assistant(None, call("call_a", "cat")),
        result("call_a", lines),
        result("call_nobody", "a stray result"),
        *chat(2, 200)[1:],
        user("What now?"),
    ]
    known = {"role", "content", "name", "tool_calls", "tool_call_id"}
    for conversation in (messages, [*messages[:-1], *chat(6, 400)[1:]], agent(30)):
        exchange = front.caller().ask(conversation)
        assert exchange.verdict == "compacted"
        for message in decoded(exchange.messages):
            assert set(message) <= known
            for made in message.get("tool_calls") or []:
                assert set(made) == {"id", "type", "function"}
                assert set(made["function"]) == {"name", "arguments"}
    assert TAG in json.dumps(exchange.request.body)
    assert counter.request(exchange.request.body).total < 8_000
