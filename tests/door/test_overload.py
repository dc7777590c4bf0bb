"""More than the proxy can take on: who is turned away is told so at once, and everybody else is served."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from proxy import door

from .client import CHAT, JSON, Got, StartProxy, ask, chat, connected, read_all, request_bytes
from .raw_upstream import Arrived, Stage, Step, answer, chunk, stream_head

SLOW = 3.0
"""Seconds that the upstream takes."""

SOON = 2.5
"""Seconds within which a refusal, or an answer about health, counts as quick on a busy machine. Less than ``SLOW``."""

DONE = b'{"choices":[]}'


def slow(arrived: Arrived) -> list[Step]:
    return [SLOW, answer(DONE)] if b"slow" in arrived.body else [answer(DONE)]


def overloaded(got: Got) -> bool:
    """Whether a request was turned away, checked for what the refusal says."""
    if got.status == 200:
        return False
    assert got.status == 503
    assert got.header("retry-after") == "1"
    assert (got.error["type"], got.error["code"], got.error["param"]) == ("server_error", "overloaded", None)
    assert "Try again" in got.error["message"]
    return True


class Counted:
    """A script that counts how many slow requests are in work at the upstream."""

    def __init__(self) -> None:
        self.most = 0
        self._lock = threading.Lock()
        self._arrived: list[float] = []

    def __call__(self, arrived: Arrived) -> list[Step]:
        if b"slow" in arrived.body:
            with self._lock:
                now = time.monotonic()
                self._arrived = [at for at in self._arrived if now - at < SLOW * 0.9] + [now]
                self.most = max(self.most, len(self._arrived))
        return slow(arrived)


def timed(url: str, **request: Any) -> tuple[Got, float]:
    began = time.monotonic()
    return ask(url, **request), time.monotonic() - began


@pytest.mark.long
def test_ten_times_what_it_can_take_on(stage: Stage, start_proxy: StartProxy) -> None:
    script = Counted()
    with stage(script) as upstream:
        url = start_proxy(upstream.url, {"server": {"max_concurrent": 5, "max_queue": 3, "queue_timeout": 20}})
        ask(url, body=chat())
        with ThreadPoolExecutor(50) as clients, ThreadPoolExecutor(1) as doctor:
            flood = [clients.submit(timed, url, body=chat("slow")) for _ in range(50)]
            time.sleep(0.5)
            checks = [doctor.submit(timed, url, path=path, body=None) for path in ("/livez", "/readyz", "/metrics")]
            healthy = [check.result() for check in checks]
            results = [found.result() for found in flood]
        after, seconds = timed(url, body=chat())
    refusals = [took for got, took in results if overloaded(got)]
    assert len(refusals) == 42
    assert sorted(refusals)[-5] < SLOW, "a refusal does not wait for anything"
    assert script.most <= 5
    assert [got.status for got, _ in healthy] == [200, 200, 200]
    assert max(took for _, took in healthy) < SOON
    assert (after.status, seconds < SOON) == (200, True), "it recovers at once"
    assert re.search(
        r'^compaction_refusals_total\{reason="overload"\} [1-9]', healthy[2][0].body.decode(), re.MULTILINE
    )


def test_a_client_that_tries_again_gets_through(stage: Stage, start_proxy: StartProxy) -> None:
    with stage(lambda arrived: [0.5, answer(DONE)]) as upstream:
        url = start_proxy(upstream.url, {"server": {"max_concurrent": 1, "max_queue": 0}})
        with (
            ThreadPoolExecutor(3) as clients,
            openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=20) as caller,
        ):

            def create(_: int) -> object:
                return caller.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])

            assert len(list(clients.map(create, range(3)))) == 3


def test_who_waits_too_long_is_turned_away(stage: Stage, start_proxy: StartProxy) -> None:
    with stage(slow) as upstream:
        url = start_proxy(upstream.url, {"server": {"max_concurrent": 1, "max_queue": 5, "queue_timeout": 0.3}})
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(ask, url, body=chat("slow"))
            assert upstream.wait_arrived(1)
            got, seconds = timed(url, body=chat())
            assert overloaded(got)
            assert 0.3 <= seconds < SLOW
            assert first.result().status == 200


ONE: dict[str, Any] = {"server": {"max_concurrent": 1, "max_queue": 0}}


@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/v1/models", "/compaction/archive/0", "/nothing"])
def test_no_path_but_health_gets_past(path: str, stage: Stage, start_proxy: StartProxy) -> None:
    with stage(slow) as upstream:
        url = start_proxy(upstream.url, ONE)
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(ask, url, body=chat("slow"))
            assert upstream.wait_arrived(1)
            # Its body never comes: the answer does not wait for it.
            with connected(url) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: proxy.test\r\nContent-Length: 60000000\r\n\r\n"
                connection.sendall(head.encode() + b"{")
                assert connection.recv(65_536).startswith(b"HTTP/1.1 503 ")
            assert not first.done()
            assert first.result().status == 200


def streaming(arrived: Arrived) -> list[Step]:
    event = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n')
    if b"slow" not in arrived.body:
        return [answer(DONE)]
    return [stream_head(), event, event, SLOW, chunk(b"data: [DONE]\n\n"), chunk(b"")]


def test_a_stream_holds_its_place_until_its_end(stage: Stage, start_proxy: StartProxy) -> None:
    with stage(streaming) as upstream:
        url = start_proxy(upstream.url, ONE)
        with connected(url) as connection:
            connection.sendall(request_bytes(chat("slow", stream=True), headers=[JSON, ("Connection", "close")]))
            assert b"word " in connection.recv(65_536)
            assert overloaded(ask(url, body=chat()))
            assert b"[DONE]" in read_all(connection)
        assert soon_served(url)


def soon_served(url: str) -> bool:
    """Whether a request gets a place within a while."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        if not overloaded(ask(url, body=chat())):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("wait", [0.0, 0.5])
def test_who_leaves_gives_the_place_back(wait: float, stage: Stage, start_proxy: StartProxy) -> None:
    with stage(lambda arrived: [60.0] if b"slow" in arrived.body else [answer(DONE)]) as upstream:
        url = start_proxy(upstream.url, ONE)
        with connected(url) as connection:
            connection.sendall(request_bytes(chat("slow")))
            assert upstream.wait_arrived(1)
            time.sleep(wait)
        assert soon_served(url)


LARGE = chat("x" * 900_000)
MEMORY: dict[str, Any] = {
    "server": {"body_limit": "1MB", "max_body_memory": "2MB", "queue_timeout": 0.5},
    "policies": {"default": {"mode": "off"}},
}


def by_size(arrived: Arrived) -> list[Step]:
    return [SLOW, answer(DONE)] if len(arrived.body) > 800_000 else [answer(DONE)]


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
@pytest.mark.parametrize("in_chunks", [False, True])
def test_bodies_take_no_more_memory_than_there_is(
    path: str, in_chunks: bool, stage: Stage, start_proxy: StartProxy
) -> None:
    with stage(by_size) as upstream:
        url = start_proxy(upstream.url, MEMORY)
        with ThreadPoolExecutor(2) as clients:
            large = [clients.submit(ask, url, body=LARGE) for _ in range(2)]
            assert upstream.wait_arrived(2)
            if path == "/v1/files" and in_chunks:
                # What is passed on as it comes is never held.
                assert ask(url, path, iter([LARGE])).status == 200
            else:
                body: Any = iter([LARGE[:500_000], LARGE[500_000:]]) if in_chunks else LARGE
                assert overloaded(ask(url, path, body))
            assert not overloaded(ask(url, path, chat()))
            assert [found.result().status for found in large] == [200, 200]
        assert ask(url, path, LARGE).status == 200


def test_a_body_waits_for_memory(stage: Stage, start_proxy: StartProxy) -> None:
    with stage(by_size) as upstream:
        url = start_proxy(upstream.url, {**MEMORY, "server": {**MEMORY["server"], "queue_timeout": 30}})
        with ThreadPoolExecutor(4) as clients:
            results = list(clients.map(lambda _: ask(url, body=LARGE).status, range(4)))
        assert results == [200] * 4


def test_who_was_turned_away_can_use_the_connection_again(stage: Stage, start_proxy: StartProxy) -> None:
    with stage(slow) as upstream:
        url = start_proxy(upstream.url, ONE)
        with ThreadPoolExecutor(1) as clients, connected(url) as connection:
            first = clients.submit(ask, url, body=chat("slow"))
            assert upstream.wait_arrived(1)
            connection.sendall(request_bytes(LARGE))
            assert connection.recv(65_536).startswith(b"HTTP/1.1 503 ")
            assert first.result().status == 200
            connection.sendall(request_bytes(chat(), headers=[JSON, ("Connection", "close")]))
            assert b"HTTP/1.1 200 " in read_all(connection)


# A body without a length is passed on as it comes, and has the time that the upstream gives it.
@pytest.mark.parametrize(
    ("path", "length"),
    [
        (CHAT, "Content-Length: 1000"),
        (CHAT, "Transfer-Encoding: chunked"),
        ("/v1/files", "Content-Length: 1000"),
    ],
)
def test_a_body_that_does_not_come_gives_the_place_back(
    path: str, length: str, stage: Stage, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 0.5)
    with stage(slow) as upstream:
        url = start_proxy(upstream.url, ONE)
        with connected(url) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: proxy.test\r\n{length}\r\n\r\n".encode())
            told = connection.recv(65_536)
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in told
        assert soon_served(url)
        assert [arrived.target for arrived in upstream.arrived] == [CHAT]


def test_a_slow_body_that_keeps_coming_is_taken(
    stage: Stage, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "BODY_SECONDS", 1.5)
    monkeypatch.setattr(door, "BODY_RATE", 10)
    with stage(slow) as upstream:
        body = chat("y" * 200)

        def parts() -> Iterator[bytes]:
            for start in range(0, len(body), 50):
                time.sleep(0.5)
                yield body[start : start + 50]

        assert ask(start_proxy(upstream.url), body=parts()).status == 200
