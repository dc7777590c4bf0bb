"""OpenAI puts the results of parallel calls into the prompt as JSON in ASCII: outside ASCII they are several times as
large as their text."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.compaction.stages.evict_results import shortened
from proxy.compaction.turn import Turn
from proxy.config import Settings
from proxy.dialects.apis import CHAT
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.units import decode
from proxy.limits.profiles import Profile, Profiles
from proxy.pipeline.facts_cache import FactsCache
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.scripted import proxied
from tests.kit.upstream import StandIn

OPENAI = ChatCounter(Profiles().find("gpt-4.1"))
KOREAN = "우리 회사의 핵심 정책은 다음과 같습니다. "


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}


def result(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


ASK = {"role": "user", "content": "찾아 주세요."}
WIDE, PLAIN = result("a", KOREAN * 20), result("b", "hello " * 100)
TALK = [ASK, calls("a"), WIDE, ASK, calls("a", "b"), WIDE, PLAIN, ASK, calls("a"), WIDE, ASK]


def raws_of(messages: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(message, ensure_ascii=False).encode() for message in messages]


def turns_of(messages: list[dict[str, Any]], counter: ChatCounter, memory: FactsCache | None = None) -> list[Turn]:
    return asyncio.run((memory or FactsCache()).turns(raws_of(messages), counter))


def test_a_result_is_counted_by_its_place() -> None:
    memory = FactsCache()
    for _ in range(2):  # the second time from memory
        turns = turns_of(TALK, OPENAI, memory)
        sizes = [turn.facts.tokens for turn in turns]
        one, several = OPENAI.message(WIDE), OPENAI.message(WIDE, parallel=True)
        assert several > 4 * one
        assert [sizes[2], sizes[5], sizes[9]] == [one, several, one]
        assert sizes[6] == OPENAI.message(PLAIN)
        assert turns[2].facts.digest == turns[5].facts.digest


@pytest.mark.parametrize("model", ["claude-sonnet-4-5", "qwen3-32b", "gpt-oss-120b", "never-heard-of"])
def test_other_models_read_the_text(model: str) -> None:
    counter = ChatCounter(Profiles().find(model))
    assert [turn.facts.tokens for turn in turns_of(TALK, counter)] == [counter.message(message) for message in TALK]


def test_what_is_shortened_is_counted_so_too() -> None:
    turn = turns_of([ASK, calls("a", "b"), result("a", KOREAN * 300)], OPENAI)[2]
    short = shortened(turn, 1_000, OPENAI.format, "[{tokens} left out]")
    assert short is not None
    assert 500 < short.facts.tokens <= 1_000
    assert short.facts.tokens == OPENAI.message(decode(short.raw), parallel=True)


def test_profiles_that_count_otherwise_have_counters_of_their_own() -> None:
    service = Proxy(Settings()).service
    plain = Profile("m", tools="json")
    assert service.limits.measures.counter(plain, CHAT) is service.limits.measures.counter(
        replace(plain, model="n", context_window=9_000), CHAT
    )
    for other in (replace(plain, tools="typescript"), replace(plain, escapes=True), replace(plain, images="claude")):
        assert service.limits.measures.counter(plain, CHAT) is not service.limits.measures.counter(other, CHAT)


def test_a_request_that_is_too_large_in_escapes_alone_is_compacted(tmp_path: Path) -> None:
    """By its bytes, of which there are fewer than tokens, it would be under the trigger."""
    window = 20_000
    messages = [ASK, calls("a", "b", "c"), *[result(call, "테스트 " * 480) for call in "abc"]]
    with serve(StandIn(window=window).app) as upstream:
        settings = {
            "upstreams": {"main": {"base_url": f"{upstream}/v1"}},
            "models": [{"match": "*", "upstream": "main", "profile": {"context_window": window}}],
        }
        with proxied(settings, tmp_path) as url, httpx.Client(trust_env=False, timeout=60) as http:
            said = {}
            for model in ("gpt-oss-120b", "gpt-4.1"):
                body = json.dumps({"model": model, "messages": messages}, ensure_ascii=False).encode()
                assert len(body) < 0.85 * window
                headers = {"authorization": "Bearer k", "content-type": "application/json"}
                answer = http.post(f"{url}/v1/chat/completions", content=body, headers=headers)
                assert answer.status_code == 200
                said[model] = answer.headers["x-compaction"]
    assert said == {"gpt-4.1": "compacted", "gpt-oss-120b": "none"}
