"""Test the reports of profiles."""

import io

from rich.console import Console

from proxy.cli.models import render, rows
from proxy.limits.profiles import Profiles


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
