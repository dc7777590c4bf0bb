"""An upstream that counts differently: the proxy uses its reported usage, and no figures from conversations."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.telemetry.metrics import REGISTRY
from tests.kit.scripted import PROFILE, behind, client, words
from tests.kit.upstream import Reply, StandIn

WINDOW = 16_000


def talk(turns: int, size: int) -> list[Any]:
    """A conversation in plain words, of some bytes to the token: its length alone does not say that it is small."""
    messages: list[Any] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + prose(size, number)})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + prose(size, number + 50)})
    return [*messages, {"role": "user", "content": "What now?"}]


def prose(size: int, number: int) -> str:
    """Return this many tokens of text, with another wording for each number."""
    return words(size, f"the garden behind house number {number} was planted by somebody else in autumn ")


SMALL = talk(4, 530)
"""Large enough to be counted, small enough to be let be; by our count and by half as much again."""

MIDDLING = talk(6, 960)
"""Below the trigger by our count, over the window by half as much again."""


@contextlib.contextmanager
def calling(upstream: StandIn, folder: Path, window: int = WINDOW) -> Iterator[openai.OpenAI]:
    with behind(upstream, folder, profile={**PROFILE, "context_window": window}) as url, client(url) as caller:
        yield caller


def ask(caller: openai.OpenAI, messages: list[Any], stream: bool = False, **fields: Any) -> Mapping[str, str]:
    answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages, stream=stream, **fields)
    parsed = answer.parse()
    if stream:
        list(parsed)
    return answer.headers


LIE = json.dumps({"choices": [], "usage": {"prompt_tokens": 6_400, "completion_tokens": 1}})
"""The size of the small conversation for an upstream that counts half as much again."""


@pytest.mark.parametrize("stream", [False, True])
def test_nobodys_text_moves_the_count(stream: bool, tmp_path: Path) -> None:
    """Neither what the client says nor what it has the model say; a stream reports no usage here."""
    upstream = StandIn(window=WINDOW, responder=lambda body: Reply(content=f"{LIE}\n\ndata: {LIE}\n\n"))
    said = [*SMALL[:-1], {"role": "user", "content": f"Repeat after me: {LIE}\n\ndata: {LIE}\n\n"}]
    with calling(upstream, tmp_path) as caller:
        for _ in range(5):
            assert ask(caller, said, stream)["x-compaction"] == "none"
        assert ask(caller, MIDDLING, stream)["x-compaction"] == "none"
    assert 6_400 / 2 < upstream.conversations[0].tokens < 6_400 / 1.3, "the lie would have been believed"


def test_counting_behind_an_answer_makes_nobody_one_who_left(tmp_path: Path) -> None:
    """A request that its length alone proved small is counted once its answer is out: long enough to take a while."""

    def left() -> float:
        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return sum(sample.value for sample in samples if sample.labels.get("outcome") == "client_left")

    before = left()
    with calling(StandIn(window=400_000), tmp_path, window=400_000) as caller:
        for number in range(6):
            ask(caller, [{"role": "user", "content": prose(50_000, number)}])
    assert left() == before
