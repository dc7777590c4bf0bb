"""Long sessions at upstreams that count fewer tokens than the proxy, or more, and say so in their usage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from proxy.limits.calibration import STEPS
from tests.kit.limit_sessions import BELIEVED, Fleet, answers, conversation, fleet, summarises
from tests.kit.upstream import StandIn

TURNS, SIZE = 80, 200
"""Turns of a session, and tokens of new text in each."""
TURNS_FULL, SIZE_FULL = 200, 80
"""With ``--full``: the same growth in smaller turns."""
RATIOS = (0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.45, 1.6)
FIRST = 3_000
"""Tokens of the first message: enough for what is counted otherwise in tools and framing not to matter."""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    def stand_in(ratio: float) -> StandIn:
        return StandIn(window=BELIEVED, max_output=BELIEVED // 8, ratio=ratio, responder=answers, summariser=summarises)

    upstreams = {f"{ratio}-{stream}": stand_in(ratio) for ratio in RATIOS for stream in (False, True)}
    with fleet(upstreams, tmp_path_factory.mktemp("ratios")) as running:
        yield running


CASES = [
    pytest.param(ratio, stream, marks=[] if number % 2 == stream else pytest.mark.full)
    for number, ratio in enumerate(RATIOS)
    for stream in (False, True)
]


@pytest.mark.parametrize(("ratio", "stream"), CASES)
def test_the_ratio_is_known_after_five_turns_and_nothing_is_refused(
    ratio: float, stream: bool, sessions: Fleet, full: bool
) -> None:
    """Every second ratio is tested with streams, and the others without. ``--full`` tests both, in 200 turns."""
    turns, size = (TURNS_FULL, SIZE_FULL) if full else (TURNS, SIZE)
    model = f"{ratio}-{stream}"
    with conversation(sessions, model, streams=(stream,)) as talk:
        talk.go_on(1, FIRST)
        talk.go_on(4, size)
        first = factor(sessions, model)
        assert abs(first - ratio) <= 1.01 / STEPS
        talk.go_on(turns - 5, size)
        assert abs(factor(sessions, model) - ratio) <= 1.01 / STEPS
        assert talk.refused == 0
        assert talk.largest > 0.7 * BELIEVED, "the window is made use of"
        assert talk.summaries >= 1


def factor(sessions: Fleet, model: str) -> float:
    upstream = f"u{list(sessions.upstreams).index(model)}"
    tenant = "key:" + hashlib.sha256(b"sk-client").hexdigest()
    return sessions.service.limits.calibration.factor(upstream, model, tenant)
