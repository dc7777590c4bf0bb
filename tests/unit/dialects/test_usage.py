"""Test what a price depends on, by the usage objects of several providers."""

import json
from typing import Any

import pytest

from proxy.dialects.apis import CHAT, MESSAGES, RESPONSES
from proxy.dialects.usage import usage_of
from proxy.overflow.silent import Finished
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
    (
        chat({"iterations": [{"type": "compaction", "input_tokens": 60, "output_tokens": 9}]}),
        Usage(100, 20, compactions=(Usage(60, 9),)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "usage"), CASES)
def test_chat_completions(answer: dict[str, Any], usage: Usage) -> None:
    assert read(CHAT, answer) == usage


WRITTEN = {"completion_tokens": 20, "total_tokens": 120}
READ = {"cached_tokens": 60}
GATEWAYS = {
    "OpenAI": ({"prompt_tokens_details": READ}, Usage(100, 20, 60)),
    "OpenRouter": ({"prompt_tokens_details": READ | {"cache_write_tokens": 9}}, Usage(100, 20, 60, 9)),
    "LiteLLM": (
        {
            "prompt_tokens_details": READ | {"cache_creation_tokens": 9},
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 9,
        },
        Usage(100, 20, 60, 9),
    ),
    "LiteLLM, only read": ({"cache_read_input_tokens": 60, "cache_creation_input_tokens": 0}, Usage(100, 20, 60, 0)),
    "DeepSeek": ({"prompt_cache_hit_tokens": 60, "prompt_cache_miss_tokens": 40}, Usage(100, 20, 60)),
    "Moonshot": ({"cached_tokens": 60}, Usage(100, 20, 60)),
    "Gemini, reasoning in the total": ({"total_tokens": 170}, Usage(100, 70)),
    "Gemini, with a cache": ({"total_tokens": 150, "prompt_tokens_details": READ}, Usage(100, 50, 60)),
    "cache only in the total": ({"prompt_tokens": 70, "total_tokens": 150} | READ, Usage(130, 20, 60)),
    "cache apart": ({"prompt_tokens": 40, "total_tokens": 60, "prompt_tokens_details": READ}, Usage(100, 20, 60)),
    "a total that is too small": ({"total_tokens": 7}, Usage(100, 20)),
}  # fmt: skip


def chunk(reason: str | None = None, choice: dict[str, Any] | None = None, **fields: Any) -> bytes:
    one = {"index": 0, "delta": {} if reason else {"content": "y" * 20}, "finish_reason": reason, **(choice or {})}
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [one], **fields}).encode()


@pytest.mark.parametrize("chunks", [1, 100])
@pytest.mark.parametrize(("stated", "expected"), GATEWAYS.values(), ids=GATEWAYS)
def test_gateways_count_caches_and_reasoning_once(stated: dict[str, Any], expected: Usage, chunks: int) -> None:
    usage = {"prompt_tokens": 100, **WRITTEN, **stated}
    assert read(CHAT, chat(usage, content="y" * 20 * chunks)) == expected
    ends = {
        "an event of its own": [chunk("stop"), b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode()],
        "the last event": [chunk("stop", usage=usage)],
        "the choice": [chunk("stop", {"usage": usage})],
        "Groq's field": [chunk("stop", usage=None, x_groq={"id": "req_1", "usage": usage})],
    }
    for place, end in ends.items():
        assert read(CHAT, *[chunk()] * chunks, *end, b"data: [DONE]\n\n") == expected, place


@pytest.mark.parametrize(
    ("stated", "usage"),
    [
        ({"speed": "fast", "inference_geo": "us"}, Usage(100, 20, tier="fast", region="us")),
        ({"service_tier": "priority", "inference_geo": "global"}, Usage(100, 20, tier="priority")),
        ({"inference_geo": "not_available", "iterations": "none"}, Usage(100, 20)),
        ({"cache_creation": {"ephemeral_1h_input_tokens": 0}}, Usage(100, 20)),
    ],
)
def test_messages(stated: dict[str, Any], usage: Usage) -> None:
    answer = {
        "content": [{"type": "text", "text": "Yes."}],
        "usage": {"input_tokens": 100, "output_tokens": 20, **stated},
    }
    assert read(MESSAGES, answer) == usage


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


def test_a_long_stream_of_messages() -> None:
    counts = {"input_tokens": 10, "cache_creation_input_tokens": 90, "cache_read_input_tokens": 0, "output_tokens": 1}
    start = {
        "type": "message_start",
        "message": {"usage": {**counts, "cache_creation": {"ephemeral_1h_input_tokens": 90}}},
    }
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word " * 20}}
    end = {"type": "message_delta", "usage": {"output_tokens": 20, "server_tool_use": {"web_search_requests": 3}}}
    events = [f"data: {json.dumps(event)}\n\n".encode() for event in (start, *[delta] * 100, end)]
    assert read(MESSAGES, *events) == Usage(100, 20, 0, 90, 90, searches=3)


@pytest.mark.parametrize("size", [4_096, 9_000, 100_000])
def test_the_tier_of_a_long_response_is_the_first_of_its_event(size: int) -> None:
    """A caller's metadata comes after the tier."""
    usage = {"input_tokens": 100, "output_tokens": 20}
    first = {"response": {"service_tier": "auto", "metadata": {"service_tier": "flex"}}}
    last = {
        "response": {
            "service_tier": "priority",
            "text": "x" * 70_000,
            "usage": usage,
            "metadata": {"service_tier": "flex"},
        }
    }
    stream = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in (first, last))
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert read(RESPONSES, *chunks) == Usage(100, 20, tier="priority")


@pytest.mark.parametrize("size", [1, 7, 50, 4_096])
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_response_has_its_tier_searches_and_end_wherever_its_chunks_end(size: int, stream: bool) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    text = {"type": "message", "content": [{"type": "output_text", "text": "x" * 9_000}]}
    usage = {"input_tokens": 100, "output_tokens": 20}
    whole = {"status": "completed", "output": [search] * 3 + [text], "service_tier": "priority", "usage": usage}
    done = [{"type": "response.web_search_call.completed", "item_id": "ws_1"}] * 3
    events = [*done, {"type": "response.completed", "response": whole}]
    body = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    body = body if stream else json.dumps(whole).encode()
    tail = RESPONSES.answers.tail()
    for start in range(0, len(body), size):
        tail.add(body[start : start + size])
    assert usage_of(tail.finished()) == Usage(100, 20, searches=3, tier="priority")
    assert tail.finished().finish_reason == "completed"


def test_an_answer_without_usage_has_none() -> None:
    assert usage_of(Finished("stop", None, None, empty=False)) is None
