"""Limits and ratios that were learned: by one process, known to all, kept over a restart, and given up again."""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.server.loopback import serve
from proxy.telemetry.metrics import REGISTRY
from tests.kit.overflow_wordings import WORDINGS, Worded
from tests.kit.program import call, served
from tests.kit.scripted import PROFILE, behind, client, proxied, words
from tests.kit.upstream import Agent, Reply, StandIn, decide

BELIEVED = 20_000
TURNS = 36


def settings_for(url: str, window: int = BELIEVED) -> dict[str, Any]:
    return {
        "upstreams": {"main": {"base_url": f"{url}/v1"}},
        "models": [
            {"match": "*", "upstream": "main", "profile": {"context_window": window, "tokenizer": "o200k_base"}}
        ],
    }


@contextlib.contextmanager
def calling(settings: Mapping[str, Any], folder: Path, key: str = "sk-client") -> Iterator[openai.OpenAI]:
    """A client of a proxy that begins with what the folder's store has."""
    with proxied(settings, folder) as entrance, client(entrance, key) as caller:
        yield caller


def prose(size: int, number: int) -> str:
    """Return this many tokens of text, with another wording for each number."""
    return words(size, f"the garden behind house number {number} was planted by somebody else in autumn ")


def talk(turns: int, size: int) -> list[Any]:
    messages: list[Any] = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number}: " + prose(size, number)})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + prose(size, number + 50)})
    return [*messages, {"role": "user", "content": "What now?"}]


def ask(caller: openai.OpenAI, messages: list[Any], **fields: Any) -> Mapping[str, str]:
    # The client sends ``extra_body`` unchanged. It transforms other arguments.
    extra = {"messages": messages}
    return caller.chat.completions.with_raw_response.create(model="m", messages=[], extra_body=extra, **fields).headers


def refused(upstream: StandIn) -> int:
    return sum(request.status != 200 for request in upstream.requests)


def shown(folder: Path, *arguments: str) -> str:
    """Return the learned limits that the command ``models`` prints."""
    done = call(folder, "models", *arguments, "--config", "config.yaml", COLUMNS="150")
    assert done.returncode == 0, done.stderr
    return done.stdout


PARTS = (0.3, 0.6, 0.9)
CASES = [
    pytest.param(wording, part, marks=[] if number == place else pytest.mark.full)
    for number, wording in enumerate(("openai", "llama.cpp without figures", "gemini"))
    for place, part in enumerate(PARTS)
]


@pytest.mark.parametrize(("wording", "part"), CASES)
def test_one_refusal_is_enough_for_all_processes(wording: str, part: float, tmp_path: Path) -> None:
    """Each wording is tested with one limit, and with all three limits if ``--full`` is given."""
    window = int(BELIEVED * part)
    upstream = StandIn(window=window, max_output=window // 8, responder=decide)
    with serve(Worded(upstream.app, WORDINGS[wording])) as url:
        with calling(settings_for(url), tmp_path) as caller:
            session = Agent(caller, "m").run(TURNS, lambda: None)
        assert session.error is None
        assert session.turns == TURNS
        told = refused(upstream)
        assert told <= 1
        assert told or part == 0.9, "the limit was not reached"
        with calling(settings_for(url), tmp_path) as caller:
            again = Agent(caller, "m").run(TURNS // 2, lambda: None)
        assert again.error is None
        assert {headers["x-compaction-retries"] for headers in again.headers} == {"0"}
        assert refused(upstream) == told
    assert upstream.faults == []


LONG = talk(10, 500)
"""Larger than half of what the proxy takes for the window, and below every trigger."""


def test_another_process_knows_and_so_does_the_command(tmp_path: Path) -> None:
    started = time.monotonic()
    upstream = StandIn(window=8_000)
    with serve(upstream.app) as url:
        with served(settings_for(url), tmp_path) as entrance, client(entrance) as caller:
            assert ask(caller, LONG)["x-compaction-retries"] == "1"
        with served(settings_for(url), tmp_path) as entrance:
            with client(entrance) as caller:
                headers = ask(caller, LONG)
                assert (headers["x-compaction"], headers["x-compaction-retries"]) == ("compacted", "0")
            with client(entrance, "sk-another") as caller:
                assert ask(caller, LONG)["x-compaction-retries"] == "1", "what one credential learned is its own"
    for printed in (shown(tmp_path), shown(tmp_path, "m")):
        rows = re.findall(
            r"main +│ m +│ (\w{12}) +│ input and output │ +8,000 +│ +([\d,]+) +│ refusal +│ (\d+) min +│ 20", printed
        )
        assert len({tenant for tenant, _, _ in rows}) == 2
        assert all(7_000 < int(tokens.replace(",", "")) < 8_000 for _, tokens, _ in rows)
        assert all(60 * int(minutes) <= time.monotonic() - started for _, _, minutes in rows)
    assert "Nothing has been learned" in shown(tmp_path, "another")


@pytest.mark.parametrize("ratio", [pytest.param(0.7, marks=pytest.mark.full), 1.6])
def test_the_ratio_is_learned_after_five_turns_and_kept(ratio: float, tmp_path: Path) -> None:
    window = 16_000
    upstream = StandIn(window=window, max_output=2_000, ratio=ratio)
    with serve(upstream.app) as url:
        settings = settings_for(url, window)
        with calling(settings, tmp_path) as caller:
            for turns in range(1, 6):
                ask(caller, talk(turns, 300))
        assert re.search(rf"main +│ m +│ \w{{12}} +│ {ratio:.2f} +│ usage of \d answers", shown(tmp_path, "m"))
        with calling(settings, tmp_path) as caller:
            headers = ask(caller, talk(1, 5_500))  # 11,000 tokens by our count, below the trigger
            assert headers["x-compaction"] == ("compacted" if ratio > 1 else "none")
            upstream.responder = decide
            session = Agent(caller, "m").run(TURNS, lambda: None)
        assert session.error is None
        assert session.turns == TURNS
    assert refused(upstream) == 0
    assert upstream.faults == []


WINDOW = 16_000


SMALL = talk(4, 530)
"""Large enough to be counted, small enough to be let be; by our count and by half as much again."""

MIDDLING = talk(6, 960)
"""Below the trigger by our count, over the window by half as much again."""


@contextlib.contextmanager
def measured(upstream: StandIn, folder: Path, window: int = WINDOW) -> Iterator[openai.OpenAI]:
    with behind(upstream, folder, profile={**PROFILE, "context_window": window}) as url, client(url) as caller:
        yield caller


def asked(caller: openai.OpenAI, messages: list[Any], stream: bool = False, **fields: Any) -> Mapping[str, str]:
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
    with measured(upstream, tmp_path) as caller:
        for _ in range(5):
            assert asked(caller, said, stream)["x-compaction"] == "none"
        assert asked(caller, MIDDLING, stream)["x-compaction"] == "none"
    assert 6_400 / 2 < upstream.conversations[0].tokens < 6_400 / 1.3, "the lie would have been believed"


def test_counting_behind_an_answer_makes_nobody_one_who_left(tmp_path: Path) -> None:
    """A request that its length alone proved small is counted once its answer is out: long enough to take a while."""

    def left() -> float:
        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
        return sum(sample.value for sample in samples if sample.labels.get("outcome") == "client_left")

    before = left()
    with measured(StandIn(window=400_000), tmp_path, window=400_000) as caller:
        for number in range(6):
            asked(caller, [{"role": "user", "content": prose(50_000, number)}])
    assert left() == before
