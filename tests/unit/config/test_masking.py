"""Test which texts messages mask."""

import pytest

from proxy.config.document import masked


@pytest.mark.parametrize(
    "text",
    [
        "claude-3-5-sonnet-20241022",
        "bedrock/us.anthropic.claude-3-5-sonnet-20241022-v2:0",
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8",
        "str_replace_based_edit_tool",
        "sha256: and 64 hex digits",
    ],
)
def test_names_are_not_masked(text: str) -> None:
    assert masked(text) == text
