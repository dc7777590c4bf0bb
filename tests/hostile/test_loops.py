"""Loops over the texts of others take linear time, and pause in between."""

import json
import time
from collections.abc import Callable

import pytest

from proxy.compaction import shorten, summary_message
from proxy.compaction.directives import directives
from proxy.compaction.pieces import SEARCHED
from proxy.compaction.turn import Turn
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile
from proxy.summary import prompt
from tests.unit.compaction.test_pieces import pauses, text_of

SIZES = (4_000, 32_000)
"""Characters of both texts."""

MOST_GROWTH = 20
"""Eight times the text takes 8 times as long in linear time, and 64 times in quadratic time."""

NEGLIGIBLE = 0.01
"""CPU seconds for the longer text that no growth is measured below."""

UNITS = (
    *("a" * 399 + " ", "a/", "-a", "@a/", "\\", "C:\\a ", "1.2", "name_%d ", "src/a%d/b.py ", "eyJ-", "sk-", "key="),
    *("password: ", "curl -u ", "https://", "--", "\r", "\n", " ", "\ud800", "[", "< / ", "<a>\n", "```\n", '"', "Aa "),
    *("Must not %d. ", "-----BEGIN PRIVATE KEY-----", "A" * 70 + "\n", "data:a/a;base64,", "1:a\n", "a.py:1:2\n"),
    *("diff --git a/x.py\n", "def a%d(x):\n", "error ", "\u3002"),
)

FORMAT = ChatCounter(Profile("m")).format


def turn(role: str, text: str, **fields: object) -> Turn:
    raw = json.dumps({"role": role, "content": text, **fields}).encode()
    return Turn(raw, FORMAT.read(raw))


def calling(text: str) -> Turn:
    """Return a message whose calls have a text in commands of 440 characters."""
    commands = [json.dumps({"command": text[start : start + 440]}) for start in range(0, len(text), 440)]
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "bash", "arguments": command}}
        for number, command in enumerate(commands)
    ]
    return turn("assistant", "", tool_calls=calls)


WORK: dict[str, Callable[[str], object]] = {
    "facts": lambda text: turn("user", text),
    "transcript": lambda text: prompt.entries([turn("tool", text)], FORMAT, prompt.Redaction(secrets=True)),
    "sample": lambda text: prompt.language_sample([turn("user", text)], FORMAT),
    "names of a message": lambda text: summary_message.collect_names([turn("user", text)], None, FORMAT),
    "names of a result": lambda text: summary_message.collect_names([turn("tool", text)], None, FORMAT),
    "names of calls": lambda text: summary_message.collect_names([calling(text)], None, FORMAT),
    "quoted messages": lambda text: summary_message.user_messages([text, text[1:]], 50, FORMAT.text_tokens),
    "rules": directives,
    "shortened text": lambda text: shorten.middle_cut(
        shorten.without_base64(text, ""), 500, FORMAT.text_tokens, "", notable=shorten.notable_lines
    ),
    "kept names": lambda text: summary_message.retention(
        [summary_message.collect_names([turn("user", text)], None, FORMAT)], [text], archived=True
    ),
}


def seconds(work: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    work(text)
    return time.thread_time() - began


@pytest.mark.parametrize("name", WORK)
def test_time_grows_with_the_text_at_most(name: str, full: bool) -> None:
    """Without ``--full``, the texts are those of every second unit, and others for the next work."""
    work = WORK[name]
    work("a warm-up")
    for unit in UNITS if full else UNITS[[*WORK].index(name) % 2 :: 2]:
        short, long = (text_of(unit, size) for size in SIZES)
        for left in (2, 1, 0):  # another program may slow down one of the runs
            took = seconds(work, long)
            if took < NEGLIGIBLE or took < MOST_GROWTH * max(seconds(work, short) for _ in range(2)):
                break
            assert left, f"{unit!r} takes {took:.3f} s"


@pytest.mark.parametrize("name", ["facts", "names of a message", "names of a result", "names of calls", "transcript"])
def test_work_on_a_long_text_pauses(name: str) -> None:
    for unit in UNITS[::6]:
        text = text_of(unit)
        assert pauses(lambda text=text: WORK[name](text)) >= len(text) // SEARCHED, unit  # type: ignore[misc]
