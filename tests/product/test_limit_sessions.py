"""Long sessions at upstreams whose limit is another than the profile says, in all the words in which they refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.limits.learned import GUESS_SECONDS, NAMED_SECONDS
from tests.kit.limit_sessions import BELIEVED, LATE_KEY, Fleet, answers, conversation, fleet, said, summarises
from tests.kit.overflow_wordings import WORDINGS
from tests.kit.upstream import StandIn

TURNS, SIZE = 100, 240
"""Turns of a session, and tokens of new text in each."""
TURNS_FULL, SIZE_FULL = 300, 80
"""With ``--full``: the same growth in smaller turns."""
PARTS = (0.3, 0.6, 0.9)
CASES = [
    pytest.param(wording, part, marks=[] if (number + place) % len(PARTS) == 0 else pytest.mark.full)
    for number, wording in enumerate(WORDINGS)
    for place, part in enumerate(PARTS)
]
"""One limit for each wording, so that four wordings test each limit. ``--full`` runs all combinations."""

UNTOLD = "llama.cpp without figures"

LARGE = 7_700
"""Tokens. More than each of the lower limits. Also too far from their stated numbers to be the same size in another
count."""


def model_of(wording: str, part: float) -> str:
    return f"{wording.replace(' ', '-')}-{part}"


def stand_in(part: float) -> StandIn:
    return StandIn(window=int(BELIEVED * part), max_output=BELIEVED // 8, responder=answers, summariser=summarises)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    wordings = {model_of(wording, part): wording for wording in WORDINGS for part in PARTS}
    upstreams = {model_of(wording, part): stand_in(part) for wording in WORDINGS for part in PARTS}
    with fleet(upstreams, tmp_path_factory.mktemp("limits"), wordings) as running:
        yield running


@pytest.mark.parametrize(("wording", "part"), CASES)
def test_one_refusal_for_each_limit(wording: str, part: float, sessions: Fleet, full: bool) -> None:
    """Run a session of many turns. ``--full`` runs 36 sessions of 300 turns, otherwise 12 of 100 larger turns run."""
    turns, each = (TURNS_FULL, SIZE_FULL) if full else (TURNS, SIZE)
    low = int(BELIEVED * part)
    # With the default trigger and reserve nothing of nine tenths of the window is ever sent.
    key, size = (LATE_KEY, 250) if part == 0.9 else ("sk-client", 400)
    streams = (True,) if WORDINGS[wording].only_streams else (False, True)
    with conversation(sessions, model_of(wording, part), key, streams) as talk:
        talk.go_on(turns // 3, each)
        assert talk.refused == talk.retries == 1
        talk.largest = 0
        talk.go_on(turns - turns // 3, each)
        assert talk.refused == talk.retries == 1
        assert talk.largest > low * 0.45, "what is left is made use of"
        assert talk.summaries >= 2
        long, talk.messages = talk.messages, []

        talk.upstream.window = BELIEVED
        talk.ask([{"role": "user", "content": said(1, LARGE)}])
        assert talk.grows_beyond(low, 40, size), "more than the limit was taken, so it is one no more"
        assert talk.refused == talk.retries == 1

        talk.upstream.window = low
        talk.go_on(6)
        # A limit that a recent answer contradicts is believed when it is told twice.
        told = 1 + (2 if part == 0.3 or (wording == UNTOLD and part == 0.6) else 1)
        assert talk.refused == talk.retries == told

        talk.upstream.window = BELIEVED
        sessions.now[0] += (GUESS_SECONDS if wording == UNTOLD else NAMED_SECONDS) - 60
        assert not talk.grows_beyond(low, 3, 80), "the limit still holds"
        sessions.now[0] += 120
        talk.messages = []
        assert talk.grows_beyond(low, 40, size), "the profile's own is tried again"
        talk.messages = long
        talk.go_on(3)
        assert talk.refused == talk.retries == told
