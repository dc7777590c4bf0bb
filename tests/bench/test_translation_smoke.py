"""Run the benchmark of translated turns. The times aren't checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark pins processes to cores")
def test_it_runs_next_to_litellm(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.translation", "--quick", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    lines = json.loads(file.read_bytes())
    assert [line["name"] for line in lines] == [
        f"/v1/{api}, {size}" for api in ("messages", "responses") for size in ("small request", "100 kB")
    ]
    assert all(len(line[side]) == 2 and min(line[side]) > 0 for line in lines for side in ("proxy", "litellm"))
