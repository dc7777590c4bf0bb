"""Test that strict chat templates accept the rewritten messages."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.turn import OutgoingMessage
from proxy.dialects.chat.alternation import NOTE, NOTED, OPENING, alternating
from proxy.dialects.chat.units import text_of
from proxy.dialects.units import decode
from tests.kit.conversations import (
    FORMAT,
    IMAGE,
    Message,
    assistant,
    call,
    conversations,
    expand,
    message_tokens,
    result,
    system,
    turn,
    user,
)
from tests.kit.strict_template import mistral_accepts
from tests.kit.upstream import faults as chat_faults


def piece(message: Any) -> OutgoingMessage:
    made = turn(message)
    return OutgoingMessage(made.raw, made.facts.tokens, made)


def messages_of(pieces: Sequence[OutgoingMessage]) -> list[Any]:
    return [msgspec.json.decode(p.raw) for p in pieces]


def strict(messages: Sequence[Any]) -> list[Any]:
    return messages_of(alternating([piece(message) for message in messages], FORMAT))


def part(text: str) -> Message:
    return {"type": "text", "text": text}


def reply(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


GO, OK = user("go"), assistant("ok")
A, B = call("a"), call("b")
OPENED, BETWEEN = user(OPENING), assistant(NOTED)
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "nothing": ([], []),
    "nothing said in lists": ([user(""), {"role": "user", "content": []}], [user("")]),
    "a refusal before calls": (
        [GO, reply(None, refusal="no"), reply("well", tool_calls=[A]), result("a", "1")],
        [GO, reply("well", refusal="no", tool_calls=[A]), result("a", "1")],
    ),
    "two audios": ([GO, reply(None, audio={"id": "1"}), reply("", audio={"id": "2"})],) * 2,
    "the assistant first": ([system("x"), OK, GO], [system("x"), OPENED, OK, GO]),
    "a note behind the user": ([GO, system("mind"), OK], [user(f"go\n\n{NOTE}mind"), OK]),
    "a note without text": (
        [GO, {"role": "system", "content": [IMAGE]}],
        [{"role": "user", "content": [part("go"), part(NOTE.strip()), IMAGE]}],
    ),
    "notes that say nothing": (
        [GO, system(" "), {"role": "system"}, system(""), {"role": "system", "content": [part("")]}, OK],
        [GO, OK],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_sequence(name: str) -> None:
    before, wanted = CASES[name]
    assert strict(before) == wanted
    assert strict(wanted) == wanted


def gemma_accepts(messages: Sequence[Any]) -> bool:
    """Check like the templates of Gemma, Llama 2, and Mistral 7B v0.1, which skip only a leading system message."""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return all((m["role"] == "user") == (place % 2 == 0) for place, m in enumerate(rest))


def exchange(ids: Sequence[str], text: str | None) -> list[Any]:
    return [assistant(text, *(call(id_) for id_ in ids)), *(result(id_, f"result {id_}") for id_ in ids)]


texts = st.text("ab \n", min_size=0, max_size=5)
contents: st.SearchStrategy[Any] = texts | st.lists(st.builds(part, texts) | st.just(IMAGE), min_size=1, max_size=3)
talk: st.SearchStrategy[list[Any]] = st.one_of(
    st.builds(lambda c, n: [{"role": "user", "content": c, **({"name": n} if n else {})}], contents, texts),
    st.builds(lambda c: [{"role": "assistant", "content": c}], texts | st.lists(st.builds(part, texts), min_size=1)),
    st.builds(lambda c: [{"role": "system", "content": c}], texts),
    st.builds(lambda c: [{"role": "developer", "content": [part(c)]}], texts),
)
tools: st.SearchStrategy[list[Any]] = st.builds(exchange, st.sampled_from((("a",), ("a", "b"))), texts | st.none())


def flattened(drawn: Sequence[list[Any]]) -> list[Any]:
    return [message for block in drawn for message in block]


def words(messages: Sequence[Any]) -> list[str]:
    """Return all words in order, without the text that the proxy inserts."""
    said = "\n".join(text_of(m) for m in messages)
    for own in (NOTE.strip(), OPENING, NOTED):
        said = said.replace(own, " ")
    return said.split()


def check(messages: list[Any], accepts: Callable[[Sequence[Any]], bool]) -> list[Any]:
    """Check the properties of every result. Return the result."""
    pieces = [piece(message) for message in messages]
    once = alternating(pieces, FORMAT)
    after = messages_of(once)
    assert accepts(after)
    assert alternating(once, FORMAT) == once
    assert words(after) == words(messages)
    assert all(p.tokens == message_tokens(decode(p.raw)) for p in once)
    calls = [c["id"] for m in messages for c in m.get("tool_calls") or []]
    assert [c["id"] for m in after for c in m.get("tool_calls") or []] == calls
    results = [m for m in messages if m["role"] in ("tool", "function")]
    assert [m for m in after if m["role"] in ("tool", "function")] == results
    places = {id(p.turn): place for place, p in enumerate(pieces)}
    order = [places[id(p.turn)] for p in once if p.turn is not None]
    assert order == sorted(set(order))
    old = {id(p) for p in pieces}
    put_in = [m for p, m in zip(once, after, strict=True) if id(p) not in old and p.turn is None]
    assert all(m in (OPENED, BETWEEN) for m in put_in)
    assert put_in.count(OPENED) <= 1
    assert sum(p.tokens for p in once) <= (
        sum(p.tokens for p in pieces)
        + sum(map(message_tokens, put_in))
        + sum(message_tokens(user(NOTE)) for m in messages if m["role"] in ("system", "developer"))
    )
    return after


@given(st.lists(talk | tools, max_size=12), st.booleans())
def test_mistrals_template_accepts_every_outcome(drawn: list[list[Any]], headed: bool) -> None:
    body = flattened(drawn)
    while body and body[0]["role"] in ("system", "developer"):
        del body[0]
    messages = [*([system("head")] if headed else []), *body]
    after = check(messages, mistral_accepts)
    if body:
        assert chat_faults({"messages": after}) == chat_faults({"messages": messages}) == []


@given(st.lists(talk, max_size=12))
def test_gemmas_template_accepts_every_outcome_without_tools(drawn: list[list[Any]]) -> None:
    body = flattened(drawn)
    while body and body[0]["role"] in ("system", "developer"):
        del body[0]
    check([system("head"), *body], gemma_accepts)


@given(conversations)
def test_clean_conversations_with_large_texts(drawn: Any) -> None:
    messages = [m for m in expand(drawn[:12], 500) if not m.get("function_call") and m["role"] != "function"]
    after = check(messages, mistral_accepts)
    assert chat_faults({"messages": after}) == []


@given(st.lists(talk | tools, min_size=1, max_size=12), st.integers(0, 12))
def test_what_is_appended_changes_no_message_but_the_last(drawn: list[list[Any]], end: int) -> None:
    """Each request must start with all messages of an earlier one except its last, for the prompt cache."""
    messages = [system("head"), GO, *flattened(drawn)]
    earlier = strict(messages[: 2 + end])
    assert strict(messages)[: len(earlier) - 1] == earlier[:-1]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
wild = anything | st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "assistant", "tool", "system", "developer", "critic")) | anything},
    optional={
        "content": anything | contents,
        "tool_calls": anything,
        "function_call": anything,
        "refusal": anything,
        "name": anything,
    },
)


@given(st.lists(wild, max_size=12))
def test_nothing_that_a_client_sends_raises(messages: list[Any]) -> None:
    once = alternating([piece(message) for message in messages], FORMAT)
    assert alternating(once, FORMAT) == once


@pytest.mark.long
@pytest.mark.parametrize("message", [GO, OK, system("x")])
def test_thousands_in_a_row_take_no_longer_than_their_number(message: Message) -> None:
    pieces = [piece(m) for m in [GO, *[message] * 5_000]]
    started = time.process_time()
    assert len(alternating(pieces, FORMAT)) <= 2
    assert time.process_time() - started < 5
