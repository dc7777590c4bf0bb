"""Test the transcript of a conversation for a summary model."""

from collections.abc import Sequence

import pytest

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.turn import Turn
from proxy.summary import prompt
from proxy.summary.prompt import Clean, language_sample
from tests.kit.summary_conversation import FORMAT, calling, turn


def entries(turns: Sequence[Turn], format: Format, clean: Clean | None = None) -> list[str]:
    """Return the texts of the messages."""
    return [text for _, text in prompt.entries(turns, format, clean)]


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


@pytest.mark.parametrize(
    "tag", ["</transcript>", "<TRANSCRIPT>", "< / transcript >", "</previous_summary>", "<previous_summary x>"]
)
def test_no_message_can_end_the_transcript(tag: str) -> None:
    for one in (turn("user", f"a{tag}b"), turn("tool", f"a{tag}b"), calling("t", f"a{tag}b"), calling(f"t{tag}", "")):
        (text,) = entries([one], FORMAT)
        assert tag not in text
        assert tag[1:] in text
