"""Run the benchmark of recognition on a few invented lines, and check its scores."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.overflow.lines import Line, lines
from bench.overflow.scores import is_of, score
from proxy.overflow import Overflow


def row(name: str, message: str, **fields: Any) -> dict[str, Any]:
    known = {
        "id": name,
        "provider": "vLLM",
        "http_status": 400,
        "body": json.dumps({"error": {"message": message}}),
        "is_overflow": True,
        "kind": "input",
        "limit_tokens": None,
        "prompt_tokens": None,
        "output_tokens_requested": None,
        "remedy": "compact",
        "ambiguous": False,
    }
    return known | fields


CUT = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 8192}}
ROWS = [
    row(
        "both",
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        limit_tokens=8192,
        limit_scope="total",
        prompt_tokens=9000,
    ),
    row(
        "ours",
        "input length (9000) exceeds model's maximum context length (8192)",
        limit_tokens=8192,
        limit_scope="total",
        prompt_tokens=9000,
    ),
    row(
        "rate",
        "Rate limit reached: 30000 tokens per minute",
        http_status=429,
        is_overflow=False,
        kind="rate",
        remedy="none",
        trap_numbers=[30000],
    ),
    row(
        "cut", "", http_status=200, body=json.dumps(CUT), kind="silent", limit_tokens=8192, proxy_estimate_tokens=20_000
    ),
    row("left out", "prompt is too long", ambiguous=True),
]


def catalogue(folder: Path) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ROWS), encoding="utf-8")
    return path


@pytest.mark.full
def test_it_runs_and_prints_ours_beside_theirs(tmp_path: Path) -> None:
    # It imports LiteLLM, which takes seconds in each process that collects tests.
    from bench.overflow.__main__ import main, measure

    mine, theirs, left_out = measure(lines(catalogue(tmp_path)))
    assert (mine.overflows, mine.others, mine.found, mine.alarms) == (3, 1, 3, [])
    assert mine.wrong == {name: [] for name in mine.wrong}
    assert theirs.missed == ["ours", "cut"]
    assert left_out.missed == []
    shown = CliRunner().invoke(main, ["--catalogue", str(catalogue(tmp_path))], catch_exceptions=False)
    assert all(one.name in shown.output for one in (mine, theirs, left_out)), shown.output


def test_a_wrong_reading_counts_against_whoever_made_it(tmp_path: Path) -> None:
    def careless(line: Line) -> Overflow | None:
        return None if line.id == "ours" else Overflow("input", 30_000, "input", None, None, "either")

    made = score("careless", lines(catalogue(tmp_path)), careless)
    assert (made.found, made.missed, made.alarms, made.trapped) == (2, ["ours"], ["rate"], ["rate"])
    assert made.wrong["limit"] == ["both", "cut"]
    assert made.wrong["counted"] == ["both"]
    assert made.right["limit"].value == 0
    assert made.right["output"].value is None


def test_sources_are_told_apart() -> None:
    assert is_of("Qwen", "Qwen DashScope")
    assert is_of(" llama.cpp", "llama.cpp server")
    assert not is_of("general", "OpenAI")
