"""A signal to stop: open answers end properly, new connections are refused, the exit is clean."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.kit.client import CHAT, ask, chat, connected, read_all, read_until, request_bytes
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = 20


class Upstream(RawUpstream):
    """Goes on with its answers, after the first half of a stream, once it is let."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.go = threading.Event()

    def _answer(self, arrived: Arrived) -> list[Step]:
        if b'"stream": true' not in arrived.body:
            return [self.go, answer(b'{"choices":[]}')]
        half = [chunk(EVENT)] * (EVENTS // 2)
        return [stream_head(), *half, self.go, *half, chunk(DONE), chunk(b"")]


class Server:
    """The program itself, in a process of its own."""

    def __init__(self, upstream: str, folder: Path, **server: object) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = folder / "config.yaml"
        settings = {
            "server": {"port": self.port, **server},
            "store": {"url": f"sqlite:///{folder / 'store.db'}"},
            "upstreams": {"main": {"provider": "openai", "base_url": f"{upstream}/v1", "api_key": "sk-canary"}},
        }
        config.write_text(yaml.safe_dump(settings))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "proxy", "serve", "--config", str(config)]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=Path(__file__).parents[3], env=dict(os.environ)
            )

    def wait_ready(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if ask(self.url, "/readyz", None).status == 200:
                    return
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise AssertionError(self.log.read_text())

    def refuses(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except ConnectionRefusedError:
            return True
        return False


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as running:
        yield running


@pytest.fixture
def server(upstream: Upstream, tmp_path: Path) -> Iterator[Server]:
    running = Server(upstream.url, tmp_path)
    try:
        running.wait_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(20)


def test_open_answers_end_and_new_connections_are_refused(server: Server, upstream: Upstream) -> None:
    with ThreadPoolExecutor(30) as pool:
        streams = [pool.submit(ask, server.url, CHAT, chat(stream=True)) for _ in range(20)]
        plain = [pool.submit(ask, server.url, CHAT, chat()) for _ in range(5)]
        assert upstream.wait_arrived(25, 10)
        stop(server)
        assert not any(stream.done() for stream in streams)
        upstream.go.set()
        for stream in streams:
            got = stream.result(10)
            assert (got.status, got.body, got.whole) == (200, EVENT * EVENTS + DONE, True)
        for answered in plain:
            assert (answered.result(10).status, json.loads(answered.result().body)) == (200, {"choices": []})
    assert server.process.wait(20) == 0
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "sk-canary" not in log


@pytest.mark.parametrize("sent", [0, 30], ids=["nothing", "half a head"])
def test_a_connection_without_a_whole_request_is_still_served(sent: int, server: Server, upstream: Upstream) -> None:
    upstream.go.set()
    request = request_bytes(chat())
    with connected(server.url) as connection:
        connection.sendall(request[:sent])
        assert ask(server.url, "/livez", None).status == 200  # connections are accepted in order
        stop(server)
        connection.sendall(request[sent:])
        got = read_all(connection)
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head.split(b"\r\n")
    assert b'{"choices":[]}' in body
    assert server.process.wait(20) == 0


def test_connections_that_send_nothing_hold_nobody_up(server: Server) -> None:
    """An idle connection and a new one are closed, and the process ends."""
    with connected(server.url) as idle, connected(server.url) as new:
        idle.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(idle, b"\r\n\r\n")
        stop(server)
        assert server.process.wait(20) == 0
        read_all(idle)
        assert read_all(new) == b""


def stop(server: Server) -> None:
    """Send SIGTERM, and wait until the server has stopped listening."""
    server.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + 15
    while not server.refuses() and time.monotonic() < until:
        time.sleep(0.01)
    assert server.refuses()


def test_an_idle_server_ends_at_once(server: Server) -> None:
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 15, "half of the time that answers would have had"


def test_answers_that_take_too_long_are_cut(upstream: Upstream, tmp_path: Path) -> None:
    """``server.drain`` bounds the wait."""
    server = Server(upstream.url, tmp_path, drain=1)
    try:
        server.wait_ready()
        with connected(server.url) as connection:
            connection.sendall(request_bytes(chat(stream=True)))
            read_until(connection, EVENT)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
            assert b"[DONE]" not in read_all(connection)
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(20)
