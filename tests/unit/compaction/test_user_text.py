"""Test that every way of shortening a user message keeps the beginning and end of its text."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.compacting import Sent, rules, send
from tests.kit.conversations import (
    IMAGE,
    Message,
    assistant,
    call,
    message_tokens,
    result,
    system,
    text_of_size,
    turns,
    user,
)

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
