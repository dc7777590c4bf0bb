"""Run the benchmark of waits, and check its counts. The times aren't checked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.crossings.conversations import HABITS, Growing, Kind
from bench.crossings.table import Side, share_without_wait
from bench.crossings.turns import Crossing, Turn, crossings, others
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile
from tests.kit.upstream import faults

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 16_000
COUNTER = ChatCounter(Profile("bench", tokenizer="o200k_base"))


def tokens(growing: Growing) -> int:
    return sum(COUNTER.message(message) for message in json.loads(growing.body)["messages"])


def none(latency: float = 0.01) -> Turn:
    return Turn(latency, "none", "", b"")


def compacted(latency: float, origin: str, summary: bytes) -> Turn:
    return Turn(latency, "compacted", origin, summary)


@pytest.mark.full
def test_it_runs_and_only_without_a_head_start_does_everybody_wait(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.crossings", "--quick", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    prepared, never = json.loads(file.read_bytes())
    assert "deadline" in run.stdout
    assert prepared["name"] in run.stdout
    assert prepared["turns"] == never["turns"]
    assert len(prepared["crossings"]) == len(never["crossings"]) > 0
    assert "stored" in {crossing["summary"] for crossing in prepared["crossings"]}
    assert {crossing["summary"] for crossing in never["crossings"]} == {"made"}


@pytest.mark.parametrize("kind", HABITS)
def test_conversations_are_valid_and_grow_as_they_should(kind: Kind) -> None:
    growing = Growing(kind, WINDOW, turns=20, seed=1, begun=0.6)
    assert growing.body == Growing(kind, WINDOW, turns=20, seed=1, begun=0.6).body
    before = tokens(growing)
    assert 0.55 < before / WINDOW < 0.67
    grown = sum(growing.grow() for _ in range(20))
    assert tokens(growing) - before == pytest.approx(grown * WINDOW, rel=0.2)
    assert faults(json.loads(growing.body)) == []


def test_a_crossing_is_the_first_turn_with_another_summary() -> None:
    turns = [
        none(),
        none(),
        compacted(0.51, "made", b"1"),
        compacted(0.02, "stored", b"1"),
        compacted(0.03, "stored", b"2"),
        compacted(0.01, "digest", b""),
        compacted(0.01, "digest", b""),
        none(),
    ]
    found = crossings([turns, [none()]])
    assert [crossing.origin for crossing in found] == ["made", "stored", "digest"]
    assert [crossing.wait for crossing in found] == pytest.approx([0.5, 0.02, 0])
    assert others([turns, [none()]]) == pytest.approx([0, 0.01, 0, 0])


@pytest.mark.parametrize(
    ("waits", "met"),
    [([], None), ([0.0] * 19 + [0.5], True), ([0.0] * 18 + [0.5] * 2, False), ([0.0] * 19 + [61.0], False)],
)
def test_the_target_is_a_share_and_a_longest_wait(waits: Sequence[float], met: bool | None) -> None:
    conversations = [[none(0), none(0), compacted(wait, "stored", b"1")] for wait in waits] or [[none()]]
    assert Side("any", conversations).met(10) is met


def test_a_second_of_people_is_no_wait() -> None:
    found: list[Any] = [Crossing(0.09, "made"), Crossing(0.11, "made")]
    assert share_without_wait(found, 10) == 0.5
    assert share_without_wait(found, 1) == 1
