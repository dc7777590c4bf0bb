"""A unit keeps its identity in every form, and units that say different things have different ones."""

import copy
import json
from typing import Any

import pytest

from proxy.dialects.apis import DIALECTS
from proxy.dialects.identity import meaning
from proxy.dialects.parts import CHAT, MESSAGES, RESPONSES, Table
from proxy.limits.profiles import Profile
from tests.kit.other_forms import CHANGES, in_api, no_reasoning, objects, turn
from tests.kit.three_apis import APIS

TABLES = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}


def said(api: str, units: list[Any]) -> list[Any]:
    return [made for unit in units if (made := meaning(unit, TABLES[api])) not in (None, {})]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("api", APIS)
def test_each_form_says_the_same(api: str, change: Any) -> None:
    messages = [*turn(1), *turn(2)]
    forms = []
    for request in range(6):
        units = in_api(api, copy.deepcopy(messages))
        change(api, units, request)
        forms.append(said(api, units))
    assert all(form == forms[0] for form in forms)
    if change is no_reasoning:
        assert forms[0] == said(api, in_api(api, messages))


@pytest.mark.parametrize("api", APIS)
def test_every_text_name_and_argument_counts(api: str) -> None:
    units = in_api(api, turn(1))
    whole = said(api, units)
    changed = 0
    for place, one in enumerate(objects(units)):
        for name in ("text", "content", "output", "name", "role", "url", "image_url", "arguments", "input"):
            if name not in one or name == "role" == one.get("type"):
                continue
            other = copy.deepcopy(units)
            target = list(objects(other))[place]
            value = target[name]
            if name == "arguments":
                target[name] = json.dumps({**json.loads(value), "line": 7})
            elif name == "input":
                target[name] = {**value, "id": "x"}
            elif isinstance(value, str):
                target[name] = f"other{value}"
            else:
                continue
            changed += 1
            assert said(api, other) != whole, (place, name)
    assert changed > 8


@pytest.mark.parametrize("api", APIS)
def test_other_values_of_arguments_and_opaque_parts_count(api: str) -> None:
    table: Table = TABLES[api]
    parts: list[list[Any]] = [
        [{"type": "weather", "city": "Rome"}, {"type": "weather", "city": "Oslo"}],
        [{"type": "weather", "text": "x", "city": "Rome"}, {"type": "weather", "text": "x", "city": "Oslo"}],
        [
            {"role": "user", "images": ["data:image/png;base64,AA"]},
            {"role": "user", "images": ["data:image/png;base64,BB" * 9]},
        ],
        [{"role": "user", "notes": "Go left now."}, {"role": "user", "notes": "Go right now."}],
        [{"role": "user", "content": "see https://h/a?id=1"}, {"role": "user", "content": "see https://h/a?id=2"}],
        [{"role": "user", "content": "a"}, {"role": "developer", "content": "a"}],
        [{"type": "item_reference", "id": "msg_1"}, {"type": "item_reference", "id": "msg_2"}],
    ]
    assert len({json.dumps(meaning(one, table), sort_keys=True) for pair in parts for one in pair}) == 2 * len(
        parts
    ) - (0 if api == "responses" else 1)


@pytest.mark.parametrize("api", APIS)
def test_a_units_digest_is_that_of_what_it_says(api: str) -> None:
    format = DIALECTS[api].counters(Profile(model="m", tokenizer="o200k_base")).format
    one = {"type": "message", "id": "m1", "role": "user", "content": "Hi", "status": "completed"}
    other = {"role": "user", "content": [{"type": "input_text" if api == "responses" else "text", "text": "Hi "}]}
    assert format.read(json.dumps(one).encode()).digest == format.read(json.dumps(other).encode()).digest


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [None], {"type": 5}, {"role": 5, "content": {"a": [1]}}])
@pytest.mark.parametrize("api", APIS)
def test_any_value_is_accepted(api: str, value: Any) -> None:
    meaning(value, TABLES[api])
