"""R6, R14: a signal to stop, or to begin anew, costs nobody an answer."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from tests.kit.client import CHAT, ask, chat
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head
from tests.product.http.test_drain import DONE, EVENT, Server
from tests.product.http.test_failures import free_port

ROOT = Path(__file__).parents[2]
STREAMS = 50


def once_let(go: threading.Event) -> Callable[[Arrived], list[Step]]:
    """Streams that go on behind their first event once they are let."""
    rest = [chunk(EVENT)] * 14
    return lambda arrived: [stream_head(), chunk(EVENT), go, *rest, chunk(DONE), chunk(b"")]


def in_a_second(arrived: Arrived) -> Iterator[Step]:
    if b'"stream": true' not in arrived.body:
        yield 0.05
        yield answer(b'{"choices":[]}')
        return
    yield stream_head()
    for _ in range(15):
        yield chunk(EVENT)
        yield 0.1
    yield chunk(DONE)
    yield chunk(b"")


def test_fifty_streams_end_after_a_signal(tmp_path: Path) -> None:
    """R6: nobody new gets in, at once, and nobody who is in is cut off."""
    go = threading.Event()
    with RawUpstream(once_let(go)) as upstream:
        server = Server(upstream.url, tmp_path)
        try:
            server.wait_ready()
            with ThreadPoolExecutor(STREAMS) as pool:
                streams = [pool.submit(ask, server.url, CHAT, chat(stream=True)) for _ in range(STREAMS)]
                assert upstream.wait_arrived(STREAMS, 15)
                server.process.send_signal(signal.SIGTERM)
                until = time.monotonic() + 15
                while not server.refuses() and time.monotonic() < until:
                    time.sleep(0.01)
                assert server.refuses(), "not ready, and not there for anybody new"
                assert not any(stream.done() for stream in streams)
                go.set()
                for stream in streams:
                    got = stream.result(30)
                    assert (got.status, got.body, got.whole) == (200, EVENT * 15 + DONE, True)
            assert server.process.wait(10) == 0
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait(20)


@contextlib.contextmanager
def with_workers(upstream: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The program with two worker processes."""
    port = free_port()
    config = folder / "config.yaml"
    store = {"url": f"sqlite:///{folder}/store.db"}
    config.write_text(yaml.safe_dump({"store": store, "upstreams": {"main": {"base_url": f"{upstream}/v1"}}}))
    command = [sys.executable, "-m", "proxy", "serve", "--config", str(config), "--port", str(port), "--workers", "2"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ))
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, "the workers did not start"
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(f"http://127.0.0.1:{port}", "/readyz", None).status == 200:
                    break
            time.sleep(0.05)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(20)


def workers(process: subprocess.Popen[bytes]) -> set[int]:
    """The processes below the first one that serve; one of them keeps count of resources."""
    found = set()
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


def comes_true(what: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Whether something becomes true within the time."""
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(0.1)
    return what()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="no such signal here")
def test_workers_are_replaced_one_after_another_and_nobody_notices(tmp_path: Path) -> None:
    """R14: SIGUSR2, while plain requests and streams come all the time, each on a connection of its own."""
    failed: list[str] = []
    answered = 0
    over = threading.Event()
    lock = threading.Lock()

    def calling(url: str, streams: bool) -> None:
        nonlocal answered
        while not over.is_set():
            try:
                got = ask(url, CHAT, chat(stream=streams))
                good = (got.status, got.whole) == (200, True) and (not streams or got.body.endswith(DONE))
                fault = "" if good else f"{got.status} {got.body[-100:]!r}"
            except (OSError, http.client.HTTPException) as error:
                fault = repr(error)
            with lock:
                answered += not fault
                if fault:
                    failed.append(fault)

    with RawUpstream(in_a_second) as upstream, with_workers(upstream.url, tmp_path) as (process, url):  # type: ignore[arg-type]
        log = tmp_path / "log"

        def begun() -> int:
            return log.read_text().count("Application startup complete")

        assert comes_true(lambda: begun() >= 2)
        before = workers(process)
        assert len(before) == 2
        threads = [threading.Thread(target=calling, args=(url, number > 1)) for number in range(6)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            process.send_signal(signal.SIGUSR2)
            assert comes_true(lambda: begun() >= 4 and not workers(process) & before)
            time.sleep(1)
        finally:
            over.set()
            for thread in threads:
                thread.join(15)
    assert failed == [], f"{len(failed)} of {answered + len(failed)} requests failed"
    assert answered > 50
