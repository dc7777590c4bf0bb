"""Summaries seen from both ends, those by models that a team may not use, and those by a service of its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.pipeline import summary_models
from proxy.server.loopback import serve
from proxy.summary.forms import Messages, SummaryForm
from proxy.summary.quality import Written
from proxy.summary.single_flight import InFlight
from proxy.summary.writer import SummaryTask, SummaryTry, SummaryWriter
from proxy.summary.writers import write
from tests.kit.front_door import WITHOUT_A_MODEL
from tests.kit.messages import assistant, call, result, system, user
from tests.kit.records import records_in
from tests.kit.scripted import PROFILE, behind, chat, client, key_hash, proxied, words
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


"""A conversation just over the trigger."""

OTHER = "cheap"
"""A model of another provider."""

POLICIES: dict[str, dict[str, Any]] = {
    "model": {"summary": {"model": OTHER}},
    "fallback": {"summary": {"fallback_model": OTHER}},
    "both": {"summary": {"model": OTHER, "fallback_model": OTHER}},
    "override": {"models": [{"match": "local/*", "summary": {"model": OTHER}}]},
}


def summarized(folder: Path, policy: dict[str, Any], models: list[str], *, fails: bool) -> tuple[str, StandIn, StandIn]:
    """Return the origin of the summary of a conversation, and the upstreams of its own model and of the other one."""
    own, other = StandIn(), StandIn()
    if fails:
        own.summariser = lambda body: 1 / 0
    with serve(own.app) as near, serve(other.app) as far:
        settings = {
            "auth": {"mode": "keys"},
            "teams": {"a": {"keys": [key_hash("ka")], "models": models}},
            "upstreams": {
                name: {"base_url": f"{url}/v1", "api_key": "sk"} for name, url in (("near", near), ("far", far))
            },
            "models": [
                {"match": "local/*", "upstream": "near", "profile": PROFILE},
                {"match": "*", "upstream": "far", "profile": PROFILE},
            ],
            "policies": {"default": policy},
        }
        with proxied(settings, folder) as url, client(url, "ka") as caller:
            answer = caller.chat.completions.with_raw_response.create(model="local/m", messages=LONG)
    return answer.headers["x-compaction-summary"], own, other


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_model_off_the_list_gets_nothing(tmp_path: Path, name: str, *, fails: bool) -> None:
    origin, own, other = summarized(tmp_path, POLICIES[name], ["local/*"], fails=fails)
    assert other.requests == other.others == []
    assert origin == ("digest" if fails else "made")
    assert [one.summary for one in own.requests] == [True, False]


def test_a_model_on_the_list_summarizes(tmp_path: Path) -> None:
    origin, own, other = summarized(tmp_path, POLICIES["model"], ["local/*", OTHER], fails=False)
    assert origin == "made"
    assert [one.summary for one in other.requests] == [True]
    assert [one.summary for one in own.requests] == [False]


class _Service(SummaryForm):
    api = "chat"
    path = "/summarize"
    limits = ("limit",)

    def body(self, model: str, messages: Messages, most: int | None) -> dict[str, Any]:
        return {"engine": model, "text": messages[-1]["content"], "limit": most}

    def read(self, answer: Any) -> Written:
        return Written(answer["summary"], "stop")


class ServiceWriter(SummaryWriter):
    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        models = await self.models.for_transcript(task.max_tokens, _Service())
        return [SummaryTry((model.name,), partial(write, task, model)) for model in models]


@pytest.mark.parametrize("provider", ["openai", "bedrock"])
def test_a_service_writes_summaries_unless_its_upstream_needs_translation(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(summary_models.WRITERS, "transcript", (ServiceWriter,))
    received: list[tuple[dict[str, Any], str]] = []

    async def summarize(request: Request) -> Response:
        received.append((await request.json(), request.headers["authorization"]))
        return JSONResponse({"summary": "Goal: notes of the service."})

    upstream = StandIn(window=16_000)
    with (
        serve(Starlette(routes=[Route("/v1/summarize", summarize, methods=["POST"])])) as service,
        serve(upstream.app) as url,
    ):
        settings = {
            "upstreams": {
                "main": {"base_url": f"{url}/v1", "api_key": "sk-main"},
                "notes": {"provider": provider, "base_url": f"{service}/v1", "api_key": "sk-notes"},
            },
            "models": [
                {"match": name, "upstream": to, "profile": PROFILE} for name, to in (("n", "notes"), ("*", "main"))
            ],
            "policies": {"default": {"summary": {"model": "n"}}},
        }
        with proxied(settings, tmp_path) as entrance, client(entrance) as caller:
            caller.chat.completions.create(model="m", messages=chat(7, 1_000))
    if provider == "bedrock":
        assert (received, len(upstream.summaries)) == ([], 0)
        assert WITHOUT_A_MODEL in upstream.conversations[-1].raw.decode()
        return
    ((body, key),) = received
    assert (list(body), key) == (["engine", "text", "limit"], "Bearer sk-notes")
    assert "notes of the service" in upstream.conversations[-1].raw.decode()
    assert [record.upstream for record in records_in(tmp_path / "store.db") if record.kind == "summary"] == ["notes"]
