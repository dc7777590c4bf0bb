"""Test the measure of the search and of the prompts, on a generated history."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.quality import langchain
from bench.quality.memory import ANY, Case, Scores, main, search


def scored(case: Case) -> dict[str, list[float]]:
    scores: Scores = defaultdict(list)
    search(case, scores)
    return {column: scores[column] for column in ANY}


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
    assert [line for line in outcome.output.splitlines() if "500" in line] == ["1 of LongMemEval's 500 questions."]
    assert "Newest value first: 100.0 % of 1." in outcome.output


def test_recall_any_needs_one_of_the_sessions_with_evidence() -> None:
    turns = [
        {"role": "user", "content": f"The {word} costs {n} euros."} for n, word in enumerate(["rent", *["bike"] * 12])
    ]
    case = Case("q", "type", "What is the rent?", turns, [0], ["a", *"bcdefghijklm"], ["a", "gone"])
    assert scored(case) == {"recall_any@5": [1.0], "recall_any@10": [1.0]}
    assert scored(replace(case, marked=["gone"])) == {"recall_any@5": [0.0], "recall_any@10": [0.0]}
    # All sessions have the word, so newer ones rank higher.
    everywhere = replace(case, question="How many euros?", marked=["f"])
    assert scored(everywhere) == {"recall_any@5": [0.0], "recall_any@10": [1.0]}


def test_without_histories_it_says_so(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, [str(tmp_path)])
    assert (outcome.exit_code, "There are no histories" in outcome.output) == (0, True)
