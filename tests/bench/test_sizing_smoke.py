"""Run the benchmark for sizing, and check the form of its figures. Their values aren't checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.redis_server import MISSING, PROGRAM

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark pins processes to cores")
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_every_figure_of_the_documents_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.sizing", "--quick", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_bytes())
    assert all(figure > 0 for row in rows for figure in row["figures"])
    documented = re.findall(r"^\| ([^|]+) \| [\d.,]+", (ROOT / "docs" / "fleet.md").read_text(), re.MULTILINE)
    assert set(documented) == {row["name"] for row in rows}
    assert all(name in run.stdout for name in documented)
