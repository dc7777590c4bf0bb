"""The calls of Python functions for fixed requests stay about the same, so that the cost of a request doesn't grow
unnoticed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.calls import ACCEPTED, COMPACTION, Counted, growth, kinds, layer

ROOT = Path(__file__).resolve().parents[2]
FIGURES = dict[str, Counted]


@pytest.fixture(scope="module")
def accepted() -> FIGURES:
    """Return the figures that were accepted last."""
    return msgspec.json.decode(ACCEPTED.read_bytes(), type=FIGURES)


@pytest.mark.long
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python call other functions")
def test_no_request_calls_more_functions_than_accepted(accepted: FIGURES, tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    command = [sys.executable, "-m", "bench.calls", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    changed = growth(accepted, msgspec.json.decode(file.read_bytes(), type=FIGURES))
    assert not changed, "\n".join([*changed, "If the change is worth it, run: scripts/bench calls --accept"])


def test_every_kind_of_request_has_accepted_figures(accepted: FIGURES) -> None:
    assert accepted.keys() == kinds().keys()
    assert COMPACTION in accepted


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (Counted(calls=1_070, modules=50, functions=200), "chat: 1070 calls instead of 1000"),
        (Counted(calls=1_000, modules=54, functions=200), "chat: 54 modules instead of 50"),
    ],
)
def test_a_change_is_noticed(change: Counted, line: str) -> None:
    before = {"chat": Counted(calls=1_000, modules=50, functions=200)}
    assert growth(before, {"chat": change}) == [line]
    assert growth(before, {}) == ["chat: only one side has this request"]


def test_a_small_difference_is_accepted() -> None:
    figures = Counted(calls=1_000, modules=50, functions=200)
    assert growth({"chat": figures}, {"chat": replace(figures, calls=1_059, modules=53, functions=205)}) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (str(ROOT / "proxy" / "http" / "headers.py"), "proxy/http"),
        (str(ROOT / "proxy" / "errors.py"), "proxy/errors"),
        (msgspec.__file__, "msgspec"),
        (subprocess.__file__, "standard library"),
        ("<frozen importlib._bootstrap>", "standard library"),
    ],
)
def test_a_file_belongs_to_a_layer(file: str, name: str) -> None:
    assert layer(file) == name
