"""Run the benchmark, and check the form of its table and figures. The times aren't checked."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench import bodies, cases
from bench.figures import TINY, Row, Target, raw

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the benchmark pins processes to cores")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """Return the output and the JSON of a run with one short round."""
    file = tmp_path_factory.mktemp("bench") / "figures.json"
    command = [sys.executable, "-m", "bench", "--tiny", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(file.read_bytes())


def test_turns_go_to_the_path_of_their_api() -> None:
    for large in (False, True):
        for case in cases.known(TINY, list(bodies.APIS), large=large):
            api = bodies.APIS[case.rows[0].name.split(",")[0]]
            head, _, body = next(case.requests).partition(b"\r\n\r\n")
            assert head.startswith(f"POST {api.path} ".encode())
            assert api.listed in json.loads(body)


@pytest.mark.full
def test_every_case_is_measured_on_both_sides(written: tuple[str, list[dict[str, Any]]]) -> None:
    _, rows = written
    figures = [figure for row in rows for figure in (*row["proxy"], *row["passthrough"])]
    assert all(row["proxy"] for row in rows)
    assert all(map(math.isfinite, figures))
    alone = {row["name"] for row in rows if not row["passthrough"]}
    assert alone == {
        "memory, counting with o200k",
        "longest hold of the interpreter next to a first compaction of 1.1 MB",
    }


@pytest.mark.full
def test_what_is_asked_for_is_in_the_table(written: tuple[str, list[dict[str, Any]]]) -> None:
    printed, rows = written
    asked = [row for row in rows if row["target"] is not None]
    assert len(asked) >= 8
    for row in rows:
        assert row["name"] in printed
    for row in asked:
        assert isinstance(row["met"], bool)
        assert f"≤ {row['target']['at_most']:g}" in printed


@pytest.mark.parametrize(
    ("target", "proxy", "reference", "met"),
    [
        (None, [3.0], [1.0], None),
        (Target("figure", 2.0), [1.0, 2.0, 9.0], [], True),
        (Target("figure", 2.0), [1.0, 3.0, 9.0], [], False),
        (Target("ratio", 1.5), [3.0, 2.0, 9.0], [2.0, 2.0, 2.0], True),
        (Target("ratio", 1.5), [4.0, 2.0, 9.0], [2.0, 2.0, 2.0], False),
    ],
)
def test_a_target_is_met_by_the_median(
    target: Target | None, proxy: Sequence[float], reference: Sequence[float], met: bool | None
) -> None:
    row = Row("case", "ms", target, list(proxy), list(reference))
    assert row.met is met
    assert raw([row])[0]["met"] is met


def test_conversations_of_two_seeds_share_no_message() -> None:
    first, second = (bodies.messages(50_000, seed=seed) for seed in (1, 2))
    shared = [message for message in first if message in second]
    # The last message is always the same.
    assert shared == [first[-1]]


@pytest.mark.parametrize(
    ("size", "count"),
    [(bodies.CONVERSATION_BYTES, 400), (bodies.COLD_BYTES, 400), (bodies.SHORT_BYTES, bodies.SHORT_MESSAGES)],
)
def test_a_conversation_has_the_size_it_is_named_for(size: int, count: int) -> None:
    assert size * 0.9 < len(bodies.conversation("any", size, count)) < size * 1.1


@pytest.mark.parametrize("api", bodies.APIS.values(), ids=bodies.APIS)
def test_turns_have_a_new_last_message_each(api: bodies.Api) -> None:
    turns = api.turns("any", 20_000, 20, conversations=2)
    first, other, second = (json.loads(body)[api.listed] for body in islice(turns, 3))
    assert first[:-1] == second[:-1]
    assert first[-1] != second[-1]
    assert first[0] != other[0]
