"""Notes by the conversation's own model: the request for them begins with the prompt that was sent last."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest

from tests.kit.agent_script import TURNS
from tests.kit.agent_sessions import messages_session, responses_session
from tests.kit.messages import assistant, call, result, system, user, words
from tests.kit.records import records_in
from tests.kit.scripted import behind, client
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Received, Reply, StandIn, ToolCall

CONTINUE = {"summary": {"method": "continue", "max_tokens": 600}}
MARK = "<write_notes>"
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
PROFILE = {"context_window": 16_000, "max_input_tokens": 16_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}


def growing(turns: int) -> Iterator[list[Any]]:
    """The requests of an agent's session. A round has some 800 tokens."""
    messages = [system(), user("Fix every file. " + words(200, "task"))]
    for number in range(turns):
        yield list(messages)
        messages.append(assistant(f"Reading {number}.", call(f"c{number}", "read", path=f"src/f{number}.py")))
        messages.append(result(f"c{number}", words(700, f"r{number}x")))


def raws(request: Received) -> list[bytes]:
    """The messages of a request, with their bytes."""
    fields = msgspec.json.decode(request.raw, type=dict[str, msgspec.Raw])
    return [bytes(raw) for raw in msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])]


def continued(upstream: StandIn) -> list[Received]:
    return [request for request in upstream.summaries if MARK in request.raw.decode()]


def notes(body: dict[str, Any]) -> Reply:
    text = f"Goal: NOTES on {len(body['messages'])} messages: fix every file."
    return Reply(content=f"<notes>\n{text}\n</notes>", cached=4_096)


def run(upstream: StandIn, folder: Path, policy: dict[str, Any], turns: int = 40, **fields: Any) -> list[str]:
    """Play a session, and return the origins of the summaries."""
    origins = []
    with behind(upstream, folder, policy={"prepare": None, **policy}) as url, client(url) as caller:
        for messages in growing(turns):
            headers = caller.chat.completions.with_raw_response.create(
                model="m", messages=messages, tools=TOOLS, **fields
            ).headers
            origins.append(headers.get("x-compaction-summary", ""))
    assert upstream.faults == []
    return origins


def test_a_request_for_notes_begins_with_the_bytes_that_were_sent_last(tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, summariser=notes)
    origins = run(upstream, tmp_path, CONTINUE, temperature=0.3, max_tokens=900)
    assert origins.count("made") == len(continued(upstream)) == len(upstream.summaries) >= 2
    for asked in upstream.summaries:
        place = upstream.requests.index(asked)
        before = upstream.requests[place - 1]
        *prompt, last = raws(asked)
        assert prompt == raws(before)[: len(prompt)]
        assert json.loads(last)["content"].startswith(MARK)
        assert {key: asked.body[key] for key in ("tools", "temperature", "model")} == {
            key: before.body[key] for key in ("tools", "temperature", "model")
        }
        kept = raws(upstream.requests[place + 1])
        assert f"NOTES on {len(prompt) + 1} messages" in kept[1].decode()
        assert b"Fix every file." in kept[2], "the user's task is kept"
        assert kept[3:] == raws(before)[len(prompt) :] + kept[-2:], "the notes cover exactly what isn't sent anymore"
    records = [record for record in records_in(tmp_path / "store.db") if record.kind == "summary"]
    assert [record.usage and record.usage.cache_read for record in records] == [4_096] * len(upstream.summaries)
    assert "NOTES" in continued(upstream)[1].raw.decode(), "later notes continue from the earlier ones"


def scripted(*replies: Reply) -> Callable[[dict[str, Any]], Reply]:
    left = list(replies)
    return lambda body: left.pop(0) if left and MARK in str(body["messages"][-1]) else notes(body)


TOO_LONG = {
    "error": {"message": "This model's maximum context length is 9000 tokens.", "code": "context_length_exceeded"}
}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(content="Notes.", tool_calls=(ToolCall("x", "read", "{}"),)),
        Reply(content=""),
        Reply(content="Now I'll read the next file."),
        Reply(content="I'm sorry, I can't help with that."),
        Reply(status=400, error=TOO_LONG),
    ],
    ids=["call", "empty", "no notes", "refusal", "overflow"],
)
def test_a_failure_falls_back_to_a_transcript(reply: Reply, tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, summariser=scripted(reply))
    origins = run(upstream, tmp_path, CONTINUE, 20)
    assert origins.count("made") == 1
    first, second = upstream.summaries
    assert MARK in first.raw.decode()
    assert "<transcript>" in second.raw.decode()
    assert "tools" not in second.body


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}],
    ids=["required", "json"],
)
def test_a_request_that_prescribes_its_answer_gets_a_transcript(fields: dict[str, Any], tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, summariser=notes)
    assert "made" in run(upstream, tmp_path, CONTINUE, 20, **fields)
    assert not continued(upstream)


def unmarked(messages: Any) -> Any:
    """Messages without breakpoints, which clients move and caches don't compare."""
    return json.loads(json.dumps(messages).replace(', "cache_control": {"type": "ephemeral"}', ""))


def begin_like_earlier_ones(requests: Sequence[Any], field: str) -> int:
    """Check that each request for notes begins like an earlier request, and return how many there are."""
    found = 0
    for place, request in enumerate(requests):
        if MARK in json.dumps(request.body[field][-1]):
            prompt = unmarked(request.body[field][:-1])
            assert any(unmarked(before.body[field][: len(prompt)]) == prompt for before in requests[:place])
            assert request.body["tools"] == requests[0].body["tools"]
            found += 1
    return found


def test_the_recall_tool_stays_among_the_tools(tmp_path: Path) -> None:
    upstream = StandIn(window=16_000, summariser=notes)
    run(upstream, tmp_path, {**CONTINUE, "recall": {"tool": "auto"}})
    counts = [len(asked.body["tools"]) for asked in upstream.summaries]
    befores = [upstream.requests[upstream.requests.index(asked) - 1] for asked in upstream.summaries]
    assert [asked.body["tools"] for asked in upstream.summaries] == [before.body["tools"] for before in befores]
    assert counts[0] == 1
    assert set(counts[1:]) == {2}


def test_the_next_requests_notes_are_prepared_from_the_last_prompt(tmp_path: Path) -> None:
    """The default policy prepares notes in a turn before the one that needs them, while its request is being sent."""
    upstream = StandIn(window=16_000, summariser=notes)
    run(upstream, tmp_path, {**CONTINUE, "prepare": {"fraction": 0.75}}, 30)
    assert len(continued(upstream)) == len(upstream.summaries) >= 1
    for asked in upstream.summaries:
        before = [raws(one) for one in upstream.requests[: upstream.requests.index(asked)]]
        prompt = raws(asked)[:-1]
        assert any(one[: len(prompt)] == prompt for one in before)


def test_over_messages(tmp_path: Path) -> None:
    upstream = StrictMessages(16_000, check="error", ratio=1.5)
    with (
        behind(upstream.app, tmp_path, profile=PROFILE, policy=CONTINUE) as url,
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        list(messages_session(caller, TURNS, "claude-sonnet-5-5", thinking={"type": "adaptive"}))
    assert upstream.faults == []
    assert begin_like_earlier_ones(upstream.requests, "messages") >= 2
    assert not upstream.chat.summaries


def test_over_responses(tmp_path: Path) -> None:
    upstream = StrictResponses(16_000)
    with behind(upstream.app, tmp_path, profile=PROFILE, policy=CONTINUE) as url, client(url) as caller:
        list(responses_session(caller, TURNS, "with_ids", "gpt-4.1"))
    assert upstream.faults == []
    assert begin_like_earlier_ones(upstream.requests, "input") >= 2
    assert len(upstream.chat.summaries) <= 1, "the conversation and the notes fit the model nearly always"
