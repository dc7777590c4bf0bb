"""Each field of the APIs says whether it goes with a summary call."""

from typing import Any

import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_compact_params as compact
from openai.types.responses import response_create_params as responses

from proxy.dialects.conditions import FIELDS, goes
from proxy.dialects.responses.state import compact_request


@pytest.mark.parametrize(
    "params",
    [
        chat.CompletionCreateParamsStreaming,
        responses.ResponseCreateParamsStreaming,
        messages.MessageCreateParamsStreaming,
        beta.MessageCreateParamsStreaming,
    ],
    ids=["chat", "responses", "messages", "beta"],
)
def test_the_sdks_have_no_other_fields(params: Any) -> None:
    assert (params.__required_keys__ | params.__optional_keys__) - FIELDS.keys() == set()


def test_a_compaction_by_openai_gets_the_conditions_that_it_takes() -> None:
    fields = responses.ResponseCreateParamsStreaming.__optional_keys__ | {"model", "provider"}
    body = "{" + ",".join(f'"{name}":1' for name in sorted(fields)) + "}"
    asked = compact_request(body.encode(), "m")
    taken = compact.ResponseCompactParams.__required_keys__ | compact.ResponseCompactParams.__optional_keys__
    wanted = {name for name in taken & fields if goes(name)} | {"model", "previous_response_id", "provider"}
    assert {name for name in (*taken, *fields) if f'"{name}"'.encode() in asked} == wanted
