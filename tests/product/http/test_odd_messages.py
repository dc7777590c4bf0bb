"""Messages that are none, and odd bodies, in conversations that must be counted and compacted: never a fault."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.dialects.request import MAX_MESSAGES
from tests.kit.client import StartProxy, ask, chat
from tests.kit.odd_bodies import generated, hand_written, with_stream
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer


def messages(text: str) -> bytes:
    return ('{"model":"gpt-4o-mini","messages":' + text + "}").encode()


# Messages that are none, and parts of messages that are something else than the API says.
ODD_MESSAGES = (
    "5",
    "null",
    '"text"',
    "[]",
    "{}",
    "true",
    "1e400",
    '{"role":"user"}',
    '{"content":"no role"}',
    '{"role":5,"content":"x"}',
    '{"role":null,"content":null}',
    '{"role":["user"],"content":"x"}',
    '{"role":"user","content":5}',
    '{"role":"user","content":{"a":1}}',
    '{"role":"user","content":[5,null,"x",[],{}]}',
    '{"role":"user","content":[{"type":5,"text":5}]}',
    '{"role":"user","content":[{"type":"text"}]}',
    '{"role":"user","content":[{"type":"image_url","image_url":5}]}',
    '{"role":"user","content":[{"type":"image_url","image_url":{"url":5}}]}',
    '{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,@@@"}}]}',
    '{"role":"user","content":[{"type":"input_audio","input_audio":"x"}]}',
    '{"role":"user","content":[{"type":"file","file":null}]}',
    '{"role":"user","content":"x","name":5}',
    '{"role":"user","content":1e400}',
    '{"role":"user","content":"\\ud83d half"}',
    '{"role":"user","content":"x","\\ud83d":1}',
    '{"role":"assistant","tool_calls":"x"}',
    '{"role":"assistant","tool_calls":5,"content":5}',
    '{"role":"assistant","tool_calls":{"id":"a"}}',
    '{"role":"assistant","tool_calls":[5,null,"x",[]]}',
    '{"role":"assistant","tool_calls":[{}]}',
    '{"role":"assistant","tool_calls":[{"id":5,"function":5}]}',
    '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":5,"arguments":5}}]}',
    '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"write_file","arguments":{"a":1}}}]}',
    '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"write_file","arguments":"no JSON"}}]}',
    '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"write_file","arguments":"[1e400]"}}]}',
    '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}},'
    '{"id":"a","function":{"name":"f","arguments":"{}"}}]}',
    '{"role":"assistant","function_call":5}',
    '{"role":"assistant","function_call":{"name":5,"arguments":[]}}',
    '{"role":"assistant","content":[{"type":"refusal","refusal":5}],"audio":5,"refusal":5}',
    '{"role":"tool"}',
    '{"role":"tool","tool_call_id":5,"content":5}',
    '{"role":"tool","tool_call_id":"orphan","content":"x"}',
    '{"role":"tool","tool_call_id":"orphan","content":[{"type":"text","text":"x"},5]}',
    '{"role":"function","name":5,"content":null}',
    '{"role":"system","content":5}',
    '{"role":"developer","content":[5]}',
    '{"role":"user","role":"tool","content":"twice"}',
)

TRIGGERED = {
    "trigger": {"tokens": 900},
    "keep": {"messages": 4},
    "summary": {"max_tokens": 100},
    "user_messages": {"max_tokens": 200},
    "index": {"max_tokens": 50},
}


def summaries(arrived: Arrived) -> list[Step]:
    said = "The talk so far." if b"<transcript>" in arrived.body else "Fine."
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
    return [answer(json.dumps(body).encode())]


def talk(turns: int) -> list[str]:
    """Messages long enough to reach the trigger, as JSON. Most is the assistant's: the user's words stay."""
    roles, sizes = ("user", "assistant"), (1, 20)
    words = "These are some words of a conversation about nothing. "
    return [
        json.dumps({"role": roles[turn % 2], "content": f"{turn}. {words * sizes[turn % 2]}"}) for turn in range(turns)
    ]


@pytest.fixture(scope="module")
def triggered(start_module_proxy: StartProxy) -> Iterator[tuple[str, RawUpstream]]:
    with RawUpstream(summaries) as running:
        yield start_module_proxy(running.url, {"policies": {"default": TRIGGERED}}), running


PLACES = (0, 1, 7, 12)


def same(value: Any) -> str:
    """A text by which values can be compared. Lone surrogates, which no encoder lets through, are as if replaced."""
    return re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(value, sort_keys=True, ensure_ascii=False))


@pytest.mark.parametrize("odd", ODD_MESSAGES)
def test_odd_messages_where_they_must_be_counted(triggered: tuple[str, RawUpstream], odd: str, full: bool) -> None:
    """Without ``--full``, each message is in two of the places, and the next one in the others."""
    url, upstream = triggered
    for place in PLACES if full else PLACES[ODD_MESSAGES.index(odd) % 2 :: 2]:
        listed = talk(12)
        listed.insert(place, odd)
        sent = messages(f"[{','.join(listed)}]")
        got = ask(url, body=sent)
        assert got.status == 200, got.body
        if got.header("x-compaction") == "none":
            assert upstream.last.body == sent
            continue
        assert got.header("x-compaction") == "compacted"
        arrived = json.loads(upstream.last.body)["messages"]
        assert int(got.header("x-compaction-tokens-after") or 0) < int(got.header("x-compaction-tokens-before") or 0)
        if place < 12:  # what is odd itself may be put right on the way
            assert same(arrived[-1]) == same(json.loads(listed[-1]))


def test_every_odd_body_where_it_must_be_counted(triggered: tuple[str, RawUpstream]) -> None:
    """A long talk with odd fields, odd tools and odd spellings round it."""
    url, upstream = triggered
    started = time.process_time()
    for body in [*hand_written(), *generated(40)]:
        text = with_stream(body, None).decode()
        long = text.replace('"messages":[', f'"messages":[{",".join(talk(12))},', 1).replace(",]", "]")
        got = ask(url, body=long.encode())
        assert got.status == 200, text
        assert got.header("x-compaction") in ("none", "compacted"), text
        if got.header("x-compaction") == "none":
            assert upstream.last.body == long.encode()
        else:
            kept, came = json.loads(upstream.last.body), json.loads(long)
            del kept["messages"], came["messages"]
            assert same(kept) == same(came)
    assert time.process_time() - started < 60


def test_as_many_messages_as_a_request_may_have(triggered: tuple[str, RawUpstream]) -> None:
    url, _ = triggered
    sent = messages("[" + ",".join(['{"role":"user","content":"hi"}'] * MAX_MESSAGES) + "]")
    got = ask(url, body=sent)
    assert got.status == 200
    assert got.header("x-compaction") in ("none", "compacted")
    assert ask(url, body=chat()).status == 200
