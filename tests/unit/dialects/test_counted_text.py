"""The tokens of a text that ends with a unit's own text follow from the unit's facts, exactly."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.turn import Turn
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.counting import Counter
from proxy.dialects.messages.counting import MessagesCounter
from proxy.dialects.responses.counting import ResponsesCounter
from proxy.limits.profiles import Profile
from proxy.tokens.text import TextCount

TOKENIZERS = ["o200k_base", "cl100k_base", "p50k_base"]
Unit = Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A counter, and units with a text that it counts."""

    counter: type[Counter]
    units: tuple[Unit, ...]


CASES = [
    Case(
        ChatCounter,
        (
            lambda text: {"role": "user", "content": text, "name": "bob", "extra": "field"},
            lambda text: {"role": "tool", "tool_call_id": "a", "content": text},
            lambda text: {"role": "assistant", "content": [{"type": "text", "text": text}], "refusal": "no"},
            lambda text: {"role": "user", "content": [{"type": "image_url", "image_url": {}}, text]},
        ),
    ),
    Case(
        MessagesCounter,
        (
            lambda text: {"role": "user", "content": text},
            lambda text: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": text}]},
            lambda text: {"role": "assistant", "content": [{"type": "text", "text": text, "signature": "Zm9v" * 9}]},
        ),
    ),
    Case(
        ResponsesCounter,
        (
            lambda text: {"role": "user", "content": text},
            lambda text: {"type": "function_call_output", "call_id": "a", "output": text},
        ),
    ),
]

words = st.sampled_from(
    ["the file", " is", "\n", "a b", "  ", "12", "def f(x):", "日本語", "\n\n", "'s", "\t", "\ud83d", "😀"]
)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("case", CASES, ids=[case.counter.__name__ for case in CASES])
@given(said=st.lists(words, max_size=40).map("".join), ratio=st.sampled_from([0.9, 1.0, 1.1, 1.37]))
def test_it_equals_the_count_of_the_text(case: Case, tokenizer: str, said: str, ratio: float) -> None:
    counter = case.counter(Profile("m", tokenizer=tokenizer, token_ratio=ratio))
    others: list[Callable[[str], int]] = [counter.text, TextCount(tokenizer, 1.2), TextCount("o200k_base", 1.0), len]
    for unit in case.units:
        raw = json.dumps(unit(said)).encode()
        turn = Turn(raw, counter.format.read(raw))
        for text in (said, f"[tool result] {said}", f"[user]{said}", f"{said} more"):
            for count in others:
                assert counter.format.counted(turn, text, count) == count(text)
