"""Failed summaries: the proxy sends a digest in their place, and no client gets an error."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.front_door import (
    WITHOUT_A_MODEL,
    Front,
    always,
    front,
    long_talk,
)
from tests.kit.upstream import Reply

POLICIES = {"default": {"summary": {"timeout": 0.5}}, "patient": {"summary": {"timeout": 10}}}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(POLICIES, tmp_path_factory.mktemp("failures")) as running:
        yield running


def test_72_the_wait_is_bounded_and_shared(door: Front) -> None:
    messages = long_talk("72 ")
    started = time.perf_counter()
    with door.scripted(summariser=always(Reply(content="Goal: NOTES.", delay=20))):
        seen = door.ask(messages, caller=3)
    assert (seen.status, seen.headers["x-compaction-summary"]) == (200, "digest")
    assert WITHOUT_A_MODEL in seen.summary
    assert time.perf_counter() - started < 17
    before = len(door.upstream.requests)
    with (
        door.scripted(summariser=always(Reply(content="Goal: NOTES of all.", delay=0.5))),
        ThreadPoolExecutor(4) as threads,
    ):
        all_seen = list(threads.map(lambda _: door.ask(messages, "patient"), range(4)))
    requests = door.upstream.requests[before:]
    assert [request.summary for request in requests].count(True) == 1
    sent = {request.raw for request in requests if not request.summary}
    assert len(sent) == 1, "all of them got the same one"
    assert b"NOTES of all" in sent.pop()
    assert [seen.status for seen in all_seen] == [200] * 4
