"""``scripts/soak bombs`` with three families, and its check of costs."""

from __future__ import annotations

import functools
from io import StringIO

import pytest
from rich.console import Console

from soak.bombs import families
from soak.bombs.command import BODY_LIMIT, PASSED_ON, Bomb, check, report
from soak.bombs.measuring import Cost
from soak.bombs.upstream import Response

PLAIN = families.chat("hi")
STREAMING = families.chat("hi", stream=True)
FINE = Cost(200, 0.1, 0.01, 10_000_000)


def test_families_are_measured() -> None:
    tools = functools.partial(families.in_tools(b"1"), 1_300_000)
    comments = Response(families.STREAMS["comments"], kind="text/event-stream", piece=1)
    error = Response(families.ERRORS["nested arrays"], 400)
    chosen = [
        Bomb("passed through: tools", tools, PASSED_ON, team="some"),
        Bomb("stream: comments", lambda: STREAMING, response=comments),
        Bomb("error: nested arrays", lambda: PLAIN, response=error),
    ]
    costs = check(chosen, attempts=1)
    assert [cost.status for _, cost in costs] == [400, 200, 400]
    assert all(0 < cost.cpu < 2 and cost.wait > 0 for _, cost in costs)


@pytest.mark.parametrize(
    ("cost", "large", "exceeded"),
    [
        (FINE, False, []),
        (Cost(500, 0.1, 0.01, 0), False, ["status"]),
        (Cost(0, 0.1, 0.01, 0), True, ["status"]),
        (Cost(200, 1.1, 0.11, 0), False, ["CPU", "/livez"]),
        (Cost(400, 1.1, 0.11, 4 * BODY_LIMIT), True, []),
        (Cost(400, 1.1, 0.26, 4 * BODY_LIMIT + 1), True, ["/livez", "memory"]),
    ],
)
def test_bounds(cost: Cost, large: bool, exceeded: list[str]) -> None:
    bomb = Bomb("kind: name", lambda: b"", large=large)
    assert bomb.exceeded(cost) == exceeded


def test_the_table_shows_exceeded_bounds_and_the_slowest() -> None:
    printed = StringIO()
    costs = [
        (Bomb("kind: slow", lambda: b""), Cost(200, 0.9, 0.01, 10_000_000)),
        (Bomb("kind: fine", lambda: b""), Cost(200, 0.1, 0.001, 0)),
        (Bomb("other: broken", lambda: b""), Cost(500, 0.1, 0.01, 0)),
    ]
    report(costs, Console(file=printed, width=120), everything=False)
    assert "kind: slow" in printed.getvalue()
    assert "kind: fine" not in printed.getvalue()
    assert "3 families, 1 over a bound" in printed.getvalue()
