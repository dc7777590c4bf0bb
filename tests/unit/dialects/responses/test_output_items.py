"""The output items are found in answers of any form, in chunks of any size."""

import json
from typing import Any

import pytest

from proxy.dialects.responses import answers as output_items
from proxy.dialects.responses.answers import LARGEST, TRIED, OutputItemReader
from tests.kit.response_items import item_events
from tests.unit.dialects.responses.test_answers import ANNOUNCED, MESSAGE, response, stream

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "ls", "arguments": '{"a": "é"}'}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}
OUTPUT = [REASONING, MESSAGE, CALL]
DONE = [event for number, item in enumerate(OUTPUT) for event in item_events(number, item)]
ENDED = ("response.completed", {"response": response(output=OUTPUT)})
ONLY_ENDED = stream(*ANNOUNCED, ENDED)
MISLEADING = ("response.output_item.added", {"item": {**MESSAGE, "id": "no", "x": "response.output_item.done"}})


def found(body: bytes, size: int) -> dict[str, Any]:
    items: list[tuple[str, bytes]] = []
    reader = OutputItemReader(lambda id, item: items.append((id, item)))
    for start in range(0, len(body), size):
        reader.add(body[start : start + size])
    assert len(items) == len({id for id, _ in items}), "each item once"
    return {id: json.loads(item) for id, item in items}


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize(
    "body",
    [
        stream(*ANNOUNCED, *DONE, ENDED),
        stream(*ANNOUNCED, *DONE),
        ONLY_ENDED,
        b": keep-alive\n\n" + stream(*ANNOUNCED, MISLEADING, *DONE, ENDED).replace(b"\n", b"\r\n"),
        json.dumps(response(output=OUTPUT)).encode(),
        b"\n " + json.dumps(response(output=OUTPUT), indent=2).encode() + b"\n",
    ],
)
def test_every_item_is_found_once(body: bytes, size: int) -> None:
    assert found(body, size) == {item["id"]: item for item in OUTPUT}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"}",
        b"[]",
        b'{"output": 5}',
        b'{"output": [5, null, {}, {"id": 5}, {"id": ""}]}',
        b'{"error": {"message": "x"}}',
        b"data: {}\n\ndata: response.output_item.done\n\n",
        b'data: {"type":"response.output_item.done","item":null}\n\n',
        b"\xff\xfe",
        json.dumps(response(output=OUTPUT)).encode()[:-2],
    ],
)
def test_other_answers_have_none(body: bytes) -> None:
    assert found(body, 50) == {}


def test_an_answer_of_any_size_takes_bounded_memory() -> None:
    huge = json.dumps(response(output=[{**MESSAGE, "filler": "x" * 2 * LARGEST}])).encode()
    assert found(huge, 100_000) == {}
    assert found(stream(*item_events(0, {**MESSAGE, "filler": "x" * 2 * LARGEST})), 100_000) == {}


def test_an_answer_whose_chunks_all_look_like_its_end_is_decoded_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decoder = output_items._answer

    class Counting:
        def decode(self, body: bytearray) -> Any:
            decoded.append(len(body))
            return decoder.decode(body)

    monkeypatch.setattr(output_items, "_answer", Counting())
    text = ("x" * 999 + "}") * (LARGEST // 1_000 - 10)
    body = json.dumps(response(output=[{**MESSAGE, "content": "small"}], filler=text)).encode()
    first = body.index(b"}", body.index(b"xxx")) + 1
    items: list[str] = []
    reader = OutputItemReader(lambda id, _: items.append(id))
    for chunk in (body[:first], *(body[start : start + 1_000] for start in range(first, len(body), 1_000))):
        reader.add(chunk)
    reader.finish()
    reader.finish()
    assert items == ["msg_1"]
    assert sum(decoded) <= TRIED + len(body)
    assert len(decoded) > 10, "each attempt that the limit allows is made"
