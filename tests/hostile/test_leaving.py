"""R1, R4, R16, S21: a client that leaves ends the upstream's work, and failures cost no more than necessary.

A summary is the exception: it is finished, as it belongs to the conversation.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from proxy.server.loopback import serve
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.client import CHAT, Got, StartProxy, ask, chat, connected, request_bytes
from tests.kit.combinations import combined
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, head, stream_head
from tests.kit.scripted import chat as conversation
from tests.kit.scripted import proxied
from tests.kit.upstream import StandIn
from tests.kit.waiting import until
from tests.kit.watched import CONTENT, ROLE, SOON, SUMMARY, TRIGGERED, House, leave, talk

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


def summarizing_after(go: threading.Event) -> Callable[[Arrived], Iterator[Step]]:
    """Return the script of an upstream whose summary arrives once ``go`` is set. Other answers are empty."""

    def script(arrived: Arrived) -> Iterator[Step]:
        if b"<transcript>" in arrived.body:
            yield go
            yield SUMMARY
        else:
            yield answer(b'{"choices":[]}')

    return script


@pytest.mark.parametrize("streams", [True, False])
def test_a_summary_is_finished_for_a_client_that_left(house: House, streams: bool) -> None:
    """It belongs to the conversation: the client's next attempt finds it. Nothing else is sent for who has left."""
    go = threading.Event()

    house.upstream.script = summarizing_after(go)  # type: ignore[assignment]
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


REFUSED = answer(
    b'{"error":{"message":"This model\'s maximum context length is 4000 tokens. However, your messages resulted in '
    b'9000 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}',
    "400 Bad Request",
)


def test_all_attempts_have_one_deadline(start_proxy: StartProxy) -> None:
    """R4. The first attempt takes 2 s of 4 s, so the second one has 2 s left, and a third one never begins."""

    def slowly(arrived: Arrived) -> Iterator[Step]:
        if hurried.is_set():
            yield answer(b'{"choices":[]}', "500 No") if b"<transcript>" in arrived.body else REFUSED
        else:
            yield 2.0
            yield REFUSED if len(attempts()) <= 2 else End.SILENCE

    hurried = threading.Event()
    hurried.set()
    before = 0

    def attempts() -> list[Arrived]:
        return [arrived for arrived in upstream.arrived[before:] if b"<transcript>" not in arrived.body]

    with RawUpstream(slowly) as upstream, ThreadPoolExecutor(2) as pool:  # type: ignore[arg-type]
        url = start_proxy(upstream.url, {"server": {"deadline": 4}, "policies": {"default": {"overflow_retries": 5}}})
        # The tables of models and of tokens are read now, and what was learned is another model's.
        while ask(url, CHAT, chat(messages=talk(40), model="gpt-4o")).status != 400:
            pass
        hurried.clear()
        before = len(upstream.arrived)
        began = time.monotonic()
        asked = [
            pool.submit(ask, url, CHAT, chat(stream=on, messages=talk(40), model=f"gpt-4o-{on}"))
            for on in (False, True)
        ]
        answers = [one.result() for one in asked]
        took = time.monotonic() - began
    for got in answers:
        assert (got.status, got.error["code"]) == (504, "upstream_timeout")
    assert 3.8 < took < 15
    assert len(attempts()) == 4
    assert len(attempts()[-1].body) < len(attempts()[0].body)


def test_fifty_at_once_ask_for_one_summary_and_the_first_one_leaves(
    start_proxy: StartProxy, waiting: Callable[[int], bool]
) -> None:
    """R16. The caller who started a summary is only one of those who wait for it."""
    go = threading.Event()

    body = chat(messages=[{"role": "user", "content": "fifty"}, *talk()])
    with RawUpstream(summarizing_after(go)) as upstream, ThreadPoolExecutor(49) as pool, ExitStack() as leaving:  # type: ignore[arg-type]
        url = start_proxy(upstream.url, TRIGGERED)
        leader = leaving.enter_context(connected(url))
        leader.sendall(request_bytes(body))
        assert upstream.wait_arrived(1)
        others = [pool.submit(ask, url, CHAT, body) for _ in range(49)]
        assert waiting(50)
        leader.close()
        time.sleep(0.1)
        go.set()
        answers: list[Got] = [other.result(60) for other in others]
        sent = [arrived.body for arrived in upstream.arrived if b"<transcript>" not in arrived.body]
        assert len(upstream.arrived) - len(sent) == 1
    assert {(got.status, got.header("x-compaction-summary")) for got in answers} <= {(200, "made"), (200, "stored")}
    assert (len(sent), len(set(sent))) == (49, 1)


def test_a_proxy_that_is_its_own_summary_model(tmp_path: Path) -> None:
    """S21. The proxy recognizes its own summary request and uses a digest."""
    upstream = StandIn(window=16_000)
    entrance = ""

    def around(arrived: Arrived) -> Iterator[Step]:
        headers = [pair for pair in arrived.headers if pair[0] in ("x-compaction-via", "content-type")]
        back = pool.submit(ask, entrance, arrived.target, arrived.body, headers)
        while not back.done():
            yield 0.01
        yield answer(back.result().body, f"{back.result().status} X")

    with serve(upstream.app) as url, RawUpstream(around) as mirror, ThreadPoolExecutor(8) as pool:  # type: ignore[arg-type]
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}, "itself": {"base_url": f"{mirror.url}/v1"}},
            "models": [
                {"match": "summary", "upstream": "itself"},
                {"match": "*", "upstream": "main", "profile": {"context_window": 16_000, "tokenizer": "o200k_base"}},
            ],
            "policies": {"default": {"summary": {"model": "summary", "timeout": 20}}},
        }
        with proxied(settings, tmp_path) as entrance:
            began = time.monotonic()
            got = ask(entrance, CHAT, json.dumps({"model": "m", "messages": conversation(7, 2_000)}).encode())
            took = time.monotonic() - began
        assert (got.status, got.header("x-compaction")) == (200, "compacted")
        assert got.header("x-compaction-summary") == "digest"
        assert took < 15
        assert len(mirror.arrived) == 2, "once out, and once more before it is recognised"
        assert mirror.arrived[1].header("x-compaction-via") is not None
        assert len(upstream.requests) == 1


def test_an_error_of_the_proxys_own_names_the_policy(start_proxy: StartProxy) -> None:
    """Unauthenticated callers get no policy name, because the policy depends on the caller."""
    with RawUpstream() as upstream:
        url = start_proxy(upstream.url, {"models": [{"match": "known", "upstream": "main"}]})
        for body in (b"[]", chat()):
            assert ask(url, CHAT, body).header("x-compaction-policy") == "default"
        too_large = ask(start_proxy(upstream.url, {"server": {"body_limit": 10}}), CHAT, chat())
        assert (too_large.status, too_large.header("x-compaction-policy")) == (413, "default")
        keys = {"auth": {"mode": "keys"}, "teams": {"a": {"keys": [f"sha256:{'0' * 64}"]}}}
        locked = start_proxy(upstream.url, {**keys, "upstreams": {"main": {"api_key": "sk-operators"}}})
        stranger = ask(locked, CHAT, chat())
        assert (stranger.status, stranger.header("x-compaction-policy")) == (401, None)
