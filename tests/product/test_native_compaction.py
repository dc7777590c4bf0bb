"""Compaction by the conversation's own provider, through the official SDKs, at strict upstreams."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from starlette.types import ASGIApp

from proxy.server.loopback import serve
from tests.kit.agent_script import TURNS, Received
from tests.kit.agent_sessions import messages_session, responses_session
from tests.kit.records import records_in
from tests.kit.response_items import kind_of
from tests.kit.scripted import client, proxied
from tests.kit.signed_blocks import BETA, Failure, is_block
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
NATIVE = {"native": True, "max_tokens": 600}
SHORT = 16
"""Requests of a session with several checkpoints."""

ADAPTIVE: Any = {"type": "adaptive"}


CLAUDE = "claude-opus-5-5"
GPT = "gpt-4.1"


@contextlib.contextmanager
def replicas(app: ASGIApp, folder: Path, provider: str, summary: dict[str, Any], count: int = 1) -> Iterator[list[str]]:
    """The URLs of proxies on one store, in front of an upstream."""
    with serve(app) as url, contextlib.ExitStack() as stack:
        settings = {
            "upstreams": {"main": {"provider": provider, "base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": {"summary": summary}},
        }
        yield [stack.enter_context(proxied(settings, folder)) for _ in range(count)]


@contextlib.contextmanager
def claude(app: ASGIApp, folder: Path, summary: dict[str, Any] = NATIVE) -> Iterator[anthropic.Anthropic]:
    with (
        replicas(app, folder, "anthropic", summary) as [url],
        anthropic.Anthropic(base_url=url, api_key="sk-client", max_retries=0) as caller,
    ):
        yield caller


def play(caller: anthropic.Anthropic, turns: int = TURNS, **options: Any) -> None:
    assert len(list(messages_session(caller, turns, CLAUDE, thinking=ADAPTIVE, **options))) == turns


def kept_thinking(upstream: StrictMessages) -> int:
    return sum(len(received.reasoning) - len(received.dropped) for received in upstream.conversations)


def compactions(upstream: StrictMessages | StrictResponses) -> list[Received]:
    return [received for received in upstream.requests if received.compacts]


def with_block(received: Received) -> bool:
    content = received.body["messages"][0]["content"]
    return not isinstance(content, str) and is_block(content[0])


@pytest.mark.long
def test_thinking_stays_behind_a_compaction_of_the_provider(tmp_path: Path) -> None:
    own, upstream = StrictMessages(WINDOW), StrictMessages(WINDOW)
    for name in ("own", "native"):
        (tmp_path / name).mkdir()
    with claude(own.app, tmp_path / "own", {"max_tokens": 600}) as caller:
        play(caller)
    with claude(upstream.app, tmp_path / "native") as caller:
        play(caller, extra_headers={"anthropic-beta": "some-beta", "idempotency-key": "once"})
    assert own.faults == upstream.faults == []
    asked = compactions(upstream)
    assert len(asked) >= 3
    assert not any("idempotency-key" in received.headers for received in asked)
    # A summary that is prepared behind the newest message may be unable to continue the last prompt.
    others = [received for received in upstream.requests if received.summary and received not in asked]
    assert len(others) <= 1
    behind_block = [received for received in upstream.conversations if with_block(received)]
    assert len(behind_block) > TURNS // 2
    assert {received.headers["anthropic-beta"] for received in behind_block} == {f"some-beta,{BETA}"}
    assert kept_thinking(upstream) > 1.2 * kept_thinking(own)
    summaries = [call for call in records_in(tmp_path / "native" / "store.db") if call.kind == "summary"]
    assert len(summaries) == len(asked) + len(others)
    usages = [(call.usage.input, call.usage.output) for call in summaries if call.usage]
    assert usages.count((1_000, 100)) == len(asked)


def test_replicas_send_the_same_block(tmp_path: Path) -> None:
    upstream = StrictMessages(WINDOW)
    with (
        replicas(upstream.app, tmp_path, "anthropic", NATIVE, 2) as urls,
        anthropic.Anthropic(base_url=urls[0], api_key="sk-client", max_retries=0) as caller,
    ):
        for turn in messages_session(caller, 2 * SHORT, CLAUDE, thinking=ADAPTIVE):
            caller.base_url = urls[turn % 2]
    assert upstream.faults == []
    assert [received for received in upstream.requests if received.summary] == compactions(upstream)
    blocks = {json.dumps(received.body["messages"][0]) for received in upstream.conversations if with_block(received)}
    assert 3 <= len(blocks) <= len(compactions(upstream)), "no checkpoint has two blocks"
    assert not any(received.dropped for received in upstream.conversations)


def test_an_own_summary_replaces_a_failed_compaction(tmp_path: Path) -> None:
    failures: list[Failure] = ["hang", "empty", "rejected", "overloaded"]
    upstream = StrictMessages(WINDOW, failures=iter(failures))
    with claude(upstream.app, tmp_path, {**NATIVE, "timeout": 0.3}) as caller:
        play(caller, 24)
    assert upstream.faults == []
    assert len(compactions(upstream)) == 3, "the circuit breaker prevents more"
    assert len([received for received in upstream.requests if received.summary]) > 3 + 2


def test_a_refused_block_is_replaced_in_one_retry(tmp_path: Path) -> None:
    """For example, the provider no longer accepts its signature."""
    upstream = StrictMessages(WINDOW)
    with claude(upstream.app, tmp_path) as caller:
        for turn in messages_session(caller, 2 * SHORT, CLAUDE, thinking=ADAPTIVE):
            if turn == SHORT:
                upstream.blocks.forget()
    [refused] = [received for received in upstream.conversations if received.fault]
    assert "the `signature` of the `compaction` block is not valid" in str(refused.fault)
    assert not any(map(with_block, upstream.conversations[-SHORT // 2 :]))


def test_a_request_with_conflicting_options_gets_an_own_summary(tmp_path: Path) -> None:
    upstream = StrictMessages(WINDOW)
    with claude(upstream.app, tmp_path) as caller:
        play(caller, SHORT, stop_sequences=["STOP"])
    assert upstream.faults == []
    assert compactions(upstream) == []
    assert [received for received in upstream.requests if received.summary]


def test_openai_compacts_its_own_conversations(tmp_path: Path) -> None:
    upstream = StrictResponses(WINDOW)
    with replicas(upstream.app, tmp_path, "openai", NATIVE) as [url], client(url) as caller:
        assert len(list(responses_session(caller, 2 * SHORT, "stateless", GPT))) == 2 * SHORT
    assert upstream.faults == []
    assert len(compactions(upstream)) >= 3
    assert upstream.chat.summaries == []
    kept = [received for received in upstream.conversations if "compaction" in map(kind_of, received.body["input"])]
    assert len(kept) > SHORT
    # A stage that changes the prompt keeps the reasoning of the open round, and the server drops it.
    assert len({id_ for received in upstream.conversations for id_ in received.dropped}) <= 2


def test_an_own_summary_covers_what_openai_compacted_before(tmp_path: Path) -> None:
    """The text of its compactions is encrypted, so a summary after one begins at the start of the conversation."""
    failures: list[Failure | None] = [None, "rejected", "empty", "overloaded"]
    upstream = StrictResponses(WINDOW, failures=iter(failures))
    with replicas(upstream.app, tmp_path, "openai", NATIVE) as [url], client(url) as caller:
        assert len(list(responses_session(caller, 2 * SHORT, "stateless", GPT))) == 2 * SHORT
    assert upstream.faults == []
    assert len(compactions(upstream)) == 4
    assert any("PART-1001" in json.dumps(received.body) for received in upstream.chat.summaries)
