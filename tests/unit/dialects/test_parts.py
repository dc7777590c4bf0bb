"""Compare the table of parts with the types of the official SDKs, and read and rewrite bodies with each type."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types.beta import BetaContentBlockParam
from anthropic.types.beta.beta_tool_result_block_param import Content as ResultContent
from openai.types.beta.beta_response_input_item_param import BetaResponseInputItemParam
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageToolCallUnionParam
from openai.types.responses import ResponseInputContentParam, ResponseInputItemParam
from openai.types.responses.response_output_message_param import Content as AnswerContent

from proxy.dialects.apis import DIALECTS
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.messages.request import MessagesRequest
from proxy.dialects.parts import CHAT, MESSAGES, RESPONSES, Table
from proxy.dialects.request import Request
from proxy.dialects.responses.request import ResponsesRequest
from proxy.dialects.walk import rewritten, row_of
from proxy.limits.profiles import Profile
from tests.kit.odd_bodies import with_stream
from tests.kit.varied_bodies import bodies

UNIONS: list[tuple[Table, Any]] = [
    (CHAT, ChatCompletionContentPartParam),
    (CHAT, ChatCompletionMessageToolCallUnionParam),
    (MESSAGES, BetaContentBlockParam),
    (MESSAGES, ResultContent),
    (RESPONSES, ResponseInputItemParam),
    (RESPONSES, BetaResponseInputItemParam),
    (RESPONSES, ResponseInputContentParam),
    (RESPONSES, AnswerContent),
]


def types_in(union: Any) -> Iterator[str]:
    """Yield the values of ``type`` of the members of a union."""
    if get_origin(union) in (Union, Annotated):
        for member in get_args(union):
            yield from types_in(member)
    elif hasattr(union, "__total__"):  # a member's model of answers has no parameters of its own
        yield from literals(get_type_hints(union).get("type"))


def literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    for inner in get_args(hint) if get_origin(hint) is not Literal else ():
        yield from literals(inner)


@pytest.mark.parametrize(("table", "union"), UNIONS)
def test_each_type_of_the_sdks_has_a_row(table: Table, union: Any) -> None:
    found = set(types_in(union))
    assert found
    assert found - set(table) == set()


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, {"type": 5}, {"type": "document", "source": 5}, {"text": 5}])
@pytest.mark.parametrize("table", [CHAT, MESSAGES, RESPONSES])
def test_any_value_is_accepted(table: Table, value: Any) -> None:
    assert rewritten(value, table, str.upper, lambda part: part) is value
    assert isinstance(row_of(value, table).cuts, tuple)


PARSE: dict[str, Any] = {
    "chat": ChatRequest.parse,
    "messages": MessagesRequest.parse,
    "responses": ResponsesRequest.parse,
}


@pytest.mark.parametrize("api", PARSE)
def test_bodies_keep_their_bytes_and_each_unit_can_be_read_and_changed(api: str) -> None:
    format = DIALECTS[api].counters(Profile("gpt-5")).format
    for name, text in bodies(api):
        raw = with_stream(text, None)
        body: Request = PARSE[api](raw)
        assert body.rewritten() is raw, name
        again = body.rewritten(units=body.units)
        assert json.loads(again) == json.loads(raw), name
        assert list(json.loads(again)) == list(json.loads(raw)), "fields keep their places"
        assert [bytes(unit) for unit in PARSE[api](raw).units] == [bytes(unit) for unit in body.units], name
        if body.units:
            changed = json.loads(body.rewritten(units=body.units, model="another"))
            assert changed == {**json.loads(raw), "model": "another"}, name
            body.rewritten(units=body.units[1:])
        for unit in body.units:
            if api == "responses":
                assert bytes(unit).removeprefix(b"[").removesuffix(b"]").split(b"},")[0] in again, "items keep bytes"
            facts = format.read(unit)
            assert facts == format.read(bytes(unit)), name
            assert facts.tokens == format.tokens(unit), name
            format.text(unit), format.arguments(unit), format.user_text(unit), format.replaceable_text(unit)
            format.without_reasoning(unit), format.foreign_summary(unit), format.without_media(unit)
            format.with_text(unit, "x"), format.frame_tokens(unit, facts), format.with_labels(unit, str)
            assert format.with_arguments(unit, lambda name, arguments: None) is unit
