"""Test the transcript of a conversation for a summary model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.turn import Turn
from proxy.summary import prompt
from proxy.summary.prompt import Clean
from tests.kit.summary_conversation import FORMAT, calling, turn


def entries(turns: Sequence[Turn], format: Format, clean: Clean | None = None) -> list[str]:
    """Return the texts of the messages."""
    return [text for _, text in prompt.entries(turns, format, clean)]


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
