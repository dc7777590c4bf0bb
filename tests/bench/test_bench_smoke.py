"""Run the benchmark, and check the form of its table. No time or size is checked."""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from bench import ROOT, bodies, cases, instructions
from bench.__main__ import USUAL
from bench.rows import TINY, Row, cells
from bench.table import table

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark pins processes to cores")


def run(file: Path, groups: Sequence[str]) -> list[Row]:
    """Return the rows of one short round. Each of them must have a figure of both sides, and be in the table."""
    only = [part for group in groups for part in ("--only", group)]
    command = [sys.executable, "-m", "bench", "--tiny", "--json", str(file), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = [Row(**row) for row in json.loads(file.read_bytes())]
    assert [row for row in rows if len(row.proxy) != 1 or len(row.reference) != 1 or row.name not in done.stdout] == []
    return rows


@pytest.mark.full
def test_every_case_is_measured_on_both_sides(tmp_path: Path) -> None:
    names = [row.name for row in run(tmp_path / "rows.json", USUAL)]
    for words in ("small", "small, 64 at once", "100 KB with a new last message", "1.1 MB with a new last message"):
        assert {api for api in bodies.APIS if any(name.startswith(f"{api}, {words}") for name in names)} == {
            *bodies.APIS
        }, names


@pytest.mark.full
def test_translated_turns_run_next_to_litellm(tmp_path: Path) -> None:
    rows = run(tmp_path / "rows.json", ["translation"])
    assert {row.compared for row in rows} == {"LiteLLM"}
    assert len(rows) == 4, rows


def test_the_total_of_callgrind_is_read() -> None:
    assert instructions.total("events: Ir\nfn=main\n100 7\ncalls=1 10\n101 900\ntotals: 985\n") == 985


def test_the_table_has_medians_and_the_range_of_the_ratios() -> None:
    row = Row("case", "ms", [4.0, 2.0, 9.0], [2.0, 2.0, 2.0])
    assert cells(row) == ["case", "pass-through", "2.00 ms", "4.00 ms", "2.00 × (1.00–4.50)"]
    # A short round may measure nothing.
    assert cells(Row("case", "ms", [4.0, 2.0], [0.0, 0.0]))[-1] == ""
    assert table(("case", "figure"), [("long name", 1)]).splitlines() == [
        "| case      | figure |",
        "| --------- | -----: |",
        "| long name |      1 |",
    ]


@pytest.mark.parametrize("large", [False, True])
def test_turns_go_to_the_path_of_their_api(large: bool) -> None:
    for case in cases.known(TINY, list(bodies.APIS), large=large):
        api = bodies.APIS[case.rows[0].name.split(",")[0]]
        head, _, body = next(case.requests).partition(b"\r\n\r\n")
        assert head.startswith(f"POST {api.path} ".encode())
        assert ("input" if api.name == "responses" else "messages") in json.loads(body)


@pytest.mark.parametrize("api", bodies.APIS.values(), ids=bodies.APIS)
def test_turns_have_a_new_last_message_each(api: bodies.Api) -> None:
    turns = api.turns("any", 20_000, 20, conversations=2)
    listed = "input" if api.name == "responses" else "messages"
    first, other, second = (json.loads(body)[listed] for body in islice(turns, 3))
    assert first[:-1] == second[:-1]
    assert first[-1] != second[-1]
    assert first[0] != other[0]
