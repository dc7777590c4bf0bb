"""Items take the place of references, and references that of unchanged items."""

import json
from typing import Any

from proxy.dialects.responses.counting import ResponsesCounter
from proxy.dialects.responses.request import parse
from proxy.limits.profiles import Profile
from tests.unit.dialects.responses.test_request import CALL, MESSAGE, OUTPUT, REASONING, USER

COUNTER = ResponsesCounter(Profile("gpt-5"))
FORMAT = COUNTER.format
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "news"}}


def reference(id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": id}


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


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
