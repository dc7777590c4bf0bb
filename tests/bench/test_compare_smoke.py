"""The comparison of two versions, with the current version on both sides, and the difference that it reports."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.compare.case import Case
from bench.compare.observed import recoveries
from bench.compare.recoveries import SCENARIOS, generated
from bench.compare.table import Result, first_difference

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_version_behaves_like_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.compare", "--before", str(ROOT), "--data", str(tmp_path)]
    command += ["--most", "2", "--generated", "40", "--only", "fidelity bodies, chat", "--only", "recall, responses"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("Skipped") == 2
    assert "recall, responses" in run.stdout
    assert "of the generated requests met a recovery" in run.stdout


def test_a_difference_is_counted_and_located() -> None:
    before = [("response headers", b"x-compaction: compacted\n"), ("response body", b"the same, then one")]
    after = [("response headers", b"x-compaction: compacted\n"), ("response body", b"the same, then two")]
    result = Result()
    result.add(Case("group", "first", b""), before, before)
    result.add(Case("group", "second", b""), before, after)
    assert not result.same
    assert (result.groups["group"].identical, result.groups["group"].different) == (1, 1)
    assert result.groups["group"].compacted == 2
    assert result.differences[0].startswith("group, second: response body, byte 15\n")
    assert "after has summary request 1" in first_difference(before, [*before, ("summary request 1", b"")])


def test_records_and_metrics_are_compared() -> None:
    case = Case("group", "first", b"", generated=True)
    attempts = [{"result": "overflow"}, {"result": "accepted"}]
    retried = {"verdict": "none", "attempts": attempts, "steps": [], "summary": {}, "error": None, "recalls": 0}
    result = Result()
    result.add_records([case, case], [retried, retried], [retried, {**retried, "error": "budget_exceeded"}])
    result.add_metrics("group", "requests 1\nerrors 0", "requests 1\nerrors 1")
    group = result.groups["group"]
    assert not result.same
    assert (group.recorded_differently, group.metrics_differ, group.recovered) == (1, True, 2)
    assert group.causes == {"overflow": 2, "spending": 1}
    assert "before: ['errors 0']" in result.differences[1]
    assert not recoveries({**retried, "attempts": [{"result": "error"}]})
    assert not recoveries({**retried, "verdict": "shadow"})


def test_generated_requests_are_the_same_in_each_run_and_cover_all_kinds() -> None:
    first, second = list(generated(300, 1)), list(generated(300, 1))
    assert first[0].body == second[0].body
    assert [(case.group, case.name) for case in first] == [(case.group, case.name) for case in second]
    assert 300 <= len(first) < 340
    assert {case.group.rpartition(",")[0] for case in first} == {name for name, *_ in SCENARIOS}
    assert [case.body for case in generated(30, 2)] != [case.body for case in generated(30, 1)]
