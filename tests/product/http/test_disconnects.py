"""A client that leaves ends all work that was done for it: at once, and nothing is left behind."""

import asyncio
import time
from collections.abc import Iterator
from typing import Literal

import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from proxy.http.request_body import ClientLeft, Sent, leaving
from proxy.server.http_protocol import BoundedProtocol
from proxy.server.loopback import serve
from tests.kit.client import CHAT, StartProxy, ask, chat, connected, request_bytes
from tests.kit.raw_upstream import End, RawUpstream, answer
from tests.kit.waiting import until
from tests.kit.watched import SUMMARY, House, leave, talk


@pytest.fixture
def house(start_proxy: StartProxy) -> Iterator[House]:
    with RawUpstream(lambda _: [End.SILENCE]) as upstream:
        yield House(start_proxy, upstream)


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
        assert until(lambda: outcomes)
    assert outcomes == ["whole"]
