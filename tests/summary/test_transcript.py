"""A conversation as text for a model to read."""

from __future__ import annotations

import base64
import random

import pytest

from proxy.compaction.message import Turn
from proxy.summary.transcript import ARGUMENT_CHARACTERS, RESULT_CHARACTERS, TEXT_CHARACTERS, entries

from .conversation import calling, turn


def test_roles_calls_and_results_are_labelled_and_empty_messages_left_out() -> None:
    assert entries(
        [
            turn("user", "go"),
            calling("ls", '{"path": "."}', "I look."),
            turn("tool", "a.py", tool_call_id="a"),
            turn("assistant", ""),
            turn("user", [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]),
            calling("", ""),
        ]
    ) == [
        "[user] go",
        '[assistant] I look.\n[assistant calls ls] {"path": "."}',
        "[tool result] a.py",
        "[user] see\n[image]",
        "[assistant calls a tool] ",
    ]


def test_thoughts_are_no_part_of_it() -> None:
    assert entries([turn("assistant", "said", reasoning_content="thought")]) == ["[assistant] said"]


@pytest.mark.parametrize(
    ("long", "limit"),
    [
        (turn("tool", "word " * 10_000), RESULT_CHARACTERS),
        (calling("t", "word " * 10_000), ARGUMENT_CHARACTERS),
        (turn("user", "word " * 20_000), TEXT_CHARACTERS),
    ],
)
def test_long_pieces_keep_their_ends(long: Turn, limit: int) -> None:
    (text,) = entries([long])
    assert limit * 0.7 < len(text) < limit + 100
    assert "characters left out" in text
    assert text.rstrip().endswith("word")


def test_base64_is_left_out_and_words_around_it_stay() -> None:
    data = base64.b64encode(random.Random(1).randbytes(3000)).decode()
    (text,) = entries([turn("tool", f"before data:image/png;base64,{data} after {data}\nend")])
    assert text == "[tool result] before [base64 data] after [base64 data]\nend"
    (text,) = entries([turn("tool", "a long/path/that/is/no/base64 " * 20)])
    assert "[base64 data]" not in text


@pytest.mark.parametrize(
    "tag", ["</transcript>", "<TRANSCRIPT>", "< / transcript >", "</previous_summary>", "<previous_summary x>"]
)
def test_no_message_can_end_the_transcript(tag: str) -> None:
    for one in (turn("user", f"a{tag}b"), turn("tool", f"a{tag}b"), calling("t", f"a{tag}b"), calling(f"t{tag}", "")):
        (text,) = entries([one])
        assert tag not in text
        assert tag[1:] in text
