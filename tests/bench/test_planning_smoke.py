"""Run the benchmark of planning, and check its conversations and plans. The times aren't checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.planning import FULL, Size, conversation, planner
from tests.kit.upstream import faults

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark pins processes to cores")
def test_it_runs_beside_the_pass_through(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.planning", "--quick", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    short, long = json.loads(file.read_bytes())
    assert (short["messages"], long["messages"]) == (400, 1_000)
    assert short["target"] == {"of": "figure", "at_most": 3.0}
    assert "≤ 3 ms" in run.stdout
    for row in (short, long):
        assert min(*row["proxy"], *row["passthrough"], row["us_per_message"]) > 0


@pytest.mark.parametrize("size", FULL[:3], ids=lambda size: str(size.messages))
def test_a_conversation_has_the_size_it_is_named_for(size: Size) -> None:
    made = list(conversation(size))
    assert len(made) == size.messages
    assert 0.85 < len(msgspec.json.encode(made)) / (size.messages * size.bytes_each) < 1.1
    assert faults({"messages": made}) == []


def test_there_is_something_to_plan_and_planning_twice_gives_the_same() -> None:
    plan = planner(list(conversation(FULL[1])))
    first = plan()
    assert first.checkpoints
    assert plan() == first
