"""R1: a client that leaves, at every point and by every door: the upstream's work ends, and no task is left.

A summary is the exception: it is finished, as it belongs to the conversation.
"""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.kit.anthropic_server import AnthropicServer
from tests.kit.client import CHAT, StartProxy, ask, chat, connected, request_bytes
from tests.kit.combinations import combined
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, head, stream_head
from tests.kit.waiting import until
from tests.kit.watched import CONTENT, ROLE, SOON, SUMMARY, House, leave, talk

DOORS = (CHAT, "/v1/responses", "/v1/messages", "/v1/embeddings")

Steps = Sequence[Step]

MOMENTS: dict[str, Steps] = {
    "nothing was said": [End.SILENCE],
    "the head was sent": [stream_head(), End.SILENCE],
    "only a comment was sent": [stream_head(), chunk(b": comment\n\n"), End.SILENCE],
    "an error was begun": [head("400 Bad", [("Content-Length", "100")]), b'{"error":', End.SILENCE],
    "no content yet": [stream_head(), chunk(ROLE), End.SILENCE],
    "in the middle": [stream_head(), chunk(ROLE + CONTENT), End.SILENCE],
    "in the middle of an event": [stream_head(), chunk(ROLE + CONTENT + b'data: {"'), End.SILENCE],
    "in a plain answer": [head("200 OK", [("Content-Length", "100")]), b'{"choices":', End.SILENCE],
}


@pytest.fixture(scope="module")
def house(start_proxy: StartProxy) -> Iterator[House]:
    with RawUpstream(lambda _: [End.SILENCE]) as upstream:
        yield House(start_proxy, upstream)


@pytest.mark.parametrize(("path", "streams", "moment"), combined(3, DOORS, [True, False], MOMENTS))
def test_a_client_leaves(house: House, path: str, streams: bool, moment: str) -> None:
    house.upstream.script = lambda _: MOMENTS[moment]
    before = len(house.upstream.arrived)
    connection = connected(house.url)
    connection.sendall(request_bytes(chat(stream=streams), path))
    assert house.upstream.wait_arrived(before + 1)
    time.sleep(0.05)
    house.check_at_rest(leave(connection))


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_reads_nothing_leaves(house: House, path: str, streams: bool) -> None:
    """The upstream stops at full buffers, and learns of the end although nothing of its own goes through any more."""
    sent, over = 0, False

    def endless(_: Arrived) -> Iterator[Step]:
        nonlocal sent, over
        yield stream_head() if streams else head("200 OK", [("Content-Length", str(1 << 30))])
        piece = CONTENT * 1_000
        try:
            while True:
                yield chunk(piece) if streams else piece
                sent += len(piece)
        finally:
            over = True

    house.upstream.script = endless  # type: ignore[assignment]
    connection = connected(house.url)
    connection.sendall(request_bytes(chat(stream=streams), path))
    end = time.monotonic() + SOON
    held = -1
    while (held != sent or not sent) and time.monotonic() < end:
        held = sent
        time.sleep(0.2)
    assert 0 < sent == held < 20_000_000
    leave(connection)
    assert until(lambda: over), "the upstream still believes that somebody reads"
    assert house.watched.comes_to_rest(), house.watched.left_over()


@pytest.mark.parametrize("streams", [True, False])
def test_a_summary_is_finished_for_a_client_that_left(house: House, streams: bool) -> None:
    """It belongs to the conversation: the client's next attempt finds it. Nothing else is sent for who has left."""
    go = threading.Event()

    def script(arrived: Arrived) -> Iterator[Step]:
        if b"<transcript>" in arrived.body:
            yield go
            yield SUMMARY
        else:
            yield answer(b'{"choices":[]}')

    house.upstream.script = script  # type: ignore[assignment]
    before = len(house.upstream.arrived)
    body = chat(stream=streams, messages=[{"role": "user", "content": str(streams)}, *talk()])
    for _ in range(3):
        connection = connected(house.url)
        connection.sendall(request_bytes(body))
        assert house.upstream.wait_arrived(before + 1)
        time.sleep(0.1)
        leave(connection)
    assert until(lambda: not any("run_asgi" in task for task in house.watched.left_over())), "it notices that they left"
    go.set()
    assert house.watched.comes_to_rest(), house.watched.left_over()
    assert len(house.upstream.arrived) == before + 1, "one call, and nothing that was to be sent after it"
    got = ask(house.url, CHAT, body)
    assert (got.status, got.header("x-compaction-summary")) == (200, "stored")
    assert len(house.upstream.arrived) == before + 2


def test_only_so_many_summaries_go_on_for_clients_that_left(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.summary.single_flight.LEFT_OF_A_TENANT", 1)
    house.upstream.script = lambda _: [1.0, SUMMARY]
    before = len(house.upstream.arrived)
    for number in range(3):
        connection = connected(house.url)
        messages = [{"role": "user", "content": f"bounded {number}"}, *talk()]
        connection.sendall(request_bytes(chat(messages=messages)))
        assert house.upstream.wait_arrived(before + number + 1)
        left = leave(connection)
        if number:
            ended = house.upstream.wait_left(before + number, seconds=SOON)
            assert ended is not None
            assert ended - left < 0.9, "it was cancelled"
    assert house.watched.comes_to_rest(), house.watched.left_over()


def test_a_client_leaves_a_translated_stream(start_proxy: StartProxy) -> None:
    with AnthropicServer() as anthropic:
        anthropic.script.cut = "hang"
        settings = {
            "upstreams": {"main": {"provider": "anthropic", "base_url": anthropic.url, "api_key": anthropic.key}}
        }
        url = start_proxy(anthropic.url, settings)
        connection = connected(url)
        connection.sendall(request_bytes(chat(stream=True)))
        assert connection.recv(12) == b"HTTP/1.1 200"
        leave(connection)
        assert anthropic.disconnected.wait(SOON)
