"""Test the reports of profiles, and of differences between LiteLLM's table and the corrections."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from proxy.cli.models import Difference, differences, render, rows
from proxy.limits.profiles import Profiles, tables
from proxy.limits.profiles.tables import Listing

TABLE = {
    "gpt-5.2": Listing("openai", 272_000, 128_000),
    "some/gpt-5.2-codex": Listing("some", 400_000, 128_000),
    "less/gpt-5.2": Listing("less", 100_000, None),
    "gpt-4o": Listing("openai", 128_000, 16_384),
}


def test_rows_have_value_and_source() -> None:
    found = {field: (value, source) for field, value, source in rows(Profiles().find("gpt-5.1-codex"))}
    assert found["max_input_tokens"] == ("272,000", "corrections: GPT-5 to GPT-5.3")
    assert found["max_messages"][0] == "unknown"
    found = {
        field: (value, source) for field, value, source in rows(Profiles().find("gpt-5.1-codex", provider="openai"))
    }
    assert found["max_messages"] == ("2,048", "corrections: OpenAI")
    assert found["tokenizer"][0] == "o200k_base"


def test_the_table_is_printed_with_its_note() -> None:
    output = io.StringIO()
    profiles = Profiles()
    render([profiles.find("gpt-5-2"), profiles.find("never-[heard]-of")], Console(file=output, width=160))
    text = output.getvalue()
    assert "272,000" in text
    assert "\nnever-[heard]-of" in text
    assert "note: gpt-5-2 is not listed; taken as gpt-5.2" in text
    assert "note: no limits are known for never-[heard]-of" in text
    assert text.count("unknown") >= 3


def test_each_field_that_differs_is_named_with_both_figures_and_the_one_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "load", lambda: TABLE)
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
