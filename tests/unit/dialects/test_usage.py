"""Test what a price depends on, by the usage objects of several providers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.apis import CHAT, MESSAGES
from proxy.dialects.usage import usage_of
from proxy.telemetry.record import Usage


def read(dialect: Any, *chunks: bytes | dict[str, Any]) -> Usage | None:
    tail = dialect.answers.tail()
    for chunk in chunks:
        tail.add(chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode())
    return usage_of(tail.finished())


def chat(usage: dict[str, Any], content: str = "Yes.", **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **fields}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 20, **usage}}


CASES = [
    (chat({}), Usage(100, 20)),
    (chat({"prompt_tokens_details": {"audio_tokens": 0}}), Usage(100, 20)),
    (chat({"prompt_tokens_details": {"cached_tokens": 9, "audio_tokens": 7}}), Usage(100, 20, 9, audio_input=7)),
    (
        chat({"completion_tokens_details": {"reasoning_tokens": 5, "audio_tokens": 3}}),
        Usage(100, 20, reasoning=5, audio_output=3),
    ),
    (chat({"total_tokens": 150, "completion_tokens_details": {"reasoning_tokens": 30}}), Usage(100, 50, reasoning=30)),
    (chat({"total_tokens": 120, "completion_tokens_details": {"reasoning_tokens": 10}}), Usage(100, 20, reasoning=10)),
    (chat({"server_side_tool_usage_details": {"web_search_calls": 2}}), Usage(100, 20, searches=2)),
    (chat({"prompt_tokens_details": {"web_search_requests": 4}}), Usage(100, 20, searches=4)),
    (chat({}, annotations=[{"type": "url_citation"}, {"type": "url_citation"}]), Usage(100, 20, searches=1)),
    ({**chat({}), "service_tier": "FLEX"}, Usage(100, 20, tier="flex")),
    ({**chat({}), "service_tier": "fast"}, Usage(100, 20, tier="priority")),
    ({**chat({}), "service_tier": "scale"}, Usage(100, 20)),
    ({**chat({}), "service_tier": ["flex"]}, Usage(100, 20)),
    ({**chat({}, content="y" * 9_000), "service_tier": "priority"}, Usage(100, 20, tier="priority")),
    # LiteLLM's sums include its iterations.
    (chat({"iterations": [{"type": "compaction", "input_tokens": 60, "output_tokens": 9}]}), Usage(100, 20)),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "usage"), CASES)
def test_chat_completions(answer: dict[str, Any], usage: Usage) -> None:
    assert read(CHAT, answer) == usage


def test_the_providers_own_compactions_are_in_the_sums_and_apart() -> None:
    counts = {"input_tokens": 60, "output_tokens": 9, "cache_read_input_tokens": 5}
    calls = [{"type": "compaction", **counts}, {"type": "compaction", "input_tokens": 10**30}, {"type": "message"}, 7]
    usage = {"input_tokens": 100, "output_tokens": 20, "cache_read_input_tokens": 1, "iterations": calls}
    found = read(MESSAGES, {"content": [], "usage": usage})
    assert found == Usage(166, 29, 6, compactions=(Usage(65, 9, 5),))
    assert found.without_compactions == Usage(101, 20, 1)


@pytest.mark.parametrize("count", [-1, 10**30, True, "7", None, [], {}, 1.5])
def test_a_strange_count_is_none(count: object) -> None:
    details = {"reasoning_tokens": count, "audio_tokens": count}
    usage = {"completion_tokens_details": details, "server_tool_use": {"web_search_requests": count}}
    assert read(CHAT, chat(usage)) == Usage(100, 20)
