"""Count the parts of a Responses request: each one that the model reads, and nothing else."""

from typing import Any

from proxy.dialects.counting import CALL
from proxy.dialects.responses.counting import ITEM, ResponsesCounter
from proxy.limits.profiles import Profile
from proxy.tokens import encoding
from proxy.tokens.text import count

COUNTER = ResponsesCounter(Profile("exact"))
TEXT = "The vault code is 7341, and nobody may write it down."


def tokens(text: str) -> int:
    return count(encoding("o200k_base"), text)


def item(**fields: Any) -> int:
    """Return the tokens of an item without its frame."""
    return COUNTER.items([fields]) - ITEM


def test_a_call_counts_with_its_name_and_arguments() -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": TEXT}
    assert item(**call) == CALL + tokens("read") + tokens(TEXT)
    assert item(**call, id="fc_" + "x" * 500, status="completed", namespace=None) == item(**call)


def test_reasoning_counts_with_its_summary_and_its_sealed_length() -> None:
    summary = [{"type": "summary_text", "text": TEXT}]
    assert item(type="reasoning", id="rs_1", summary=summary) == tokens(TEXT)
    assert item(type="reasoning", summary=[], encrypted_content="A" * 1_600) == 300


def test_a_screenshot_counts_as_an_image() -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    output = {"type": "computer_screenshot", "image_url": image}
    screenshot = item(type="computer_call_output", call_id="call_1", output=output)
    assert screenshot == item(role="user", content=[{"type": "input_image", "image_url": image}]) > 0
    assert item(type="image_generation_call", id="ig_1", result=image) == screenshot


def test_the_schema_of_the_answer_counts() -> None:
    format = {"type": "json_schema", "name": "n", "schema": {"type": "object", "description": TEXT}}
    plain = COUNTER.overhead({"text": {"format": {"type": "text"}}})
    assert COUNTER.overhead({"text": {"format": format}}) > plain + tokens(TEXT)
