"""Check the adapter of compaction-conformance-kit with a running proxy."""

import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from bench.quality import conformance
from bench.quality.__main__ import main


def test_a_session_goes_through_a_running_proxy_and_its_prompt_again() -> None:
    said = [f"Number {number}: {'and so on ' * 60}" for number in range(30)]
    turns = [SimpleNamespace(role=role, text=text) for text in said for role in ("user", "assistant")]
    client = conformance.Client()
    first = client.compact(turns, 1, 12_000).text
    assert "[user] <conversation_summary>" in first
    assert said[-1] in first
    assert len(first) < 12_000 < len("".join(said))
    assert client.compact([SimpleNamespace(role="system", text=first)], 2, 12_000).text == first


def test_without_the_kit_one_line_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compaction_kit", None)
    result = CliRunner().invoke(main, ["--kit"])
    assert (result.exit_code, result.output) == (1, f"Error: {conformance.MISSING}\n")
