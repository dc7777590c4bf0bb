"""The comparison of two versions, with the current version on both sides, and the difference that it reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.compare.table import Result, first_difference
from bench.compare.traffic import Case

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_version_behaves_like_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.compare", "--before", str(ROOT), "--data", str(tmp_path)]
    command += ["--bodies", "2", "--generated", "8"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("Skipped") == 2
    assert "generated conversations" in run.stdout


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
