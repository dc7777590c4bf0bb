"""Read and rewrite the items of a unit, and those that references stand for."""

import json
from typing import Any

import pytest

from proxy.compaction.turn import Turn
from proxy.dialects.repair import NO_RESULT
from proxy.dialects.responses.counting import ResponsesCounter
from proxy.dialects.responses.request import parse
from proxy.limits.profiles import Profile
from tests.unit.dialects.responses.test_request import CALL, MESSAGE, OUTPUT, PARTS, REASONING, USER

COUNTER = ResponsesCounter(Profile("gpt-5"))
FORMAT = COUNTER.format
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "news"}}


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("other", [SEARCH, {"type": "item_reference", "id": "msg_1"}])
def test_items_that_need_their_ids_keep_their_reasoning(other: Any) -> None:
    unit = raw([REASONING, other, MESSAGE])
    assert FORMAT.without_reasoning(unit) is unit


def test_reasoning_is_bound_until_the_open_round() -> None:
    assert FORMAT.binds_reasoning == "until_open_round"


def test_text_has_labels_and_no_reasoning() -> None:
    thought = {**REASONING, "summary": [{"type": "summary_text", "text": "secret"}]}
    unit = raw([thought, SEARCH, {"type": "item_reference", "id": "msg_9"}, MESSAGE, CALL])
    assert FORMAT.text(unit) == "[web_search_call · query: news]\n[an answer that the proxy has not seen]\nok"
    assert FORMAT.arguments(unit) == [("ls", "{}")]
    assert FORMAT.text(raw(PARTS)) == "see\n[image]\n[file]\n[input_new]"


def test_arguments_are_replaced_in_one_call() -> None:
    other = {**CALL, "name": "write"}
    unit = raw([REASONING, CALL, other])
    rewritten = FORMAT.with_arguments(unit, lambda name, _: '{"cut":1}' if name == "write" else None)
    assert json.loads(rewritten) == [REASONING, CALL, {**other, "arguments": '{"cut":1}'}]
    assert raw(CALL) in rewritten


def repaired(items: list[Any]) -> list[Any]:
    body = parse(raw({"model": "m", "input": items}))
    turns = [Turn(unit, FORMAT.read(unit)) for unit in body.units]
    assert FORMAT.needs_repair([turn.facts for turn in turns])
    fixed = FORMAT.repaired(turns)
    assert FORMAT.repaired(fixed) == fixed
    found: list[Any] = json.loads(body.rewritten(units=[turn.raw for turn in fixed]))["input"]
    return found


def test_a_missing_output_is_inserted() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"}
    assert repaired([USER, REASONING, CALL, custom, USER]) == [
        USER,
        REASONING,
        CALL,
        custom,
        {"type": "function_call_output", "call_id": "c1", "output": NO_RESULT},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": NO_RESULT},
        USER,
    ]


def test_repeated_ids_are_replaced_in_calls_and_outputs() -> None:
    other = {**OUTPUT, "output": "second"}
    items = repaired([USER, CALL, {**CALL, "id": "fc_2"}, OUTPUT, other, USER])
    ids = [item["call_id"] for item in items if "call_id" in item]
    assert ids[0] == ids[2] == "c1"
    assert ids[1] == ids[3] != "c1"
    assert [item.get("output") for item in items[3:5]] == ["a\nb", "second"]


def reference(id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": id}


ITEMS = {item["id"]: raw(item) for item in (REASONING, MESSAGE, CALL, SEARCH)}
REFERENCES = raw({"model": "gpt-5", "input": [USER, reference("rs_1"), reference("msg_1"), CALL, OUTPUT, USER]})


def test_units_have_the_items_and_the_body_the_references() -> None:
    body = parse(REFERENCES)
    assert (list(body.references), body.hidden) == (["rs_1", "msg_1"], float("inf"))
    before = body.size
    body.resolve(ITEMS, {})
    assert json.loads(body.units[1]) == [REASONING, MESSAGE, CALL]
    assert len(ITEMS["rs_1"] + ITEMS["msg_1"]) == body.hidden == body.size - before
    assert FORMAT.text(body.units[1]) == "ok"
    assert body.rewritten() is body.raw
    assert json.loads(body.rewritten(units=body.units[1:]))["input"] == json.loads(REFERENCES)["input"][1:]
    spaced = b'{"model":"gpt-5","input":[{ "id":"msg_1",  "type":"item_reference" }]}'
    body = parse(spaced)
    body.resolve(ITEMS, {})
    assert body.rewritten(units=body.units) == spaced


def test_a_reference_to_an_output_stays() -> None:
    body = parse(raw({"input": [USER, reference("fco_1"), USER]}))
    body.resolve({"fco_1": raw(OUTPUT)}, {})
    assert json.loads(bytes(body.units[1])) == reference("fco_1")
    assert body.hidden == float("inf")


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def place_of(*items: Any) -> str:
    return parse(raw({"input": items})).place()


def test_a_reference_has_the_place_of_its_answer() -> None:
    history: list[Any] = []
    expected = []
    for turn in range(6):
        history.append(said(f"question {turn}"))
        expected.append((f"msg_{turn}", place_of(*history)))
        history.append(reference(f"msg_{turn}"))
    assert list(parse(raw({"input": history})).places()) == expected
    assert len({place for _, place in expected}) == 6
    # Clients trim old messages, and change their instructions.
    trimmed = [{"role": "developer", "content": "Today is Tuesday."}, *history[4:]]
    assert list(parse(raw({"input": trimmed})).places())[-1] == expected[-1]
