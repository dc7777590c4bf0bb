"""The strict stand-ins accept an agent's session as it is, and reject each damaged form of it."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from proxy.server.loopback import serve
from tests.kit.agent_script import SCHEMA, question
from tests.kit.scripted import client
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses

PLENTY = 1_000_000
MODEL = "some-model"
Items = list[dict[str, Any]]
Damage = Callable[[Items], object]

ASKED = {"role": "user", "content": question(2)}


@pytest.fixture
def responses() -> Iterator[tuple[StrictResponses, openai.OpenAI]]:
    server = StrictResponses(PLENTY)
    with serve(server.app) as url, client(url) as caller:
        yield server, caller


@pytest.fixture
def messages() -> Iterator[tuple[StrictMessages, anthropic.Anthropic]]:
    server = StrictMessages(PLENTY)
    with serving(server) as caller:
        yield server, caller


@contextlib.contextmanager
def serving(server: StrictMessages) -> Iterator[anthropic.Anthropic]:
    with serve(server.app) as url, anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as caller:
        yield caller


def send(caller: openai.OpenAI, items: Any, **options: Any) -> Any:
    return caller.responses.create(model=MODEL, input=items, **options)


def round_of_calls(caller: openai.OpenAI, **options: Any) -> Items:
    """Return a conversation that ends with the output of a call."""
    response = send(caller, [ASKED], **options)
    items = [item.model_dump(exclude_none=True) for item in response.output]
    call = items[-1]
    return [ASKED, *items, {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}]


def without(kind: str) -> Damage:
    return lambda items: items.__delitem__([item.get("type") for item in items].index(kind))


def change(kind: str, **fields: Any) -> Damage:
    return lambda items: next(item for item in items if item.get("type") == kind).update(fields)


def repeat(items: Items) -> None:
    items.insert(3, dict(items[2]))


def only_reasoning(items: Items) -> None:
    del items[2:]
    items.append({"role": "user", "content": "Part 3 please"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("reasoning"), "was provided without its required 'reasoning' item: 'rs_"),
        (only_reasoning, "of type 'reasoning' was provided without its required following item"),
        (without("message"), "of type 'reasoning' was provided without its required following item"),
        (without("function_call"), "No tool call found for function call output with call_id call_2_0_0"),
        (without("function_call_output"), "No tool output found for function call call_2_0_0"),
        (change("function_call", id="call_2"), "Expected an ID that begins with 'fc'"),
        (change("reasoning", summary=None), "Missing required parameter: 'input[1].summary'"),
        (change("reasoning", id="rs_unknown"), "could not be verified"),
        (repeat, "Duplicate item found with id"),
        (lambda items: items.insert(1, {"type": "item_reference", "id": "msg_x"}), "Item with id 'msg_x' not found"),
    ],
)
def test_responses_rejects(damage: Damage, message: str, responses: tuple[StrictResponses, openai.OpenAI]) -> None:
    server, caller = responses
    items = round_of_calls(caller)
    send(caller, items)
    damaged = copy.deepcopy(items)
    damage(damaged)
    with pytest.raises(openai.APIStatusError, match=message.replace("[", r"\[")):
        send(caller, damaged)
    assert len(server.faults) == 1


def ask(caller: anthropic.Anthropic, conversation: Items, **options: Any) -> Any:
    tools = [{"name": "read", "description": "A tool.", "input_schema": SCHEMA}]
    options = {"thinking": {"type": "adaptive"}, "tools": tools, "system": "Be brief.", **options}
    return caller.messages.create(model=MODEL, max_tokens=1_100, messages=conversation, **options)  # type: ignore[arg-type]


def results(message: Any) -> dict[str, Any]:
    calls = [block.id for block in message.content if block.type == "tool_use"]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call, "content": "7"} for call in calls],
    }


def two_rounds(caller: anthropic.Anthropic, **options: Any) -> Items:
    """Return a conversation with two rounds of tools."""
    conversation: Items = [dict(ASKED)]
    for _ in range(2):
        message = ask(caller, conversation, **options)
        content = [block.model_dump(exclude_none=True) for block in message.content]
        conversation += [{"role": "assistant", "content": content}, results(message)]
    return conversation


def drop_messages(first: int, last: int) -> Damage:
    return lambda conversation: conversation.__delitem__(slice(first, last))


def late_result(conversation: Items) -> None:
    conversation[2]["content"].insert(0, {"type": "text", "text": "Here."})


def edit_thinking(message: int) -> Damage:
    return lambda conversation: conversation[message]["content"][0].update(thinking="Something else")


def cut_result(conversation: Items) -> None:
    conversation[2]["content"][0]["content"] = "6"


def too_many_breakpoints(conversation: Items) -> None:
    blocks = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}} for _ in range(5)]
    conversation[-1]["content"] += blocks


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            cut_result,
            "messages.3.content.0: Invalid `signature` in `thinking` block. The block is bound to a different",
        ),
        (drop_messages(1, 3), "The block is bound to a different conversation"),
        (edit_thinking(1), "messages.1.content.0: Invalid `signature`"),
        (edit_thinking(3), "blocks in the latest assistant message cannot be modified"),
        (drop_messages(0, 1), 'first message must use the "user" role'),
        (drop_messages(2, 3), "`tool_use` ids were found without `tool_result` blocks immediately after: call_2_0_0"),
        (late_result, "`tool_use` ids were found without `tool_result` blocks immediately after"),
        (drop_messages(1, 2), "unexpected `tool_use_id` found in `tool_result` blocks: call_2_0_0"),
        (drop_messages(4, 5), "The conversation must end with a user message"),
        (too_many_breakpoints, "A maximum of 4 blocks with cache_control may be provided. Found 5"),
        (lambda conversation: conversation[2].update(content=[]), "must have non-empty content"),
    ],
)
def test_messages_rejects(damage: Damage, message: str, messages: tuple[StrictMessages, anthropic.Anthropic]) -> None:
    server, caller = messages
    conversation = two_rounds(caller)
    ask(caller, conversation)
    damaged = copy.deepcopy(conversation)
    damage(damaged)
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(caller, damaged)
    assert message in str(caught.value)
    assert len(server.faults) == 1
