"""Where a bounded answer ends, however it's cut into pieces."""

from typing import Any

from proxy.upstream.bridge.completions import Bounded, Completion
from proxy.upstream.bridge.messages import MessageBuilder
from proxy.upstream.bridge.returned import Writer

TEXT = "one E EN two END three STOP four"


def answered(pieces: list[dict[str, Any]], stops: list[str], *, single: bool = False) -> dict[str, Any]:
    builder = MessageBuilder("m", {}, stops, 0)
    completion = Completion(Bounded(builder, stops, single=single), Writer("m", []))
    events = []
    for piece in pieces:
        events += completion.feed({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]})
    events += completion.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    events += completion.feed({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9}})
    events += completion.finish()
    streamed = "".join(one["delta"].get("text", "") for one in events if one["type"] == "content_block_delta")
    whole = "".join(block.get("text", "") for block in builder.answer["content"])
    assert streamed == whole
    assert builder.answer["usage"]["output_tokens"] == 9
    return builder.answer


def test_an_answer_without_a_stop_sequence_stays_whole() -> None:
    answer = answered([{"content": letter} for letter in TEXT], ["ENDED", "four!"])
    assert answer["content"] == [{"type": "text", "text": TEXT}]
    assert answer["stop_reason"] == "max_tokens"


def test_a_single_answer_has_its_first_call_only() -> None:
    calls = [
        {"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": "get", "arguments": "{}"}}]}
        for index in range(3)
    ]
    assert [block["id"] for block in answered(calls, [], single=True)["content"]] == ["c0"]
