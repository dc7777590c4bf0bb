"""Test the report of a profile."""

import io

from rich.console import Console

from proxy.cli.profile_report import describe, render
from proxy.limits.profiles import Profiles


def test_rows_have_value_and_source() -> None:
    rows = {row.field: row for row in describe(Profiles().find("gpt-5.1-codex"))}
    assert rows["max_input_tokens"].value == "272,000"
    assert rows["max_input_tokens"].source == "corrections: GPT-5 to GPT-5.3"
    assert rows["max_messages"].value == "unknown"
    rows = {row.field: row for row in describe(Profiles().find("gpt-5.1-codex", provider="openai"))}
    assert rows["max_messages"].value == "2,048"
    assert rows["max_messages"].source == "corrections: OpenAI"
    assert rows["tokenizer"].value == "o200k_base"
    assert [row.field for row in describe(Profiles().find("gpt-4o"), "tokenizer")] == ["tokenizer"]


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
