"""Summaries seen from both ends: the client's response, and the request to the summary model."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai

from proxy.summary.single_flight import InFlight
from tests.kit.messages import assistant, call, result, system, user
from tests.kit.scripted import behind, chat, client, words
from tests.kit.upstream import Reply, Responder, StandIn
from tests.kit.waiting import until

WINDOW = 16_000

LONG = chat(7, 1_000)
"""A conversation just over the trigger."""


def numbered() -> Responder:
    numbers = itertools.count(1)
    return lambda body: Reply(content=f"Goal: SUMMARY-{next(numbers)} says that the user asked numbered questions.")


def ask(caller: openai.OpenAI, messages: list[Any]) -> Mapping[str, str]:
    return caller.chat.completions.with_raw_response.create(model="m", messages=messages).headers


def asked(upstream: StandIn) -> str:
    return json.dumps([request.body for request in upstream.summaries])


def sent(upstream: StandIn) -> str:
    """The messages of the last conversation that reached the upstream."""
    return json.dumps(upstream.conversations[-1].body["messages"])


def test_a_policys_own_prompt(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    prompt = "OUR-WORDS {not a field}\n<transcript>\n{messages}\n</transcript>"
    with behind(upstream, tmp_path, policy={"summary": {"prompt": prompt}}) as url, client(url) as caller:
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    (request,) = upstream.summaries
    (message,) = request.body["messages"]
    assert message["content"].startswith("OUR-WORDS {not a field}\n<transcript>\n[user] Question 0:")


def test_only_the_newest_tokens_where_the_policy_says_so(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=numbered())
    with (
        behind(upstream, tmp_path, policy={"summary": {"trim_tokens_to_summarize": 2_500}}) as url,
        client(url) as caller,
    ):
        assert ask(caller, LONG)["x-compaction-summary"] == "made"
    (request,) = upstream.summaries
    assert request.tokens < 2_500 + 600
    assert "Question 0:" not in asked(upstream)
    assert "Question 0:" in sent(upstream), "the user's own words stay"


def test_summaries_made_ahead_are_not_bought_twice(tmp_path: Path, flights: list[InFlight]) -> None:
    """The head takes a third of the window, and the turns have different sizes."""
    calls = {}
    for prepare in (True, False):
        upstream = StandIn(window=WINDOW, summariser=numbered())
        messages, origins = [system(words(5_500, "rule")), user("Read all files.")], []
        policy: dict[str, Any] = {} if prepare else {"prepare": []}
        folder = tmp_path / str(prepare)
        folder.mkdir()
        with behind(upstream, folder, policy=policy) as url, client(url) as caller:
            for number in range(36):
                messages.append(assistant(None, call(f"c{number}", "read", path=f"{number}.py")))
                messages.append(result(f"c{number}", words((300, 550, 150, 800)[number % 4], f"r{number}x")))
                origins.append(ask(caller, messages).get("x-compaction-summary"))
                assert until(lambda: all(flight.task.done() for flight in flights))
        calls[prepare] = len(upstream.summaries)
        assert "stored" in origins
    assert calls[False] >= 2
    assert calls[True] <= 1.25 * calls[False] + 1
