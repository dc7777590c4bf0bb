"""Compare the table of parts with the types of the official SDKs."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types.beta import BetaContentBlockParam
from anthropic.types.beta.beta_tool_result_block_param import Content as ResultContent
from openai.types.beta.beta_response_input_item_param import BetaResponseInputItemParam
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionMessageToolCallUnionParam
from openai.types.responses import ResponseInputContentParam, ResponseInputItemParam
from openai.types.responses.response_output_message_param import Content as AnswerContent

from proxy.dialects.parts import CHAT, MESSAGES, RESPONSES, Table
from proxy.dialects.walk import rewritten, row_of

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
