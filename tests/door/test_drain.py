"""A signal to stop: open answers end properly, new connections are refused, the exit is clean."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from .client import CHAT, ask, chat
from .raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = 20


def slowly(arrived: Arrived) -> list[Step]:
    """Two seconds of stream, or a plain answer after one."""
    if b'"stream": true' not in arrived.body:
        return [1.0, answer(b'{"choices":[]}')]
    steps: list[Step] = [stream_head()]
    for _ in range(EVENTS):
        steps += [chunk(EVENT), 0.1]
    return [*steps, chunk(DONE), chunk(b"")]


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
                command, stdout=log, stderr=log, cwd=Path(__file__).parents[2], env=dict(os.environ)
            )

    def wait_ready(self) -> None:
        until = time.monotonic() + 20
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
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(slowly) as running:
        yield running


@pytest.fixture
def server(upstream: RawUpstream, tmp_path: Path) -> Iterator[Server]:
    running = Server(upstream.url, tmp_path)
    try:
        running.wait_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(5)


def test_open_answers_end_and_new_connections_are_refused(server: Server, upstream: RawUpstream) -> None:
    with ThreadPoolExecutor(30) as pool:
        streams = [pool.submit(ask, server.url, CHAT, chat(stream=True)) for _ in range(20)]
        plain = [pool.submit(ask, server.url, CHAT, chat()) for _ in range(5)]
        assert upstream.wait_arrived(25, 10)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.refuses()
        for stream in streams:
            got = stream.result(10)
            assert (got.status, got.body, got.whole) == (200, EVENT * EVENTS + DONE, True)
        for answered in plain:
            assert (answered.result(10).status, json.loads(answered.result().body)) == (200, {"choices": []})
    assert server.process.wait(5) == 0
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "sk-canary" not in log


def test_an_idle_server_ends_at_once(server: Server) -> None:
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) == 0
    assert time.monotonic() - began < 2


def test_answers_that_take_too_long_are_cut(upstream: RawUpstream, tmp_path: Path) -> None:
    """``server.drain`` bounds the wait."""
    server = Server(upstream.url, tmp_path, drain=1)
    try:
        server.wait_ready()
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(ask, server.url, CHAT, chat(stream=True))
            assert upstream.wait_arrived(1)
            time.sleep(0.2)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(5) == 0
            assert time.monotonic() - began < 3
            got = stream.result(5)
        assert got.body.startswith(EVENT)
        assert not got.whole or b"[DONE]" not in got.body
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(5)
