"""Test summaries of conversations of any size."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.format import TextCounter
from proxy.compaction.turn import Turn
from proxy.config.policy import SummarySettings
from proxy.summary.prompt import Redaction
from proxy.summary.quality import SummaryFailed, SummaryRejected, Written
from proxy.summary.writer import SummaryTask
from proxy.summary.writers import PARALLEL, chunks, newest, write
from tests.kit.summary_conversation import FORMAT, turn, words

Answer = Callable[[int, str], Written]


def brief(number: int, prompt: str) -> Written:
    return Written(f"notes {number}", "stop")


class Model:
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self, input_limit: int | None = None, answer: Answer = brief) -> None:
        self.input_limit = input_limit
        self.count: TextCounter = words
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self._answer = answer

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        self.asked.append(messages[-1]["content"])
        number = len(self.asked)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0)
            return self._answer(number, messages[-1]["content"])
        finally:
            self.at_once -= 1


def talk(number: int, each: int = 100) -> list[Turn]:
    return [turn("assistant", f"begin{n} " + "word " * (each - 2) + f"end{n}") for n in range(number)]


def summary(turns: Sequence[Turn], model: Model, *, max_tokens: int = 200, **fields: Any) -> str:
    settings = SummarySettings(
        **{name: fields.pop(name) for name in ("prompt", "trim_tokens_to_summarize") if name in fields}
    )
    given = {"previous": None, "max_tokens": max_tokens, "settings": settings, **fields}
    return asyncio.run(write(SummaryTask(turns=turns, format=FORMAT, **given), model))


def transcript(prompt: str) -> str:
    return prompt.partition("<transcript>\n")[2].partition("\n</transcript>")[0]


def test_one_call_where_everything_fits() -> None:
    model = Model(input_limit=100_000)
    assert summary(talk(10), model, previous="Old notes.") == "notes 1"
    (prompt,) = model.asked
    assert "<previous_summary>\nOld notes.\n</previous_summary>" in prompt
    assert all(f"begin{n} " in prompt and f"end{n}" in prompt for n in range(10))


def test_what_exceeds_the_models_window_is_summarised_in_chunks_and_merged() -> None:
    model = Model(input_limit=2000)
    assert summary(talk(60), model, previous="Old notes.") == f"notes {len(model.asked)}"
    *parts, merged = model.asked
    assert len(parts) == 5
    assert all(words(prompt) <= 2000 for prompt in model.asked)
    assert not any("Old notes." in prompt for prompt in parts)
    assert "Old notes." in merged
    assert [n for prompt in parts for n in range(60) if f"begin{n} " in prompt] == list(range(60))
    assert transcript(merged).split("\n\n") == [f"[notes on part {n}] notes {n}" for n in range(1, 6)]
    assert 1 < model.most_at_once <= PARALLEL


def test_notes_that_are_still_too_long_are_chunked_again() -> None:
    model = Model(input_limit=2000, answer=lambda number, prompt: Written(f"n{number} " + "note " * 150, "stop"))
    text = summary(talk(200), model)
    assert text.startswith(f"n{len(model.asked)} note")
    assert all(words(prompt) <= 2000 for prompt in model.asked)


def test_a_failure_of_one_chunk_ends_the_others() -> None:
    def answer(number: int, prompt: str) -> Written:
        raise SummaryFailed("status 500")

    model = Model(input_limit=2000, answer=answer)
    with pytest.raises(SummaryFailed, match="500"):
        summary(talk(200), model)
    # The whole would be 17 chunks; those that had begun are ended.
    assert len(model.asked) <= 2 * PARALLEL
    assert model.at_once == 0


def test_a_summary_must_be_smaller_than_all_that_it_stands_for() -> None:
    """That is the earlier notes and what came since."""
    long = Model(input_limit=100_000, answer=lambda number, prompt: Written("note " * 150, "stop"))
    with pytest.raises(SummaryRejected, match="isn't smaller"):
        summary(talk(1), long)
    assert summary(talk(1), long, previous="old " * 100)


def test_nothing_that_is_asked_holds_a_secret() -> None:
    """Neither the transcript nor the earlier notes nor notes on parts."""
    model = Model(
        input_limit=2000, answer=lambda number, prompt: Written("The password=opensesame7 is theirs.", "stop")
    )
    turns = [*talk(20), turn("user", "My password=opensesame7, please."), *talk(20)]
    summary(turns, model, previous="password=opensesame7", redact=Redaction(secrets=True))
    assert len(model.asked) > 2
    assert "notes on part 1" in model.asked[-1]
    assert not any("opensesame7" in prompt for prompt in model.asked)
    assert all(
        "Here are words of the user's last messages" in prompt and "My password=[redacted]" in prompt
        for prompt in model.asked
    )
    open_model = Model(input_limit=None)
    summary(turns, open_model, previous="password=opensesame7")
    assert open_model.asked[0].count("opensesame7") == 3


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(100, 500))
def test_chunks_hold_everything_in_order_and_none_is_too_large(sizes: list[int], limit: int) -> None:
    texts = [f"t{n} " + "word " * (size - 1) for n, size in enumerate(sizes)]
    parts = chunks(texts, [words(text) for text in texts], limit, words)
    assert [text.split()[0] for part in parts for text in part] == [f"t{n}" for n in range(len(sizes))]
    assert all(words(" ".join(part)) <= limit for part in parts)
    assert all(text in texts or words(texts[n]) > limit for n, text in enumerate(t for part in parts for t in part))
    # A chunk ends only when the next text doesn't fit. A text that was cut counts as a whole chunk.
    charged = [[words(text) if text in texts else limit for text in part] for part in parts]
    assert all(sum(one) + other[0] > limit for one, other in pairwise(charged))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(30, 500))
def test_the_newest_texts_within_a_limit(sizes: list[int], limit: int) -> None:
    texts = [f"t{n} " + "word " * (size - 1) for n, size in enumerate(sizes)]
    kept, kept_sizes = newest(texts, sizes, limit, words)
    assert kept
    assert len(kept) == len(kept_sizes)
    assert words(" ".join(kept)) <= limit
    if len(kept) < len(texts) and kept == texts[-len(kept) :]:
        assert sum(sizes[-len(kept) - 1 :]) > limit
