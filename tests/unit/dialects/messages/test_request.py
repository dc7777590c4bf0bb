"""Rewriting a Messages request changes only the units. ``test_parts.py`` has bodies that pass unchanged."""

import json
from typing import Any

from proxy.dialects.messages.request import MessagesRequest, parse


def conversation(*contents: Any, **fields: Any) -> MessagesRequest:
    roles = ("user", "assistant")
    messages = [
        one if isinstance(one, dict) else {"role": roles[index % 2], "content": one}
        for index, one in enumerate(contents)
    ]
    return parse(json.dumps({"model": "m", "max_tokens": 10, "messages": messages, **fields}).encode())


def result(number: int, text: str = "r") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": text}


def use(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def messages_of(body: bytes) -> list[Any]:
    messages: list[Any] = json.loads(body)["messages"]
    return messages


def test_a_message_with_results_is_split_and_joined_again() -> None:
    request = conversation("go", [use(1), use(2)], [text("note"), result(1), result(2)])
    units = [json.loads(bytes(unit))["content"] for unit in request.units]
    assert units == ["go", [use(1), use(2)], [result(1)], [result(2)], [text("note")]]
    shorter = json.dumps({"role": "user", "content": [result(1, "-")]}).encode()
    body = request.rewritten(units=[*request.units[:2], shorter, *request.units[3:]])
    assert messages_of(body)[2] == {"role": "user", "content": [result(1, "-"), result(2), text("note")]}


def test_a_message_whose_units_are_all_kept_has_its_own_bytes() -> None:
    whole = {"role": "user", "content": [text("note"), result(1)], "extra": 1}
    request = conversation("one", "two", "go", [use(1)], whole)
    body = request.rewritten(units=request.units[2:])
    assert messages_of(body)[-1] == whole
    assert json.dumps(whole).encode() in body


def test_results_of_several_messages_become_one_message() -> None:
    request = conversation("go", [use(1), use(2)], {"role": "user", "content": [result(1)]}, "x")
    changed = json.dumps({"role": "user", "content": [result(2)]}).encode()
    body = request.rewritten(units=[*request.units[:3], changed])
    assert messages_of(body)[2:] == [{"role": "user", "content": [result(1), result(2)]}]


def test_system_messages_move_before_an_assistants_message() -> None:
    one, two = ({"role": "system", "content": words} for words in ("be brief", "be kind"))
    fine = {"role": "assistant", "content": "fine"}
    request = conversation("go", "ok", "more", one, fine, "again", two)
    summary = b'{"role":"user","content":"summary"}'
    units = [summary, request.units[3], request.units[6], request.units[2], request.units[4]]
    assert messages_of(request.rewritten(units=units)) == [
        {"role": "user", "content": "summary"},
        {"role": "user", "content": "more"},
        {"role": "system", "content": [text("be brief"), text("be kind")]},
        fine,
    ]


def test_messages_before_a_compaction_block_are_a_fixed_prefix() -> None:
    compaction = {"type": "compaction", "content": "earlier"}
    request = conversation("old", [compaction, use(1)], [result(1)], "next", "new")
    assert [bytes(unit) for unit in request.units] == [json.dumps(m).encode() for m in messages_of(request.raw)[3:]]
    kept = request.rewritten(units=request.units[1:])
    assert messages_of(kept) == [*messages_of(request.raw)[:3], messages_of(request.raw)[4]]
    assert [message["role"] for message in request.overhead_fields()["prefix"]] == ["assistant", "user"]


def test_less_output_leaves_room_for_thinking() -> None:
    manual = {"type": "enabled", "budget_tokens": 2_000}
    request = conversation("go", max_tokens=9_000, thinking=manual)
    assert json.loads(request.rewritten(max_output=1_000))["max_tokens"] == 2_001
    assert json.loads(request.rewritten(max_output=5_000))["max_tokens"] == 5_000
    assert json.loads(request.rewritten(max_output=10_000))["max_tokens"] == 9_000


def outputs(most: int, max_tokens: int, **thinking: Any) -> tuple[int, int]:
    """Return both limits after lowering the output."""
    body = json.loads(conversation("go", max_tokens=max_tokens, thinking=thinking).rewritten(max_output=most))
    return body["max_tokens"], body["thinking"]["budget_tokens"]


def test_the_budget_for_thinking_is_lowered_only_if_it_has_to_be() -> None:
    manual = {"type": "enabled", "budget_tokens": 31_999, "display": "omitted"}
    assert outputs(31_999, 32_000, **manual) == (31_999, 8_192)
    # A power of two stays the same for many outputs, and so does the prompt cache.
    assert {outputs(most, 32_000, **manual)[1] for most in range(4_096, 8_192, 100)} == {2_048}
    assert outputs(1_500, 32_000, **manual) == (1_500, 1_024)
    assert outputs(20_000, 32_000, type="enabled", budget_tokens=16_000) == (20_000, 16_000)
    raw = conversation("go", max_tokens=32_000, thinking=manual).rewritten(max_output=5_000)
    assert json.loads(raw)["thinking"] == {**manual, "budget_tokens": 2_048}
    # With interleaved thinking, the budget is for all requests of a turn.
    assert outputs(4_000, 8_000, type="enabled", budget_tokens=20_000) == (4_000, 20_000)
