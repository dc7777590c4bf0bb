"""Test the report of differences between LiteLLM's table and the built-in one."""

from __future__ import annotations

import pytest

from proxy.cli.table_differences import Difference, differences
from proxy.limits.profiles import litellm_table
from proxy.limits.profiles.litellm_table import Listing

TABLE = {
    "gpt-5.2": Listing("openai", 272_000, 128_000),
    "some/gpt-5.2-codex": Listing("some", 400_000, 128_000),
    "less/gpt-5.2": Listing("less", 100_000, None),
    "gpt-4o": Listing("openai", 128_000, 16_384),
}


def test_each_field_that_differs_is_named_with_both_figures_and_the_one_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(litellm_table, "load", lambda: TABLE)
    found = list(differences())
    reason = found[0].reason
    assert reason
    rule = "GPT-5 to GPT-5.3"
    assert found == [
        Difference("less/gpt-5.2", "max_input_tokens", 100_000, 272_000, 100_000, rule, reason),
        Difference("less/gpt-5.2", "max_output_tokens", None, 128_000, 128_000, rule, reason),
        Difference("some/gpt-5.2-codex", "max_input_tokens", 400_000, 272_000, 272_000, rule, reason),
    ]
    assert list(differences(["gpt-5.2-codex"])) == found[2:]
    assert list(differences(["less/gpt-5.2"])) == found[:2]
    assert list(differences(["gpt-4o"])) == []


def test_every_difference_has_a_reason() -> None:
    assert all(found.reason for found in differences())
