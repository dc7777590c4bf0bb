"""Calls and results in the form of another API than the request's stay together. They are counted and summarized."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kit.any_api import Upstream
from tests.kit.combinations import combined
from tests.kit.other_forms import Units
from tests.product.test_same_conversation import WINDOW, sending

DATA = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1Pe" + "A" * 40_000
PICTURE = {"type": "base64", "media_type": "image/png", "data": DATA}
TURNS = 26
RULE = "Never touch valve V7."


def field_calls(number: int, names: str) -> dict[str, Any]:
    functions = [{"name": "read", "arguments": json.dumps({"path": f"{number}{name}.py"})} for name in names]
    calls = [{"id": f"t{number}{n}", "type": "function", "function": f} for n, f in zip(names, functions, strict=True)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def field_results(number: int, names: str) -> Units:
    return [{"role": "tool", "tool_call_id": f"t{number}{name}", "content": text(number, name)} for name in names]


def block_calls(number: int, names: str, *before: dict[str, Any]) -> dict[str, Any]:
    uses = [
        {"type": "tool_use", "id": f"t{number}{n}", "name": "read", "input": {"path": f"{number}{n}.py"}} for n in names
    ]
    return {"role": "assistant", "content": [*before, *uses]}


def block_results(number: int, names: str, *after: Any, form: Callable[[str], Any] = str) -> Units:
    results = [
        {"type": "tool_result", "tool_use_id": f"t{number}{name}", "content": form(text(number, name))}
        for name in names
    ]
    return [{"role": "user", "content": [*results, *after]}]


def items(number: int, names: str) -> Units:
    calls = [{"type": "function_call", "call_id": f"t{number}{n}", "name": "read", "arguments": "{}"} for n in names]
    outputs = [
        {"type": "function_call_output", "call_id": f"t{number}{name}", "output": text(number, name)} for name in names
    ]
    return [*calls, *outputs]


def text(number: int, name: str) -> str:
    chosen = Random(f"{number}{name}")
    return f"RESULT-{number}{name} " + " ".join(f"w{chosen.randrange(9999)}" for _ in range(250))


def listed(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


def pictured(text: str) -> list[Any]:
    return [*listed(text), {"type": "image", "source": PICTURE}]


SAID = {"type": "text", "text": "I read on."}
THOUGHT = {"type": "thinking", "thinking": "Hm, what is next?", "signature": "c2ln" * 20}
NOTE = {"type": "text", "text": "Go on, please."}

CASES: dict[str, tuple[str, Callable[[int], Units]]] = {
    "blocks": ("chat", lambda n: [block_calls(n, "a"), *block_results(n, "a", form=listed)]),
    "strings": ("chat", lambda n: [block_calls(n, "a"), *block_results(n, "a")]),
    "parallel": ("chat", lambda n: [block_calls(n, "abc", SAID), *block_results(n, "abc", form=listed)]),
    "a text after": ("chat", lambda n: [block_calls(n, "ab"), *block_results(n, "ab", NOTE)]),
    "results apart": ("chat", lambda n: [block_calls(n, "ab"), *block_results(n, "a"), *block_results(n, "b")]),
    "images": ("chat", lambda n: [block_calls(n, "a"), *block_results(n, "a", form=pictured)]),
    "thinking": ("chat", lambda n: [block_calls(n, "a", THOUGHT, SAID), *block_results(n, "a", form=listed)]),
    "fields, then blocks": ("chat", lambda n: [field_calls(n, "ab"), *block_results(n, "ab")]),
    "blocks, then fields": ("chat", lambda n: [block_calls(n, "ab"), *field_results(n, "ab")]),
    "items in chat": ("chat", lambda n: items(n, "ab")),
    "fields in messages": ("messages", lambda n: [field_calls(n, "ab"), *field_results(n, "ab")]),
    "fields in responses": ("responses", lambda n: [field_calls(n, "ab"), *field_results(n, "ab")]),
    "blocks in responses": ("responses", lambda n: [block_calls(n, "ab"), *block_results(n, "ab")]),
}


def unpaired(units: Units) -> list[str]:
    """Return the ids of results before which no call is open, and of calls that later units don't answer at once."""
    open_: list[str] = []
    wrong: list[str] = []
    for unit in units:
        blocks = [part for part in unit.get("content") or [] if isinstance(part, dict)]
        answered = [part["tool_use_id"] for part in blocks if part.get("type") == "tool_result"]
        answered += [unit["tool_call_id"]] if "tool_call_id" in unit else []
        answered += [unit["call_id"]] if unit.get("type") == "function_call_output" else []
        for id in answered:
            (open_.remove if id in open_ else wrong.append)(id)
        if not answered and unit.get("type") != "function_call":
            wrong += open_
            open_ = []
        open_ += [part["id"] for part in blocks if part.get("type") == "tool_use"]
        open_ += [call["id"] for call in unit.get("tool_calls") or []]
        open_ += [unit["call_id"]] if unit.get("type") == "function_call" else []
    return wrong


@pytest.mark.parametrize("case", combined(2, CASES))
def test_calls_stay_with_their_results(tmp_path: Path, case: str) -> None:
    api, turn = CASES[case]
    upstream, verdicts = Upstream(), []
    units: Units = [{"role": "user", "content": f"Fix the pumps. {RULE}"}]
    with sending(api, tmp_path, upstream, evict_results=None) as send:
        for number in range(TURNS if "parallel" not in case else TURNS // 2):
            units += turn(number)
            verdicts.append(send(units).headers["x-compaction"])
            body = upstream.bodies[-1]
            sent = body.get("messages") or body["input"]
            assert unpaired(sent) == [], number
            assert f"RESULT-{number}a" in json.dumps(sent)
            assert RULE in json.dumps(sent)
    assert "compacted" in verdicts
    assert upstream.summaries
    assert "RESULT-0a" in upstream.summaries[0]


def test_a_picture_in_a_result_counts_as_a_picture(tmp_path: Path) -> None:
    api, turn = CASES["images"]
    with sending(api, tmp_path, Upstream()) as send:
        response = send([{"role": "user", "content": "Look."}, *turn(1)])
    assert int(response.headers["x-compaction-tokens-before"]) < WINDOW // 4
    assert response.headers["x-compaction"] != "compacted"


def test_a_lost_result_is_noted_in_the_form_of_its_call(tmp_path: Path) -> None:
    api, turn = CASES["parallel"]
    units: Units = [{"role": "user", "content": "Fix the pumps."}]
    for number in range(TURNS // 2):
        units += turn(number)
    lost = TURNS // 2 - 2
    units[2 * lost + 2]["content"].pop()
    with sending(api, tmp_path, upstream := Upstream()) as send:
        send(units)
    sent = upstream.bodies[-1]["messages"]
    assert unpaired(sent) == []
    assert "No result of this call was recorded." in json.dumps(sent[-3])


def test_results_as_blocks_are_shortened(tmp_path: Path) -> None:
    turn = CASES["parallel"][1]
    units: Units = [{"role": "user", "content": "Fix the pumps."}]
    for number in range(4):
        units += turn(number)
    shortened = {
        "trigger": {"tokens": 100_000},
        "evict_results": {"trigger": {"tokens": 1_000}, "max_tokens": 100, "keep": {"tokens": 1_000}},
    }
    with sending("chat", tmp_path, upstream := Upstream(), **shortened) as send:
        send(units)
    sent = upstream.bodies[-1]["messages"]
    assert unpaired(sent) == []
    assert [len(one["content"]) for one in sent[1:]] == [len(one["content"]) for one in units[1:]]
    assert len(json.dumps(sent[2])) < len(json.dumps(units[2])) // 2
    assert sent[-1] == units[-1]
