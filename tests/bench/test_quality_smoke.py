"""Check the figures of the quality benchmark on small conversations."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.quality import dirt
from bench.quality.__main__ import COLUMNS, cell
from bench.quality.conversations import SHAPES, Conversation, Outcome, tool_loop
from bench.quality.engine import TOKENIZER, input_budget, running
from bench.quality.judge import Figures, Judge, named_ids
from bench.quality.langchain import MIDDLEWARE, PYTHON, TUNED, langchain
from bench.quality.summarizer import SUMMARIZERS
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.units import arguments_of, text_of
from proxy.limits.profiles import Profile
from tests.kit.upstream import faults

WINDOW = 8192
COUNTER = ChatCounter(Profile("bench", tokenizer=TOKENIZER))


def replayed(conversation: Conversation, summarizer: str = "echo") -> Outcome:
    async def replay() -> Outcome:
        async with running() as engine:
            return await engine.replay(conversation, WINDOW, summarizer)

    return asyncio.run(replay())


def judged(conversation: Conversation, outcome: Outcome, window: int = WINDOW, users: int = 1000) -> Figures:
    figures = Figures()
    Judge(COUNTER).add(figures, conversation, outcome, window, users)
    return figures


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_conversations_are_valid_and_the_same_at_every_run(make: Callable[[int, int], Conversation]) -> None:
    one, again, other = make(1, 3000), make(1, 3000), make(2, 3000)
    assert one == again
    assert one.messages != other.messages
    assert faults({"messages": one.messages}) == []


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_every_message_but_the_first_has_one_fact(make: Callable[[int, int], Conversation]) -> None:
    conversation = make(1, 3000)
    texts = [
        text_of(message) + "".join(arguments for _, arguments in arguments_of(message))
        for message in conversation.messages
    ]
    assert sorted(conversation.facts.values()) == list(range(1, len(texts)))
    assert all(sum(fact in text for text in texts) == 1 for fact in conversation.facts)
    assert all(fact in texts[place] for fact, place in conversation.facts.items())


@pytest.mark.parametrize("kind", dirt.KINDS)
def test_dirt_is_put_in(kind: str) -> None:
    clean = tool_loop(1, 3000)
    dirty = dirt.dirtied(clean, kind)
    assert dirty == dirt.dirtied(clean, kind)
    assert dirty.messages != clean.messages
    assert faults({"messages": clean.messages}) == []
    # Repeated ids are valid, but a naive engine can confuse them.
    assert bool(faults({"messages": dirty.messages})) == (kind != "reused ids")


@pytest.mark.parametrize("summarizer", SUMMARIZERS)
def test_the_engine_is_replayed_turn_by_turn(summarizer: str) -> None:
    conversation = tool_loop(1, 20_000)
    outcome = replayed(conversation, summarizer)
    assert len(outcome.prompts) == len(conversation.requests())
    assert outcome.reads
    assert all(0 < tokens <= input_budget(WINDOW) for tokens in outcome.reads)
    figures = judged(conversation, outcome).values()
    assert (figures["over"], figures["invalid"], figures["users"]) == (0, 0, 1)
    assert 0 < (figures["facts"] or 0) < 1
    assert 0 < (figures["stays"] or 0) < 1
    # All that was taken out is one look-up away; were the archive empty, no more would be than can be read at once.
    assert figures["archive"] == 1
    lost = judged(conversation, replace(outcome, archived={})).values()
    assert lost["archive"] == lost["facts"] == figures["facts"]


def test_facts_are_reached_by_the_ids_in_the_prompt_alone() -> None:
    named, other, gone = "0123456789abcdef0123", "f" * 20, "0" * 20
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "AA11 BB22"},
        {"role": "assistant", "content": "CC33"},
        {"role": "user", "content": "DD44 " * 10},
    ]
    conversation = Conversation("", messages, {"AA11": 0, "BB22": 0, "CC33": 1})
    notes = [f"AA11, in the archive as {id_}." for id_ in (named, gone, other)]
    sent = [{"role": "user", "content": note} for note in notes]
    archived = {named: [messages[0]], other: messages}
    figures = judged(conversation, Outcome(sent, [[2], [0, 1]], archived=archived), 20).values()
    # Only the second prompt is judged. No id in it leads to CC33.
    assert figures["facts"] == pytest.approx(1 / 3)
    assert figures["archive"] == pytest.approx(2 / 3)
    assert named_ids({"role": "user", "content": "as 0123456789abcdef0123, in the archive as 0123"}) == set()


def call(path: str) -> dict[str, Any]:
    arguments = '{"path": "' + path + '"}'
    return {"id": path, "type": "function", "function": {"name": "read_file", "arguments": arguments}}


def test_an_outcome_is_judged_by_what_can_be_read_in_it() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "First AA11."},
        {"role": "assistant", "content": None, "tool_calls": [call("src/a.py"), call("src/b.py")]},
        {"role": "tool", "tool_call_id": "src/a.py", "content": "BB22 " * 10},
        {"role": "tool", "tool_call_id": "src/b.py", "content": "CC33"},
        {"role": "assistant", "content": "DD44"},
        {"role": "user", "content": "Second EE55."},
    ]
    facts = {"AA11": 1, "BB22": 3, "CC33": 4, "DD44": 5, "EE55": 6}
    conversation = Conversation("", messages, facts)
    summary = {"role": "user", "content": "BB22 was read.\n- /work/src/: a.py: name; c.py"}
    sent = [messages[0], summary, messages[5], messages[6], *messages[1:5]]
    outcome = Outcome(sent, [[0, 4], [0, 4, 5, 6, 7], [0, 1, 2, 3]], [70])
    window = COUNTER.message(messages[0]) + sum(COUNTER.message(message) for message in messages[1:6])
    figures = judged(conversation, outcome, window).values()
    # Only the last request is larger than the window. AA11, BB22 and CC33 are in messages that went; one is readable.
    assert figures["facts"] == pytest.approx(1 / 3)
    assert figures["archive"] is None
    assert figures["paths"] == 1 / 2
    assert figures["users"] == 1 / 2
    assert (figures["over"], figures["invalid"]) == (0, 0)
    assert (figures["summaries"], figures["read"]) == (1, 70)
    # The second prompt begins with all of the first, the third with little more than the second's system message.
    sizes = [COUNTER.message(message) for message in messages]
    first, second = sum(sizes[:2]), sum(sizes[:5])
    assert first + sizes[0] < (figures["stays"] or 0) * (first + second) < first + sizes[0] + sizes[1]


def test_prompts_that_are_too_long_or_invalid_are_counted() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "word " * 100},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ]
    orphan = {"role": "tool", "tool_call_id": "x", "content": "y"}
    conversation = Conversation("", messages)
    same = judged(conversation, Outcome(messages, [[0], [0, 1, 2]]), 50)
    assert (same.over.value, same.invalid.value, same.facts.value) == (1, 0, None)
    bad = judged(conversation, Outcome([orphan], [[0], [0]]), 50)
    assert (bad.over.value, bad.invalid.value, bad.users.value) == (0, 1, 0)


def test_figures_of_two_summarizers_share_a_cell() -> None:
    rows: list[dict[str, float | None]] = [{"facts": 0.05, "over": 0.0}, {"facts": 0.28, "over": 0.5}]
    assert cell(rows, *COLUMNS["dropped facts"]) == "5/28%"
    assert cell(rows, *COLUMNS["too long"]) == "25%"
    assert cell([{"archive": None}], *COLUMNS["with archive"]) == "–"


@pytest.mark.skipif(not PYTHON.exists(), reason="the environment with LangChain is not made")
def test_langchain_is_replayed_turn_by_turn() -> None:
    conversation = SHAPES["multi-turn"](1, 12_000)
    with langchain() as peer:
        assert peer is not None
        assert set(peer.versions) == {"langchain", "langchain-core"}
        for method in (MIDDLEWARE, TUNED):
            outcome = peer.replay(conversation, WINDOW, method, "extract")
            assert len(outcome.prompts) == len(conversation.requests())
            assert outcome.reads
            assert outcome == peer.replay(conversation, WINDOW, method, "extract")
