"""Test the measure of the search and of the prompts, on a generated history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.quality import langchain
from bench.quality.memory import main


def test_the_evidence_of_a_question_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(langchain, "PYTHON", tmp_path / "none")
    chat = [
        {"role": role, "content": f"{text} {'and so on ' * 300}"}
        for role, text in (("user", "Hi"), ("assistant", "Yes"))
    ]
    old, new = (
        [{"role": "user", "content": f"My rent is {n} euros.", "has_answer": True}, *chat[1:]] for n in (900, 950)
    )
    task = {
        "question_id": "q1",
        "question_type": "knowledge-update",
        "question": "What is my rent?",
        "haystack_dates": ["2023/05/03", "2023/05/01", *["2023/05/02"] * 40],
        "haystack_session_ids": ["new", "old", *map(str, range(40))],
        "haystack_sessions": [new, old, *[chat] * 40],
        "answer_session_ids": ["old", "new"],
    }
    (tmp_path / "lme_q1.json").write_text(json.dumps(task))
    outcome = CliRunner().invoke(main, [str(tmp_path), "--window", "8192"])
    assert outcome.exit_code == 0, outcome.output
    (row,) = (line for line in outcome.output.splitlines() if line.startswith("| knowledge-update"))
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["1", *["100.0 %"] * 3], outcome.output
    assert "Newest value first: 100.0 % of 1." in outcome.output


def test_without_histories_it_says_so(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, [str(tmp_path)])
    assert (outcome.exit_code, "There are no histories" in outcome.output) == (0, True)
