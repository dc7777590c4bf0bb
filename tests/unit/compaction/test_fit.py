"""Test the fit ladder, and that every way of shortening a user message keeps the beginning and end of its text."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction import keeps
from proxy.compaction.fit import NAME, fit
from proxy.compaction.render import RenderedConversation
from proxy.compaction.rules import Rules
from proxy.compaction.turn import OutgoingMessage
from proxy.dialects.units import decode
from tests.kit.compacting import Sent, rules, send
from tests.kit.conversations import (
    FORMAT,
    IMAGE,
    PICTURE,
    Message,
    assistant,
    bytes_of,
    call,
    conversations,
    expand,
    message_tokens,
    requests,
    result,
    system,
    text_of_size,
    turns,
    user,
)
from tests.kit.upstream import faults as chat_faults

FIRM, YIELDING = rules(), rules(shorten_last=True)


def words(tokens: int) -> str:
    return "\n".join(["some words in a line"] * (tokens * 4 // 21))


def whole(messages: list[Message]) -> RenderedConversation:
    return RenderedConversation(
        [OutgoingMessage(t.raw, t.facts.tokens, t) for t in turns(messages)], ("evict_results",)
    )


def fitted(
    messages: list[Message], room: int | None, policy: Rules = FIRM, byte_room: int | None = None
) -> tuple[list[Any], list[int], RenderedConversation]:
    """Fit messages into tokens, bytes, or both. Return the messages, the indexes of changed ones, and the result."""
    out = fit(whole(messages), room, policy, FORMAT, byte_room)
    after = [decode(piece.raw) for piece in out.pieces]
    return after, [n for n, pair in enumerate(zip(messages, after, strict=True)) if pair[0] != pair[1]], out


def test_the_largest_results_go_first_and_no_further_than_needed() -> None:
    calls = [call(f"c{n}", "t") for n in range(3)]
    sizes = (500, 3000, 2000)
    messages = [user(words(900)), assistant(None, *calls)]
    messages += [result(f"c{n}", words(size)) for n, size in enumerate(sizes)]
    _, changed, out = fitted(messages, 4000)
    assert changed == [3, 4]
    assert 3500 < out.tokens <= 4000
    assert out.steps == ("evict_results", NAME)


def test_the_last_user_message_is_shortened_only_if_the_policy_says_so() -> None:
    messages = [user(words(500)), assistant("well"), user(words(5000))]
    after, changed, out = fitted(messages, 2000)
    assert changed == [0]
    assert after[2] == messages[2]
    assert out.tokens > 2000
    after, changed, out = fitted(messages, 2000, YIELDING)
    assert changed == [0, 2]
    assert after[2]["content"].startswith("some words")
    assert after[2]["content"].endswith("some words in a line")
    assert out.tokens <= 2000
    messages = [user("Look."), user("word " * 10_000)]
    assert fitted(messages, None, FIRM, 10_000)[1] == []
    assert fitted(messages, None, YIELDING, 10_000)[2].bytes <= 10_000


def test_older_pictures_become_labels_and_never_come_back() -> None:
    seen = {"role": "user", "content": [*[IMAGE] * 30, {"type": "text", "text": words(900)}]}
    messages = [user("short"), seen, assistant("I see."), user("last")]
    after, changed, out = fitted(messages, 2000)
    assert changed == [1]
    assert {part["type"] for part in after[1]["content"]} == {"text"}
    assert after[1]["content"][30:] == seen["content"][30:]
    assert out.tokens <= 2000
    shorter, changed, further = fitted(messages, 1100)
    assert changed == [1]
    assert {part["type"] for part in shorter[1]["content"]} == {"text"}
    assert further.tokens < out.tokens


def test_in_bytes_the_largest_pictures_go_first_and_texts_stay() -> None:
    shot = {"role": "tool", "tool_call_id": "c", "content": [PICTURE, PICTURE]}
    messages = [user("x" * 3_000), assistant(None, call("c", "look")), shot]
    messages += [{"role": "user", "content": [PICTURE]}, assistant("I see."), {"role": "user", "content": [PICTURE]}]
    _, changed, out = fitted(messages, None, byte_room=30_000)
    assert changed == [2]
    assert out.bytes <= 30_000
    assert out.steps == ("evict_results", NAME)


def only_short_arguments(message: Any) -> bool:
    """Return whether a message has calls only, without a long argument.

    The ladder shortens arguments over 400 characters, and Chinese text of that length can have 400 tokens.
    """
    calls = message.get("tool_calls", ())
    values = [value for call in calls for value in json.loads(call["function"]["arguments"]).values()]
    return (
        bool(calls) and not message["content"] and all(len(value) <= 450 for value in values if isinstance(value, str))
    )


@given(conversations, st.sampled_from((1792, 7168)), st.floats(0.05, 1.2))
def test_any_conversation_stays_valid_and_fits_unless_what_is_left_is_firm(
    drawn: Any, window: int, share: float
) -> None:
    messages = expand(drawn, window)
    messages = messages[: requests(messages)[-1]]
    before = whole(messages)
    room = int(share * before.tokens)
    after, changed, out = fitted(messages, room)
    assert chat_faults({"messages": after}) == []
    last_user = max(n for n, message in enumerate(messages) if message["role"] == "user")
    assert not any(messages[n]["role"] == "system" or n == last_user for n in changed)
    assert all(out.pieces[n].tokens < before.pieces[n].tokens for n in changed)
    assert all(piece.tokens == message_tokens(decode(piece.raw)) for piece in out.pieces)
    if out.tokens > room:
        # All messages that the ladder may shorten are small.
        for n, piece in enumerate(out.pieces):
            firm = messages[n]["role"] == "system" or n == last_user
            short = piece.tokens <= keeps.FIT_TOKENS + 100 or only_short_arguments(decode(piece.raw))
            assert firm or short or IMAGE in (messages[n]["content"] or ())
    after, _, out = fitted(messages, None, byte_room=int(share * bytes_of(messages)))
    assert chat_faults({"messages": after}) == []
    assert out.bytes <= bytes_of(messages)
    assert all(piece.tokens == message_tokens(decode(piece.raw)) for piece in out.pieces)


BEGINNING, END = "<<", ">>"
FILE = {"type": "file", "file": {"file_data": "data:text/plain;base64," + "QUJD" * 40}}

kinds = st.sampled_from(("image", "image", "file", "text"))
layouts = st.tuples(st.lists(kinds, max_size=30), st.lists(kinds, max_size=30))
sizes = st.sampled_from((3, 40, 150, 400, 1500, 4000))
flavours = st.integers(0, 6)


def asked(number: int, layout: Any, size: int, flavour: int) -> Message:
    """Return a user message between media parts, with markers at both ends of its text."""
    before, after = layout
    text = f"{BEGINNING}{number:02}{text_of_size(size, flavour, number)}{number:02}{END}"
    media = {"image": IMAGE, "file": FILE}
    parts = [media[kind] for kind in before if kind in media]
    parts += [{"type": "text", "text": text}]
    parts += [media[kind] for kind in after if kind in media]
    return {"role": "user", "content": parts if len(parts) > 1 else text}


def work(number: int, steps: int, size: int) -> list[Message]:
    messages: list[Message] = []
    for step in range(steps):
        name = f"c{number}-{step}"
        messages += [assistant(None, call(name, "read_file", path="a")), result(name, text_of_size(size, 0, step))]
    return messages


def texts(sent: Sent) -> list[str]:
    """Return the text of each outgoing message, without the proxy's labels."""
    found = []
    for message in sent.messages:
        content = message["content"]
        parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content or ""]
        found.append("\n".join(part for part in parts if "left out an old part" not in part))
    return found


@given(
    st.lists(st.tuples(layouts, sizes, flavours, st.integers(0, 6)), min_size=1, max_size=5),
    st.sampled_from((3584, 7168)),
    st.booleans(),
)
def test_both_ends_of_a_users_text_stay_or_the_summary_says_that_it_is_omitted(
    drawn: Any, budget: int, yielding: bool
) -> None:
    history: list[Message] = [system("head")]
    for number, (layout, size, flavour, steps) in enumerate(drawn):
        history += [asked(number, layout, size, flavour), *work(number, steps, budget // 12)]
        if number + 1 < len(drawn):
            history.append(assistant("Done."))
    sent = send(turns(history), rules(shorten_last=yielding), budget)
    found = texts(sent)
    summary = next((text for text in found if "<conversation_summary>" in text), "")
    omitted = "earlier user messages are only in the summary" in summary
    for number, _ in enumerate(drawn):
        holding = [text for text in found if f"{BEGINNING}{number:02}" in text and f"{number:02}{END}" in text]
        assert len(holding) == 1 or (omitted and not holding and 0 < number < len(drawn) - 1)


def test_media_take_nothing_from_the_text_of_a_task_in_progress() -> None:
    task = {"role": "user", "content": [{"type": "text", "text": "Book a table. " * 40}, *[IMAGE] * 12]}
    history = [task, *work(0, 6, 300)]
    (carried,) = [m for m in send(turns(history), rules(), 3584).messages if "Book" in str(m["content"])]
    assert carried == task


def test_media_of_a_task_dont_rule_out_a_summary_once_the_user_adds_a_message() -> None:
    task = {"role": "user", "content": [{"type": "text", "text": "Book a table."}, *[IMAGE] * 40]}
    history = [task, *work(0, 6, 300), user("Hurry."), *work(1, 6, 300)]
    sent = send(turns(history), rules(), 3584)
    assert "Book a table." in next(text for text in texts(sent) if "<conversation_summary>" in text)
    assert sum(map(message_tokens, sent.messages)) <= 3584


def test_a_long_text_is_held_to_its_share_apart_from_its_media() -> None:
    text = "\n".join(f"line {number} of the task" for number in range(400))
    task = {"role": "user", "content": [*[IMAGE] * 8, {"type": "text", "text": text}]}
    sent = send(turns([task, *work(0, 8, 300)]), rules(), 3584)
    assert sent.plan is not None
    (carried,) = [m for m in sent.messages if isinstance(m["content"], list)]
    assert carried["content"][:8] == task["content"][:8]
    assert carried["content"][8]["text"].startswith("line 0 of the task\n")
    assert carried["content"][8]["text"].endswith("line 399 of the task")
    text_only = message_tokens({**carried, "content": carried["content"][8:]})
    assert 0.7 * sent.plan.limits.newest < text_only <= sent.plan.limits.newest
