"""The strict stand-ins accept their own compactions as they are, and reject each other use of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

from proxy.server.loopback import serve
from tests.kit.agent_script import question
from tests.kit.scripted import client
from tests.kit.signed_blocks import BETA
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses

Items = list[dict[str, Any]]
Damage = Callable[[Items], object]

ASKED = {"role": "user", "content": question(2)}
SYSTEM = "Be careful."


@pytest.fixture
def claude() -> Iterator[tuple[StrictMessages, anthropic.Anthropic]]:
    server = StrictMessages(100_000)
    with serve(server.app) as url, anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as caller:
        yield server, caller


def ask(caller: anthropic.Anthropic, messages: Items, *, beta: str = BETA, **fields: Any) -> Items:
    """Return the blocks of the answer."""
    body: Any = {"system": SYSTEM, "thinking": {"type": "adaptive"}, **fields, "messages": messages}
    answer = caller.messages.with_raw_response.create(
        model="claude-opus-5-5",
        max_tokens=1_000,
        messages=[],
        extra_body=body,
        extra_headers={"anthropic-beta": beta},
    )
    blocks: Items = answer.http_response.json()["content"]
    return blocks


def compacted(caller: anthropic.Anthropic) -> Items:
    """Return a conversation whose first round is compacted. The second one has thinking."""
    rounds: Items = [dict(ASKED)]
    for _ in range(2):
        blocks = ask(caller, rounds)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "7"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        rounds += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    block = ask(caller, rounds[:3], compaction={"type": "summarize", "instructions": "Notes."})
    return [{"role": "assistant", "content": block}, *rounds[3:]]


def change_block(**fields: Any) -> Damage:
    return lambda messages: messages[0]["content"][0].update(fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_block(content="Other notes."), "block was modified"),
        (change_block(signature="c2ln"), "is not valid"),
        (lambda messages: messages.insert(0, ASKED), "must be the first block"),
        (lambda messages: messages.insert(1, messages[0]), "only one"),
        (lambda messages: messages.insert(1, ASKED), "bound to a different conversation"),
        (lambda messages: messages[2].update(content=[*messages[2]["content"], messages[0]["content"][0]]), "only one"),
    ],
)
def test_messages_rejects(damage: Damage, message: str, claude: tuple[StrictMessages, anthropic.Anthropic]) -> None:
    server, caller = claude
    conversation = compacted(caller)
    ask(caller, conversation)
    assert server.faults == []
    damaged = copy.deepcopy(conversation)
    damage(damaged)
    with pytest.raises(anthropic.BadRequestError, match=message):
        ask(caller, damaged)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": "other"}, "doesn't match the tags"),
        ({"system": "Be quick."}, "bound to a different conversation"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "can't run on a request with a signed"),
    ],
)
def test_messages_rejects_a_block_with(
    fields: dict[str, Any], message: str, claude: tuple[StrictMessages, anthropic.Anthropic]
) -> None:
    _, caller = claude
    with pytest.raises(anthropic.BadRequestError, match=message):
        ask(caller, compacted(caller), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": "other"}, "requires anthropic-beta"),
        ({"stop_sequences": ["x"]}, "stop_sequences"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"compaction": {"type": "summarize", "instructions": "x" * 16_385}}, "16384"),
    ],
)
def test_messages_refuses_to_compact_with(
    fields: dict[str, Any], message: str, claude: tuple[StrictMessages, anthropic.Anthropic]
) -> None:
    _, caller = claude
    with pytest.raises(anthropic.BadRequestError, match=message):
        ask(caller, [ASKED], **{"compaction": {"type": "summarize"}, **fields})


def test_messages_does_not_compact_an_open_call(claude: tuple[StrictMessages, anthropic.Anthropic]) -> None:
    _, caller = claude
    messages: Items = [ASKED, {"role": "assistant", "content": ask(caller, [ASKED])}]
    with pytest.raises(anthropic.BadRequestError, match="without `tool_result`"):
        ask(caller, messages, compaction={"type": "summarize"})


def test_responses_takes_a_compaction_only_as_it_came() -> None:
    server = StrictResponses(100_000)
    asked: Any = ASKED
    with serve(server.app) as url, client(url) as caller:
        made = caller.responses.compact(model="gpt-4.1", input=[asked])
        sealed = next(item.encrypted_content for item in made.output if item.type == "compaction")
        item: Any = {"type": "compaction", "encrypted_content": sealed, "id": made.output[-1].id}
        caller.responses.create(model="gpt-4.1", input=[asked, item, asked])
        bare = {key: value for key, value in item.items() if key != "id"}
        for damaged in ([asked, asked, item], [asked, item, bare], [item]):
            with pytest.raises(openai.BadRequestError, match="must be passed unchanged"):
                caller.responses.create(model="gpt-4.1", input=[*damaged, asked])
