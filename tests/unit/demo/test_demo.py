"""Test the agent, its session without the proxy and with another server, and the whole demonstration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.config import load
from proxy.demo.agent import Agent, Session, gather
from proxy.demo.apis import EveryApi
from proxy.demo.counting import RequestCounter
from proxy.demo.replies import Completion
from proxy.demo.run import (
    MODEL,
    WINDOW,
    Figures,
    cacheable,
    client,
    configuration,
    demo,
    figures,
    session,
    straight,
    through_proxy,
    verdict,
)
from proxy.demo.script import FACTS, STEPS, decide, facts_in, task_message
from proxy.demo.upstream import Received, Reply, StandIn
from proxy.server.loopback import serve


def work(upstream: StandIn, turns: int) -> tuple[Agent, Session]:
    with serve(upstream.app) as url, client(url) as caller:
        agent = Agent(caller, MODEL)
        return agent, agent.run(turns, lambda: None)


@contextmanager
def forgetful(upstream: str) -> Iterator[str]:
    """Something between the agent and the upstream that keeps the system message and the current task alone."""

    async def chat(request: Request) -> Response:
        body = await request.json()
        messages = body["messages"]
        task = max(place for place, message in enumerate(messages) if message["role"] == "user")
        body["messages"] = [messages[0], *messages[task:]]
        done = {"x-compaction": "compacted" if task > 1 else "none"}
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(f"{upstream}/v1/chat/completions", json=body)
        return Response(answer.content, answer.status_code, done, answer.headers["content-type"])

    with serve(Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])) as url:
        yield url


@pytest.fixture(scope="module")
def unprotected() -> Figures:
    return session(60, straight, lambda: None)


def test_without_the_proxy_the_session_dies_of_its_length(unprotected: Figures) -> None:
    assert unprotected.error is not None
    assert unprotected.error.startswith("400 context_length_exceeded: This model's maximum context length is 16000")
    assert 10 < unprotected.turns < 30
    assert 0.8 * WINDOW < unprotected.largest_prompt <= WINDOW
    assert (unprotected.refused, unprotected.faults, unprotected.compacted, unprotected.summaries) == (1, 0, 0, 0)
    assert unprotected.facts == len(FACTS)
    assert unprotected.cacheable > 0.8


def test_a_session_goes_the_same_way_every_time(unprotected: Figures) -> None:
    again = session(60, straight, lambda: None)
    assert replace(again, seconds=0) == replace(unprotected, seconds=0)


def test_forgetting_is_seen_in_the_figures(unprotected: Figures) -> None:
    turns = 24
    steps: list[int] = []
    seen = session(turns, forgetful, lambda: steps.append(1))
    assert (seen.turns, len(steps), seen.error, seen.refused, seen.faults) == (turns, turns, None, 0, 0)
    assert seen.compacted == turns - len(STEPS) - 1  # all but those of the first task
    assert seen.facts == 0
    assert seen.largest_prompt < WINDOW
    assert seen.cacheable < unprotected.cacheable


def test_settings_of_the_machine_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "http://127.0.0.1:9"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, nowhere)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert session(2, straight, lambda: None).turns == 2


def test_every_fact_is_said_once_and_early() -> None:
    agent, seen = work(StandIn(window=200_000, responder=decide), 3 * (len(STEPS) + 1))
    assert seen.error is None
    assert facts_in(agent.messages) == len(FACTS)
    early = 2 * (len(STEPS) + 1)
    for fact in FACTS:
        places = [place for place, message in enumerate(agent.messages) if fact.text in json.dumps(message)]
        assert len(places) == 1, fact.text
        assert sum(message["role"] == "assistant" for message in agent.messages[: places[0]]) < early


def test_the_session_has_all_kinds_of_turns() -> None:
    upstream = StandIn(window=200_000, responder=decide)
    agent, _ = work(upstream, 8)
    results = [len(message["content"]) for message in agent.messages if message["role"] == "tool"]
    calls = [len(message.get("tool_calls", ())) for message in agent.messages if message["role"] == "assistant"]
    assert set(calls) == {0, 1, 2}
    assert min(results) < 100
    assert max(results) > 4_000
    assert [bool(received.body.get("stream")) for received in upstream.requests] == [False, True] * 4
    assert upstream.faults == []


@pytest.mark.parametrize("message", [{"role": "user", "content": "Hello"}, {"role": "tool", "tool_call_id": "call_x"}])
def test_the_script_knows_only_its_own_messages(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="outside of the script"):
        decide({"messages": [message | {"content": "x"}]})


def test_the_models_part_follows_from_the_last_message_alone() -> None:
    last = {"role": "user", "content": task_message(7)}
    history = [{"role": "user", "content": task_message(task)} for task in range(1, 7)]
    assert decide({"messages": [last]}) == decide({"messages": [*history, last]})


# Each way to fail, as a reply to the agent's request, and what the agent says of it. Its second turn is streamed.
FAILURES: dict[str, tuple[int, Reply, str]] = {
    "a refusal": (
        1,
        Reply(status=429, error={"error": {"message": "Slow down.", "type": "x", "param": None, "code": "rate_limit"}}),
        "429 rate_limit: Slow down.",
    ),
    "an error that is no JSON": (1, Reply(status=502, error="<h1>Bad gateway</h1>"), "502 InternalServerError: "),
    "an error in a stream": (
        2,
        Reply(content="x", error={"error": {"message": "Broke.", "code": "server_error"}}, break_after=1),
        "server_error: Broke.",
    ),
    "a stream that breaks off": (2, Reply(content="x y z", break_after=2), "RemoteProtocolError: "),
}


@pytest.mark.parametrize(("turn", "reply", "words"), FAILURES.values(), ids=FAILURES)
def test_the_first_error_ends_the_session(turn: int, reply: Reply, words: str) -> None:
    answers = iter([Reply(content="Fine.")] * (turn - 1) + [reply])
    _, seen = work(StandIn(responder=lambda body: next(answers)), 5)
    assert seen.turns == turn - 1
    assert seen.error is not None
    assert seen.error.startswith(words)


def test_a_stream_without_its_end_is_an_error() -> None:
    completion = Completion("chatcmpl-1", MODEL, 0, Reply(content="It rains."), 14)
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in completion.chunks(include_usage=True)]
    assert gather(chunks) == {"role": "assistant", "content": "It rains."}
    with pytest.raises(EOFError):
        gather(chunks[:-2])


def received(*contents: str, tools: Any = None) -> Received:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content} for content in contents], "tools": tools}
    return Received("POST", "/", Headers(), b"", body, RequestCounter().request(body).total, status=200)


def test_what_a_cache_can_hold() -> None:
    first, second, changed = received("a"), received("a", "b"), received("z", "b")
    counter = RequestCounter()
    assert cacheable([], counter) == 0
    assert cacheable([first], counter) == 0
    assert cacheable([second, second], counter) == 1
    assert cacheable([first, second], counter) == pytest.approx(first.tokens / second.tokens)
    assert cacheable([second, changed], counter) < 0.3
    assert cacheable([first, received("a", tools=[{"type": "function"}])], counter) == 0


def test_headers_and_summaries_are_counted() -> None:
    upstream = StandIn()
    upstream.requests = [received("OPS-4821"), replace(received("<transcript>"), summary=True)]
    made = {"x-compaction": "compacted", "x-compaction-summary": "made"}
    digest = {"x-compaction": "compacted", "x-compaction-summary": "digest"}
    seen = figures(Session(turns=3, headers=[{"x-compaction": "none"}, made, digest]), upstream)
    assert (seen.compacted, seen.summaries, seen.digests, seen.facts) == (2, 1, 1, 1)
    assert seen.prompt_tokens == upstream.requests[0].tokens
    assert seen.summary_tokens == upstream.requests[1].tokens


VERDICTS: dict[str, tuple[str | None, str | None, bool, str]] = {
    "as it should be": ("400 too long", None, True, "failed in turn 18: 400 too long"),
    "the proxy failed": ("400 too long", "500 oops", False, "With the proxy the session failed in turn 18: 500 oops"),
    "both failed": ("500 oops", "500 oops", False, "With the proxy the session failed"),
    "nothing to show": (None, None, False, "Ask for more turns"),
}


@pytest.mark.parametrize(("without", "protected", "good", "words"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict(unprotected: Figures, without: str | None, protected: str | None, good: bool, words: str) -> None:
    said = verdict(60, replace(unprotected, error=without), replace(unprotected, error=protected))
    assert said[0] is good
    assert words in said[1]


def test_no_turns_are_no_demonstration() -> None:
    with pytest.raises(ValueError, match="at least one turn"):
        demo(0)


def test_the_configuration_is_a_valid_one(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(configuration("http://127.0.0.1:9", tmp_path / "demo.db"), encoding="utf-8")
    settings = load(file, {})
    assert list(settings.upstreams) == ["main"]
    assert [route.match for route in settings.models] == ["*"]


def test_the_whole_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    status = demo(60)
    shown = capsys.readouterr().out
    assert status == 0, shown
    cells = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for row in (line.strip("│┃").split("│") for line in shown.splitlines())
        if len(row) == 3
    }
    assert cells["turns done"][1] == "60"
    assert cells["error"] == ["400 context_length_exceeded", "none"]
    assert cells["malformed conversations"] == ["0", "0"]
    assert cells["requests refused upstream"] == ["1", "0"]
    assert int(cells["turns compacted"][1]) > 0
    assert int(cells["largest prompt"][1].replace(",", "")) <= WINDOW
    assert cells["early facts still visible"][1].startswith(f"{len(FACTS)} of {len(FACTS)}")


def test_too_few_turns_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(2) == 1
    assert "nothing was shown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("api", "words"),
    [
        ("responses", "context_length_exceeded: Your input exceeds the context window of this model."),
        ("messages", "400 invalid_request_error: prompt is too long: "),
    ],
)
def test_the_session_fails_on_every_api_and_the_proxy_saves_it(api: str, words: str) -> None:
    without = session(24, straight, lambda: None, api)
    assert without.error is not None
    assert without.error.startswith(words)
    assert (without.turns, without.refused, without.faults) == (17, 1, 0)
    protected = session(24, through_proxy, lambda: None, api)
    assert (protected.turns, protected.error, protected.refused, protected.faults) == (24, None, 0, 0)
    assert (protected.compacted > 0, protected.summaries > 0, protected.facts) == (True, True, len(FACTS))


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
USER = {"role": "user", "content": "Hello."}


@pytest.mark.parametrize(
    ("path", "conversation", "words"),
    [
        ("responses", {"input": "Hello."}, None),
        ("responses", {"input": [USER, CALL, OUTPUT]}, None),
        ("responses", {"input": [USER, CALL]}, "No tool output found for function call a."),
        ("responses", {"input": [USER, OUTPUT]}, "No tool call found for function call output with call_id a."),
        ("messages", {"messages": [USER, USER, USE, RESULT, USER]}, None),
        ("messages", {"messages": [USER, USE, USER]}, "messages.1: `tool_use` ids were found without `tool_result`"),
        (
            "messages",
            {"messages": [USER, USE, USER, RESULT]},
            "messages.1: `tool_use` ids were found without `tool_result`",
        ),
        ("messages", {"messages": [USER, RESULT]}, "messages.0: unexpected `tool_use_id` found in `tool_result`"),
    ],
)
def test_the_stand_in_rejects_calls_and_results_that_do_not_match(
    path: str, conversation: dict[str, Any], words: str | None
) -> None:
    upstream = EveryApi(window=WINDOW, max_output=2_000, model=MODEL)
    with serve(upstream.app) as url:
        sent = {"model": MODEL, "max_tokens": 100, **conversation}
        answer = httpx.post(f"{url}/v1/{path}", json=sent, trust_env=False)
    assert answer.status_code == (400 if words else 200)
    assert len(upstream.faults) == bool(words)
    if words:
        assert answer.json()["error"]["message"].startswith(words)
