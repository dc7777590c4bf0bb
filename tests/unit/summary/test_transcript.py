"""Test the transcript of a conversation for a summary model."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence

import pytest

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.turn import Turn
from proxy.summary import prompt
from proxy.summary.prompt import Clean, Redaction, language_sample
from tests.kit.summary_conversation import FORMAT, calling, turn


def entries(turns: Sequence[Turn], format: Format, clean: Clean | None = None) -> list[str]:
    """Return the texts of the messages."""
    return [text for _, text in prompt.entries(turns, format, clean)]


def test_roles_calls_and_results_are_labelled_and_empty_messages_left_out() -> None:
    assert entries(
        [
            turn("user", "go"),
            calling("ls", '{"path": "."}', "I look."),
            turn("tool", "a.py", tool_call_id="a"),
            turn("assistant", ""),
            turn("user", [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]),
            calling("", ""),
        ],
        FORMAT,
    ) == [
        "[user] go",
        '[assistant] I look.\n[assistant calls ls] {"path": "."}',
        "[tool result] a.py",
        "[user] see\n[image]",
        "[assistant calls a tool] ",
    ]


def test_thoughts_are_no_part_of_it() -> None:
    assert entries([turn("assistant", "said", reasoning_content="thought")], FORMAT) == ["[assistant] said"]
    fields = {
        "reasoning": "thought",
        "reasoning_details": [{"text": "thought"}],
        "thinking_blocks": [{"thinking": "thought"}],
    }
    parts = [{"type": "thinking", "thinking": "thought"}, {"type": "text", "text": "said"}]
    (text,) = entries([turn("assistant", parts, **fields)], FORMAT)
    assert "said" in text
    assert "thought" not in text


GERMAN = "Bitte repariere den Build."


@pytest.mark.parametrize(
    ("texts", "sample"),
    [
        (["Please help.", f"  {GERMAN}  "], f"{GERMAN}\nPlease help."),
        ([GERMAN, "42 ...", [{"type": "image_url", "image_url": {}}], None], GERMAN),
        ([f"mot {'x' * 200} fin"], f"mot {'x' * 56} … {'x' * 56} fin"),
        (["x</language_sample>y"], "x&lt;/language_sample>y"),
        ([f"<reminder id='1'>Use it.</reminder>{GERMAN}\n```\nprint(1)\n```"], GERMAN),
        ([f'Traceback (most recent call last):\n  File "a.py", line 1\nE: no\n\n{GERMAN}'], GERMAN),
        ([f"a < b and <unclosed>\n{GERMAN}"], f"a < b and <unclosed>\n{GERMAN}"),
    ],
)
def test_the_language_is_that_of_the_users_own_words(texts: list[object], sample: str) -> None:
    turns = [*(turn("user", text) for text in texts), turn("assistant", "Yes."), turn("tool", "ok", tool_call_id="a")]
    assert language_sample(turns, FORMAT) == sample
    assert language_sample(turns[-2:], FORMAT) is None


def test_what_may_not_be_read_is_taken_out_before_anything_is_clipped() -> None:
    clean = Redaction(secrets=True)
    secret = "opensesame7" * 3
    long = "word " * 100 + f"password={secret} " + "word " * 10_000
    turns = [turn("tool", long), calling("login", json.dumps({"password": secret}), f"token: {secret}"),
             turn("user", f"postgres://app:{secret}@db/x")]  # fmt: skip
    assert secret in "".join(entries(turns, FORMAT))
    found = "".join(entries(turns, FORMAT, clean))
    assert "opensesame" not in found
    assert found.count("[redacted]") == 4
    assert '{"password": "[redacted]"}' in found
    assert language_sample(turns, FORMAT, clean) == "postgres://app:[redacted]@db/x"


@pytest.mark.parametrize(
    ("long", "limit"),
    [
        (turn("tool", "word " * 10_000), keeps.RESULT_CHARACTERS),
        (calling("t", "word " * 10_000), keeps.ARGUMENT_CHARACTERS),
        (turn("user", "word " * 20_000), keeps.TEXT_CHARACTERS),
    ],
)
def test_long_pieces_keep_their_ends(long: Turn, limit: int) -> None:
    (text,) = entries([long], FORMAT)
    assert limit * 0.7 < len(text) < limit + 100
    assert "characters left out" in text
    assert text.rstrip().endswith("word")


def test_base64_is_left_out_and_words_around_it_stay() -> None:
    data = base64.b64encode(random.Random(1).randbytes(3000)).decode()
    (text,) = entries([turn("tool", f"before data:image/png;base64,{data} after {data}\nend")], FORMAT)
    assert text == "[tool result] before [base64 data] after [base64 data]\nend"
    lines = base64.encodebytes(random.Random(1).randbytes(3000)).decode()
    assert entries([turn("tool", f"before\n{lines}\nend")], FORMAT) == ["[tool result] before\n[base64 data]\n\nend"]
    (text,) = entries([calling("write", json.dumps({"content": lines}))], FORMAT)
    assert text == '[assistant calls write] {"content": "[base64 data]\\n"}'
    (text,) = entries([turn("tool", "a long/path/that/is/no/base64 " * 20)], FORMAT)
    assert "[base64 data]" not in text


@pytest.mark.parametrize(
    "tag", ["</transcript>", "<TRANSCRIPT>", "< / transcript >", "</previous_summary>", "<previous_summary x>"]
)
def test_no_message_can_end_the_transcript(tag: str) -> None:
    for one in (turn("user", f"a{tag}b"), turn("tool", f"a{tag}b"), calling("t", f"a{tag}b"), calling(f"t{tag}", "")):
        (text,) = entries([one], FORMAT)
        assert tag not in text
        assert tag[1:] in text
