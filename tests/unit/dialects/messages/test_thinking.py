"""Which models check that thinking follows the same prompt."""

import pytest

from proxy.dialects.messages.units import checks_prefix


@pytest.mark.parametrize(
    "model",
    [
        *("claude-fable-5-1", "claude-fable-5.2", "claude-mythos-5-2", "claude-opus-5-5-20261001", "claude-sonnet-5-5"),
        *("claude-haiku-5-5", "anthropic/claude-opus-6", "us.anthropic.claude-sonnet-5-5-v1:0", "claude-new-5-1"),
        "claude-opus-latest",
    ],
)
def test_new_models_check(model: str) -> None:
    assert checks_prefix(model)


@pytest.mark.parametrize(
    "model",
    [
        *("claude-mythos-5-1", "claude-opus-5", "claude-sonnet-4-5-20250929", "claude-3-5-sonnet-20241022"),
        *("claude-fable-5", "claude-2.1", "claude-instant-1", "gpt-5.5", "qwen-9"),
    ],
)
def test_older_models_and_others_dont(model: str) -> None:
    assert not checks_prefix(model)
