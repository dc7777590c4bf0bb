"""A short form of ``scripts/soak fleet``: a replica is killed, and Redis comes back empty."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from soak.fleet.command import examined
from soak.fleet.load import Tally, Upstreams
from soak.fleet.table import Found, report
from tests.kit.object_server import INSTALLED
from tests.kit.object_server import MISSING as NO_OBJECTS
from tests.kit.redis_server import MISSING, PROGRAM


@pytest.mark.full
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
@pytest.mark.skipif(not INSTALLED, reason=NO_OBJECTS)
def test_nothing_is_lost(tmp_path: Path) -> None:
    """Runs with ``--full`` only."""
    found = examined(tmp_path, seconds=1, lasts=3, only=("replicas killed", "back empty"), agents=3)
    assert not any(found.tally.wrong.values())
    assert found.upstreams.faults == []
    assert found.crashes == []
    assert None not in found.recovered.values()
    assert found.upstreams.extra["no failure"] == 0
    assert report(found, "Smoke") in (0, 1)


def test_a_lost_response_is_an_error() -> None:
    def found(wrong: list[str]) -> Found:
        tally = Tally(defaultdict(list, {"x": [1.0]}), wrong=defaultdict(list, {"x": wrong}), sessions=1)
        return Found(tally, Upstreams(), ["x"], recovered={"x": 1.0})

    assert report(found([]), "None lost") == 0
    assert report(found(["chat: error"]), "One lost") == 1
