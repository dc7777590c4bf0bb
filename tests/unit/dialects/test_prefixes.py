"""Test that a request with a known beginning is read like one that is parsed as a whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from proxy.dialects.apis import DIALECTS
from proxy.dialects.prefixes import CANDIDATES, LEAST_BYTES, SEEN, Prefixes
from proxy.dialects.request import MAX_VALUES, Request
from proxy.errors import BadBody
from tests.kit.growing_bodies import APIS, LONG, NAMES, body, rounds, sessions, text_message

EXAMPLES = settings().max_examples


def read(api: str, raw: bytes, memory: Prefixes | None = None, tenant: str = "a") -> Request:
    return asyncio.run(DIALECTS[api].request.read(raw, memory, tenant))


def fields_of(request: Request) -> dict[str, Any]:
    """Return everything that others read of a request."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    for name in ("begun", "grown", "spans"):
        del fields[name]
    units = list(map(bytes, request.units))
    splits = getattr(request, "splits", {})
    fields["splits"] = sorted((bytes(one.message), tuple(map(bytes, one.units))) for one in splits.values())
    fields["prefix"] = list(map(bytes, getattr(request, "prefix", ())))
    fields |= {"units": units, "size": request.size, "compacted": request.compacted, "place": request.place()}
    fields["media"] = request.has_remote_media()
    fields["rewritten"] = [attempt(request, start) for start in (0, 1, len(units) // 2)]
    return fields


def attempt(request: Request, start: int) -> bytes | str:
    try:
        return request.rewritten(units=request.units[start:], model="other", max_output=3)
    except BadBody as error:
        return str(error)


def check(api: str, raw: bytes, memory: Prefixes) -> Request:
    request = read(api, raw, memory)
    assert fields_of(request) == fields_of(read(api, raw))
    if request.begun is None:
        learn(api, raw, memory)
    return request


def learn(api: str, raw: bytes, memory: Prefixes, tenant: str = "a") -> None:
    """Read a body twice. A prefix is stored when a beginning comes for the second time."""
    for _ in range(2):
        read(api, raw, memory, tenant)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("gap", [",", ", ", ",\n  "])
def test_only_the_rest_of_a_turn_is_parsed(api: str, gap: str) -> None:
    memory = Prefixes()
    messages = [text_message(api, "user", LONG)]
    known = []
    for number in range(12):
        messages += rounds(api, number)
        request = check(api, body(api, messages, gap=gap), memory)
        known.append(0 if request.begun is None else request.begun.units / len(request.units))
    assert known[0] == 0
    assert min(known[1:]) > 0, known
    assert known[-1] >= 0.8, known


@pytest.mark.parametrize("api", APIS)
def test_fields_may_come_before_and_after_the_messages(api: str) -> None:
    tools = f'"tools":[{{"type":"function","name":"{"t" * 2_000}"}}]'
    for before, after in (('"model":"m",' + tools, ""), ('"model":"m"', "," + tools), (tools, ',"model":"m"')):
        memory = Prefixes()
        messages = [text_message(api, "user", LONG), *rounds(api, 0), *rounds(api, 1)]
        check(api, body(api, messages, before=before, after=after), memory)
        request = check(api, body(api, messages + rounds(api, 2), before=before, after=after), memory)
        assert request.begun is not None
        assert request.overhead_fields().get("tools")


@pytest.mark.parametrize("api", APIS)
def test_a_unit_is_the_same_whatever_was_read_before(api: str) -> None:
    memory = Prefixes()
    messages = [text_message(api, "user", LONG), *(one for number in range(6) for one in rounds(api, number))]
    check(api, body(api, messages), memory)
    raw = body(api, [*messages, *rounds(api, 6)])
    units = list(map(bytes, read(api, raw).units))
    request = read(api, raw, memory)
    assert request.begun is not None
    for place in (0, -1, 3, len(units) - 4, -2):
        assert bytes(request.units[place]) == units[place]
    assert request.units[2] is request.units[2] is list(request.units)[2]
    assert list(map(bytes, request.units[1:4])) == units[1:4]
    assert list(map(bytes, reversed(request.units))) == units[::-1]
    with pytest.raises(IndexError):
        request.units[len(units)]
    whole = read(api, raw)
    assert request.rewritten(units=request.units[2:]) == whole.rewritten(units=whole.units[2:])


@pytest.mark.parametrize("api", APIS)
def test_duplicate_lists_are_told_apart(api: str) -> None:
    memory, name = Prefixes(), NAMES[api]
    messages = [text_message(api, "user", LONG), *rounds(api, 0), *rounds(api, 1)]
    check(api, body(api, messages), memory)
    other = json.dumps([text_message(api, "user", "other")])
    for after in (f',"{name}":{other}', f',"{name}":[]', f',"{name}":"text"', f',"{name}":null', ',"model":"b"'):
        check(api, body(api, messages + rounds(api, 2), after=after), memory)
    # The list that counts comes second, and the first one has the same messages.
    listed = json.dumps(messages)
    for before in (f'"model":"m","{name}":{listed}', f'"x":{{"{name}":{listed}}}', f'"x":{json.dumps(listed)}'):
        check(api, body(api, messages, before=before), memory)
        check(api, body(api, messages + rounds(api, 2), before=before), memory)


@pytest.mark.parametrize("api", APIS)
def test_broken_bodies_are_read_as_before(api: str) -> None:
    memory = Prefixes()
    messages = [text_message(api, "user", LONG), *rounds(api, 0), *rounds(api, 1), *rounds(api, 2)]
    check(api, body(api, messages), memory)
    whole = body(api, [*messages, *rounds(api, 3)])
    end = whole.rindex(b"]")
    for raw in (whole[:-1], whole[:end], whole[: end - 5], whole + b"x", whole[:end] + b"," + whole[end:]):
        check(api, raw, memory)
    for text in (r"\ud800", r"\"]", "\xff"):
        check(api, whole.replace(b'"r3"', f'"{text}"'.encode("latin-1")), memory)


@pytest.mark.parametrize("api", APIS)
def test_a_number_after_a_known_message_is_not_cut(api: str) -> None:
    memory = Prefixes()
    messages = [text_message(api, "user", LONG), *rounds(api, 0), 1, 1, 1, 1, 1, 1, 1, 1]
    raw = body(api, messages)
    check(api, raw, memory)
    check(api, raw.replace(b"1,1,1,1]", b"1,1,1,12,1]"), memory)
    check(api, raw.replace(b"1,1,1,1]", b"1,1,1,1e9,1]"), memory)


@pytest.mark.parametrize("api", APIS)
def test_one_other_byte_ends_what_is_known(api: str) -> None:
    memory = Prefixes()
    messages = [text_message(api, "user", LONG), *(one for number in range(8) for one in rounds(api, number))]
    raw = body(api, messages)
    check(api, raw, memory)
    for place in range(0, len(raw), 1 + len(raw) // 97):
        request = check(api, raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :], memory)
        assert request.begun is None or request.begun.end <= place


@pytest.mark.parametrize("api", APIS)
def test_tenants_and_apis_share_nothing(api: str) -> None:
    memory = Prefixes()
    messages = [text_message(api, "user", LONG), *rounds(api, 0), *rounds(api, 1)]
    raw = body(api, [*messages, *rounds(api, 2)])
    learn(api, raw, memory, "a")
    assert read(api, raw, memory, "b").begun is None
    assert all(read(other, raw, memory, "a").begun is None for other in APIS if other != api)
    assert read(api, raw, memory, "a").begun is not None
    assert memory.forget(lambda tenant: tenant == "a") == {"a"}
    assert read(api, raw, memory, "a").begun is None


@pytest.mark.parametrize("api", APIS)
def test_a_new_beginning_is_not_stored_before_it_comes_again(api: str) -> None:
    memory = Prefixes()
    for number in range(SEEN + 100):
        rest = [*rounds(api, 0), *rounds(api, 1)] if number < 20 else rounds(api, 0)
        read(api, body(api, [text_message(api, "user", f"{number}{LONG}"), *rest]), memory)
    assert memory.weight == 0
    assert len(memory._seen["a"]) == SEEN
    messages = [text_message(api, "user", LONG), *rounds(api, 0), *rounds(api, 1)]
    read(api, body(api, messages), memory)
    assert memory.weight == 0
    read(api, body(api, messages + rounds(api, 2)), memory)
    assert read(api, body(api, messages + rounds(api, 2) + rounds(api, 3)), memory).begun is not None


def test_the_tenant_with_the_most_loses_its_oldest() -> None:
    memory = Prefixes(40_000)

    def keep(tenant: str, name: str) -> bytes:
        raw = body("chat", [text_message("chat", "user", name + LONG), *rounds("chat", 0), *rounds("chat", 1)])
        learn("chat", raw, memory, tenant)
        return raw

    quiet = keep("quiet", "mine")
    flood = [keep("busy", str(number)) for number in range(50)]
    assert memory.weight <= 40_000
    assert read("chat", quiet, memory, "quiet").begun is not None
    assert read("chat", flood[-1], memory, "busy").begun is not None
    assert read("chat", flood[0], memory, "busy").begun is None


def test_many_conversations_may_begin_alike() -> None:
    memory = Prefixes()
    head = [text_message("chat", "system", LONG), text_message("chat", "user", LONG)]
    for number in range(CANDIDATES):
        messages = [*head, text_message("chat", "user", str(number)), *rounds("chat", 0), *rounds("chat", 1)]
        learn("chat", body("chat", messages), memory)
    request = check("chat", body("chat", [*messages, *rounds("chat", 2)]), memory)
    assert request.begun is not None
    assert request.begun.messages >= len(messages) - 1
    assert max(len(node.marks) for node in memory._nodes.values()) <= CANDIDATES


def test_nothing_is_left_of_dropped_prefixes() -> None:
    memory = Prefixes(1)
    for number in range(5):
        learn("chat", body("chat", [text_message("chat", "user", f"{number}{LONG}"), *rounds("chat", 0)]), memory)
    assert not memory._nodes
    assert not memory._tenants
    assert memory.weight == 0


def test_values_are_bounded_beyond_the_known_ones() -> None:
    memory = Prefixes()
    many = {"role": "user", "content": [1] * (MAX_VALUES - 10_000)}
    messages = [many, *rounds("chat", 0), *rounds("chat", 1)]
    check("chat", body("chat", messages), memory)
    request = check("chat", body("chat", [*messages, *rounds("chat", 2)]), memory)
    assert request.begun is not None
    over = body("chat", [*messages, {"role": "user", "content": [1] * 20_000}])
    for known in (None, memory):
        with pytest.raises(BadBody):
            read("chat", over, known)


def test_media_are_found_in_known_and_in_new_messages() -> None:
    memory = Prefixes()
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}
    plain = [text_message("chat", "user", LONG), *rounds("chat", 0), *rounds("chat", 1)]
    for messages, found in ((plain, False), ([*plain, image], True), ([*plain, image, *rounds("chat", 2)], True)):
        assert check("chat", body("chat", messages), memory).has_remote_media() is found
    assert check("chat", body("chat", [*plain, *rounds("chat", 3)]), memory).has_remote_media() is False


@given(sessions())
@settings(max_examples=EXAMPLES * 4)
def test_every_field_is_that_of_a_whole_parse(session: tuple[str, list[bytes]]) -> None:
    api, bodies = session
    memory = Prefixes()
    for raw in bodies:
        check(api, raw, memory)


def test_small_bodies_are_not_remembered() -> None:
    memory = Prefixes()
    raw = body("chat", [text_message("chat", "user", "x" * (LEAST_BYTES - 200)), *rounds("chat", 0)])
    assert len(raw) < LEAST_BYTES + 400
    read("chat", msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "a"}]}), memory)
    assert memory.weight == 0
