"""Run the benchmark of prices on a short conversation, and check its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.money.cache import LIFETIME, PrefixCache
from bench.money.prices import Prices, break_even, paid_after
from bench.money.upstream import Call

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_it_runs_and_continued_summaries_come_from_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.money", "--tiny", "--json", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert "break-even" in run.stdout
    (found,), (bill,) = (json.loads(file.read_bytes())[name] for name in ("summaries", "bills"))
    calls = found["calls"]
    assert {call["kind"] for call in calls["transcript"]} == {"transcript"}
    assert {call["kind"] for call in calls["continue"]} == {"continue"}
    assert len(calls["transcript"]) == len(calls["continue"]) >= 2
    assert all(call["read"] > 0.95 * call["prompt"] for call in calls["continue"])
    assert all(call["read"] == 0 for call in calls["transcript"])
    assert found["share"] < 0.5
    assert found["quality"]["facts"][1] >= found["quality"]["facts"][0] - 0.05
    assert found["quality"]["invalid"] == [0, 0]
    assert max(call["prompt"] for call in bill["ours"]) < max(call["prompt"] for call in bill["theirs"])


def test_the_cache_serves_what_two_prompts_begin_with_for_five_minutes() -> None:
    cache = PrefixCache(lambda part: 100 * len(part))
    first = [b"tools", b"aaaaaaaaaa", b"bbbb"]
    assert cache.read(first, 0) == 0
    assert cache.read([*first, b"c"], 10) == 1_900
    assert cache.read([b"tools", b"aaaaaaaxxx"], 20) == 1_200, "up to the byte that differs"
    assert cache.read([b"other"], 20) == 0
    assert cache.read(first, 10 + LIFETIME) == 1_900
    assert cache.read(first, 11 + 2 * LIFETIME) == 0


def test_prices_by_hand() -> None:
    call = Call("turn", 1_000, 800, 10)
    assert Prices(read=0.1, write=1.25, output=5).cost(call) == pytest.approx(80 + 250 + 50)
    assert Prices(read=0.1, step=999).cost(call) == pytest.approx(2 * (80 + 250 + 50))
    assert Prices(read=0.1, step=1_000).cost(call) == pytest.approx(80 + 250 + 50)
    assert Prices(write=1.25).cost(Call("transcript", 100, 0, 0)) == 100
    # Ours reads 100 tokens less and writes 25 more: 31.25 = 100 × 0.3125
    ours, theirs = [Call("turn", 925, 700, 0)], [Call("turn", 1_000, 800, 0)]
    assert break_even(ours, theirs, Prices()) == pytest.approx(0.3125)
    assert break_even(theirs, ours, Prices()) is None
    never = break_even([Call("turn", 1_000, 0, 0)], [Call("turn", 1_000, 900, 0)], Prices())
    assert never is not None
    assert never > 1


def test_a_checkpoint_has_paid_for_itself_once_the_bill_is_lower() -> None:
    prices = Prices(read=0.1, write=1, output=0)
    theirs = [Call("turn", 1_000, 1_000, 0)] * 10
    ours = [theirs[0], Call("continue", 1_000, 1_000, 0), theirs[0], *[Call("turn", 200, 200, 0)] * 8]
    assert paid_after(ours, theirs, prices) == 1, "the notes cost 100, and each turn saves 80"
    assert paid_after([*theirs[:9], Call("turn", 900, 0, 0)], theirs, prices) is None
