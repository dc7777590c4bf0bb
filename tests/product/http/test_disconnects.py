"""A client that leaves ends all work that was done for it: at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.demo.serving import serve
from proxy.http.request_body import ClientLeft, Sent, leaving
from proxy.server.http_protocol import BoundedProtocol
from tests.kit.client import CHAT, StartProxy, ask, chat, connected, request_bytes
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, head, stream_head

SOON = 15.0
"""Seconds in which everything must have ended, however busy the machine is. What is not told of a leaving takes 60."""

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
SUMMARY = answer(json.dumps({"choices": [{"message": {"content": "They talked about nothing."}}]}).encode())
POLICY = {
    "trigger": {"tokens": 1000},
    "keep": {"messages": 2},
    "summary": {"max_tokens": 100},
    "user_messages": {"max_tokens": 200},
    "index": {"max_tokens": 50},
}
TRIGGERED = {"policies": {"default": POLICY}}


class Watched:
    """Around a proxy: knows the tasks on its event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._usual: set[asyncio.Task[object]] = set()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            self._loop = asyncio.get_running_loop()
            await app(scope, receive, send)

        return watched

    def left_over(self) -> list[str]:
        """The tasks that were not there when it was asked first."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._left_over(), self._loop).result(5)

    async def _left_over(self) -> list[str]:
        tasks = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        if not self._usual:
            self._usual = tasks
        return [repr(task) for task in tasks - self._usual]

    def comes_to_rest(self) -> bool:
        """Whether no task is left after a while."""
        until = time.monotonic() + SOON
        while self.left_over() and time.monotonic() < until:
            time.sleep(0.01)
        return not self.left_over()


class House:
    """A proxy that is watched, and its upstream."""

    def __init__(self, start_proxy: StartProxy, upstream: RawUpstream) -> None:
        self.upstream = upstream
        self.watched = Watched()
        self.url = start_proxy(upstream.url, TRIGGERED, wrap=self.watched.wrap)
        self.watched.left_over()

    def check_at_rest(self, left: float, index: int = -1) -> None:
        """The upstream's connection was closed soon after the client left, and nothing goes on."""
        ended = self.upstream.wait_left(index, seconds=SOON)
        assert ended is not None
        assert ended - left < SOON
        assert self.watched.comes_to_rest(), self.watched.left_over()


@pytest.fixture
def house(start_proxy: StartProxy) -> Iterator[House]:
    with RawUpstream(lambda _: [End.SILENCE]) as upstream:
        yield House(start_proxy, upstream)


def leave(connection: socket.socket) -> float:
    connection.close()
    return time.monotonic()


def talk(turns: int = 12) -> list[dict[str, str]]:
    """Most of it is the assistant's, since the user's own words stay beside a summary."""
    roles, sizes = ("user", "assistant"), (3, 200)
    return [
        {"role": roles[turn % 2], "content": f"{turn}. " + "some words " * sizes[turn % 2]} for turn in range(turns)
    ]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("wait", [0.0, 0.2])
def test_while_the_upstream_says_nothing(house: House, streams: bool, wait: float) -> None:
    connection = connected(house.url)
    connection.sendall(request_bytes(chat(stream=streams)))
    assert house.upstream.wait_arrived(1)
    time.sleep(wait)
    house.check_at_rest(leave(connection))


@pytest.mark.parametrize(
    "begun",
    [
        [stream_head(), End.SILENCE],
        [stream_head(), chunk(b": comment\n\n"), End.SILENCE],
        [stream_head(), chunk(ROLE), End.SILENCE],
        [head("200 OK", [("Content-Length", "100")]), End.SILENCE],
        [head("200 OK", [("Content-Length", "100")]), b'{"choices":', End.SILENCE],
        [head("400 Bad", [("Content-Length", "100")]), b'{"error":', End.SILENCE],
    ],
)
def test_while_the_answers_beginning_is_held_back(house: House, begun: list[Step]) -> None:
    house.upstream.script = lambda _: begun
    connection = connected(house.url)
    connection.sendall(request_bytes(chat(stream=True)))
    assert house.upstream.wait_arrived(1)
    time.sleep(0.1)
    house.check_at_rest(leave(connection))


@pytest.mark.parametrize(
    "begun",
    [
        [stream_head(), chunk(ROLE + CONTENT), End.SILENCE],
        [stream_head(), chunk(ROLE + CONTENT + b'data: {"half'), End.SILENCE],
        [head("200 OK", [("Content-Length", "100")]), b'{"choices": [{"message": {"content": "hi', End.SILENCE],
    ],
)
def test_in_the_middle_of_an_answer(house: House, begun: list[Step]) -> None:
    house.upstream.script = lambda _: begun
    for path in (CHAT, "/v1/responses"):
        connection = connected(house.url)
        connection.sendall(request_bytes(chat(stream=True), path))
        assert connection.recv(10)
        time.sleep(0.1)
        house.check_at_rest(leave(connection))


def test_a_client_that_reads_nothing_and_leaves(house: House) -> None:
    """Back-pressure: the upstream is not read further than a buffer, and let go when the client goes."""
    sent = 0

    def endless(_: Arrived) -> Iterator[Step]:
        nonlocal sent
        yield stream_head()
        while sent < 200_000_000:
            yield chunk(CONTENT * 1_000)
            sent += len(CONTENT) * 1_000

    house.upstream.script = endless  # type: ignore[assignment]
    connection = connected(house.url)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.sendall(request_bytes(chat(stream=True)))
    until, held = time.monotonic() + SOON, -1
    while (held != sent or not sent) and time.monotonic() < until:
        held = sent
        time.sleep(0.2)
    assert 0 < sent == held < 20_000_000
    leave(connection)
    assert house.watched.comes_to_rest(), house.watched.left_over()
    assert sent < 30_000_000


def test_while_a_refused_request_is_sent_again(house: House) -> None:
    refusal = answer(
        b'{"error":{"message":"This model\'s maximum context length is 2000 tokens. However, your messages resulted in '
        b'2500 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}',
        "400 Bad Request",
    )
    house.upstream.script = lambda _: [refusal] if len(house.upstream.arrived) == 1 else [End.SILENCE]
    connection = connected(house.url)
    connection.sendall(request_bytes(chat(messages=[{"role": "user", "content": "x " * 2_000}, *talk(2)])))
    assert house.upstream.wait_arrived(1)
    time.sleep(0.3)
    house.check_at_rest(leave(connection))


def test_two_wait_for_one_summary_and_one_leaves(house: House, waiting: Callable[[int], bool]) -> None:
    go = threading.Event()

    def script(arrived: Arrived) -> Iterator[Step]:
        if b"<transcript>" in arrived.body:
            yield go
            yield SUMMARY
        else:
            yield answer(b'{"choices":[]}')

    house.upstream.script = script  # type: ignore[assignment]
    body = chat(messages=talk())
    first = connected(house.url)
    first.sendall(request_bytes(body))
    assert house.upstream.wait_arrived(1)
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(ask, house.url, CHAT, body) for _ in range(3)]
        assert waiting(4)
        leave(first)
        time.sleep(0.1)
        go.set()
        answers = [other.result(60) for other in others]
    for got in answers:
        assert (got.status, got.header("x-compaction"), got.header("x-compaction-summary")) == (
            200,
            "compacted",
            "made",
        )
    summaries = [arrived for arrived in house.upstream.arrived if b"<transcript>" in arrived.body]
    assert len(summaries) == 1
    assert house.watched.comes_to_rest(), house.watched.left_over()


def test_whoever_comes_as_the_last_one_leaves_gets_an_answer(house: House) -> None:
    house.upstream.script = lambda arrived: [0.1, SUMMARY] if b"<transcript>" in arrived.body else [answer()]
    for turn in range(10):
        body = chat(messages=[{"role": "user", "content": str(turn)}, *talk()])
        before = len(house.upstream.arrived)
        first, second = connected(house.url), connected(house.url)
        first.sendall(request_bytes(body))
        assert house.upstream.wait_arrived(before + 1)
        first.close()
        time.sleep(turn * 0.001)
        second.sendall(request_bytes(body))
        assert second.recv(12) == b"HTTP/1.1 200"
        second.close()


def test_other_paths(house: House) -> None:
    for request in (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\n\r\n",
        request_bytes(b"{}", "/v1/embeddings"),
    ):
        before = len(house.upstream.arrived)
        connection = connected(house.url)
        connection.sendall(request)
        assert house.upstream.wait_arrived(before + 1)
        time.sleep(0.1)
        house.check_at_rest(leave(connection))


def test_in_the_middle_of_an_upload(house: House) -> None:
    connection = connected(house.url)
    connection.sendall(
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 2_000_000
    )
    time.sleep(0.3)
    house.check_at_rest(leave(connection))
    connection = connected(house.url)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n" + b"x" * 2_000
    )
    leave(connection)
    assert house.watched.comes_to_rest(), house.watched.left_over()


def test_a_hundred_at_once(house: House) -> None:
    connections = [connected(house.url) for _ in range(100)]
    for connection in connections:
        connection.sendall(request_bytes(chat(stream=True)))
    assert house.upstream.wait_arrived(100, 10)
    for connection in connections:
        connection.close()
    left = time.monotonic()
    for index in range(100):
        house.check_at_rest(left, index)


def test_after_a_whole_answer_nothing_is_left(house: House) -> None:
    house.upstream.script = lambda _: [answer(b'{"choices":[]}')]
    for path in (CHAT, "/v1/models", "/v1/embeddings"):
        for _ in range(10):
            assert ask(house.url, path, None if path == "/v1/models" else chat()).status == 200
    assert house.watched.comes_to_rest(), house.watched.left_over()
    assert house.upstream.connections == 1


@pytest.mark.parametrize("http", ["h11", BoundedProtocol])
def test_work_after_the_last_byte_is_not_cancelled(http: type[asyncio.Protocol] | Literal["h11"]) -> None:
    """Servers report a disconnect once the response is complete; the client has it all by then."""
    outcomes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sent = Sent(send)
        if scope["type"] != "http":
            await Starlette()(scope, receive, send)
            return
        await receive()
        try:
            with leaving(receive, sent):
                await asyncio.sleep(0.1)
                await sent({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
                await sent({"type": "http.response.body", "body": b"{}"})
                await asyncio.sleep(0.1)
                outcomes.append("whole")
        except ClientLeft:
            outcomes.append("left")

    with serve(app, http=http) as url:
        assert ask(url, CHAT).body == b"{}"
        until = time.monotonic() + SOON
        while not outcomes and time.monotonic() < until:
            time.sleep(0.005)
    assert outcomes == ["whole"]
