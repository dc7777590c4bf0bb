"""Count the parts of a Messages request: each one that the model reads, and nothing else."""

from typing import Any

import pytest

from proxy.dialects.messages.counting import CALL, MESSAGE, REPLY, RESULT, TOOL, MessagesCounter
from proxy.limits.profiles import Profile
from proxy.tokens import encoding, tools
from proxy.tokens.text import count, dump

COUNTER = MessagesCounter(Profile("exact"))
TEXT = "The vault code is 7341, and nobody may write it down."
TOOL_F = {"name": "f", "description": TEXT, "input_schema": {"type": "object"}}


def tokens(text: object) -> int:
    return count(encoding("o200k_base"), text if isinstance(text, str) else dump(text))


def blocks(*content: dict[str, Any]) -> int:
    """Return the tokens of a message with this content, without its frame."""
    return COUNTER.message({"role": "user", "content": list(content)}) - MESSAGE


def test_a_call_counts_with_its_name_and_input() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": TEXT}}
    assert blocks(call) == CALL + tokens("read") + tokens({"path": TEXT})
    assert blocks({**call, "id": "toolu_" + "x" * 500, "caller": {"type": "direct"}}) == blocks(call)
    assert blocks({**call, "input": None}) == CALL + tokens("read")


@pytest.mark.parametrize("field", ["data", "encrypted_content", "encrypted_index"])
def test_sealed_data_counts_by_its_length(field: str) -> None:
    assert blocks({"type": "what", field: "A" * 1_600}) - blocks({"type": "what"}) == 300


def test_the_overhead_has_the_system_prompt_and_the_tools() -> None:
    assert COUNTER.overhead({"system": TEXT}) == REPLY + MESSAGE + tokens(TEXT)
    assert COUNTER.overhead({"tools": []}) == REPLY
    one, two = (COUNTER.overhead({"tools": [TOOL_F] * number}) for number in (1, 2))
    assert two - one == tokens(TOOL_F) + TOOL
    assert one == two - one + tools.PROMPT["json"] + REPLY


@pytest.mark.parametrize("field", ["eager_input_streaming", "cache_control"])
def test_fields_that_the_model_does_not_read(field: str) -> None:
    changed = {**TOOL_F, field: {"type": "ephemeral"}}
    assert COUNTER.overhead({"tools": [changed]}) == COUNTER.overhead({"tools": [TOOL_F]})


def test_the_ratio_of_the_profile_scales_everything() -> None:
    scaled = MessagesCounter(Profile("scaled", token_ratio=2.0))
    message = {"role": "user", "content": TEXT}
    assert scaled.message(message) == 2 * COUNTER.message(message)
    assert scaled.overhead({"system": TEXT}) == 2 * COUNTER.overhead({"system": TEXT})


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def test_an_image_counts_wherever_it_is() -> None:
    image = blocks(IMAGE)
    assert image > 100
    assert blocks(IMAGE, {"type": "text", "text": TEXT}, IMAGE) == 2 * image + tokens(TEXT)
    assert blocks({"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE, IMAGE]}) == RESULT + 2 * image
    assert COUNTER.overhead({"system": [IMAGE, IMAGE]}) == REPLY + MESSAGE + 2 * image
