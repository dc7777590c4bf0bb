"""No request that fits is ever compacted because of something that was learned, and none is sent twice.

``FITTING_SESSIONS=10000`` runs as many sessions as that.
"""

import asyncio
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import load
from proxy.limits.learned import CAUTION, LearnedLimit, LearnedLimits
from proxy.server.app import Proxy
from tests.product.properties.fitting import Figures, Sessions

SESSIONS = int(os.environ.get("FITTING_SESSIONS", "150"))


def test_requests_that_fit_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    profile = {"context_window": 8_000, "tokenizer": "o200k_base"}
    configured = {
        "store": {"url": "sqlite://"},
        "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1"}},
        "models": [{"match": "*", "upstream": "main", "profile": profile}],
    }
    file.write_text(yaml.safe_dump(configured))

    async def run() -> Figures:
        service = Proxy(load(file, {})).service
        sessions = Sessions(service)
        for seed in range(SESSIONS):
            await sessions.run(seed)
        await service.aclose()
        return sessions.figures

    figures = asyncio.run(run())
    print(figures)
    assert figures.faults == []
    assert (figures.compacted, figures.learned, figures.extra_calls) == (0, 0, 0)
    assert figures.requests > 3 * SESSIONS


UNSTATED = st.builds(
    LearnedLimit,
    st.none() | st.integers(256, 200_000),
    st.none() | st.integers(256, 200_000),
    source=st.sampled_from(("guess", "usage")),
)


@given(st.lists(st.integers(1, 200_000) | UNSTATED, max_size=20))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_limit_that_nobody_stated_is_never_below_what_was_answered_lately(events: list[int | LearnedLimit]) -> None:
    """Numbers are the sizes of requests that were answered."""
    known, largest = LearnedLimits(clock=lambda: 0.0), 0
    for event in events:
        if isinstance(event, int):
            largest = max(largest, event)
            known.answered("u", "m", "t", event)
            known.confirm("u", "m", "t", event, event, 1.0)
        else:
            known.learn("u", "m", "t", event)
        limit = known.get("u", "m", "t")
        for figure in (limit.input, limit.total) if limit is not None else ():
            assert figure is None or figure >= largest


@pytest.mark.parametrize("answered", [0, 2_000, 5_000])
def test_a_named_limit_is_contradicted_by_a_much_larger_answer(answered: int) -> None:
    known = LearnedLimits(clock=lambda: 0.0)
    known.answered("u", "m", "t", answered)
    told = LearnedLimit(total=int(2_000 * CAUTION), named=2_000)
    assert known.contradicts("u", "m", "t", told, 6_000) is (answered == 5_000)
    assert not known.contradicts("u", "m", "another tenant", told, 6_000)
