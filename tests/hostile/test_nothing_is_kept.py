"""R11: the proxy frees a request with its answer, and not only at a garbage collection minutes later."""

import gc
import time
from collections.abc import Iterator

import pytest
from aiohttp import ClientResponse
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from proxy.dialects.chat.request import ChatRequest
from proxy.http.sse import COMMENT
from proxy.upstream.litellm.transport import LiteLLMStream
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.client import JSON, StartProxy, ask, chat, connected, request_bytes
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, stream_head
from tests.kit.watched import CONTENT, POLICY, ROLE, talk

SLOWLY = 0.15
"""Seconds. The proxy watches longer work for the client leaving and for the deadline."""

WINDOW = 4_000
"""Tokens. A summary of more than that is made in parts, which are asked for at once."""

WHOLE: list[Step] = [stream_head(), chunk(ROLE + CONTENT), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
NO_SUMMARY = answer(b'{"error":{"message":"No summary today.","type":"server_error"}}', "500 Broken")


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def url(start_proxy: StartProxy, upstream: RawUpstream) -> str:
    profile = {"context_window": WINDOW, "max_input_tokens": WINDOW}
    settings = {
        "models": [{"match": "*", "upstream": "main", "profile": profile}],
        "policies": {"default": {**POLICY, "prepare": None}},
        "server": {"keepalive": 0.1},
    }
    return start_proxy(upstream.url, settings)


class Uncollected:
    """Requests as the proxy and its server know them, in a time without a collector."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds
        self._before = self._count()

    def comes_to_rest(self, seconds: float = 5.0) -> bool:
        """Whether no more are there, once everything has come to an end, than were at first."""
        until = time.monotonic() + seconds
        while not (at_rest := self._count() <= self._before) and time.monotonic() < until:
            time.sleep(0.05)
        return at_rest

    def _count(self) -> int:
        return sum(isinstance(one, self._kinds) for one in gc.get_objects())


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects() -> Iterator[None]:
    """Hide the objects of imports and earlier tests from ``gc``. Going through a million of them takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def uncollected() -> Iterator[Uncollected]:
    gc.collect()
    gc.disable()
    yield Uncollected(ChatRequest, RequestResponseCycle, ClientResponse, LiteLLMStream)
    gc.enable()


STEPS: dict[str, list[Step]] = {
    "at once": WHOLE,
    "after a while": [SLOWLY, *WHOLE],
    "broken off": [stream_head(), SLOWLY, chunk(ROLE + CONTENT), SLOWLY, End.RESET],
    "broken off before": [SLOWLY, End.RESET],
}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("steps", STEPS)
def test_of_an_answer(upstream: RawUpstream, url: str, uncollected: Uncollected, streams: bool, steps: str) -> None:
    upstream.script = lambda _: STEPS[steps]
    for _ in range(3):
        ask(url, body=chat(stream=streams))
    assert uncollected.comes_to_rest()


@pytest.mark.parametrize("streams", [True, False])
def test_of_a_client_that_left(upstream: RawUpstream, url: str, uncollected: Uncollected, streams: bool) -> None:
    upstream.arrived = []
    upstream.script = lambda _: [End.SILENCE]
    for number in range(3):
        with connected(url) as connection:
            connection.sendall(request_bytes(chat(stream=streams)))
            assert upstream.wait_arrived(number + 1)
            time.sleep(SLOWLY)
    assert uncollected.comes_to_rest()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("steps", [[End.SILENCE], [stream_head(), End.SILENCE]])
def test_of_an_answer_that_is_late(
    start_proxy: StartProxy, upstream: RawUpstream, uncollected: Uncollected, streams: bool, steps: list[Step]
) -> None:
    upstream.script = lambda _: steps
    url = start_proxy(upstream.url, {"server": {"deadline": 0.3}})
    requests = Uncollected(ChatRequest, ClientResponse)  # the other server here keeps its own
    for _ in range(3):
        assert ask(url, body=chat(stream=streams)).status == 504
    assert requests.comes_to_rest()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("turns", "parts"), [(12, 1), (60, 3)])
def test_of_a_conversation_whose_summary_failed(
    upstream: RawUpstream, url: str, uncollected: Uncollected, streams: bool, turns: int, parts: int
) -> None:
    """A stream receives comments meanwhile. A long conversation is read in several parts."""

    def script(arrived: Arrived) -> Iterator[Step]:
        if b"<transcript" in arrived.body:
            yield SLOWLY
            yield NO_SUMMARY
        else:
            yield from WHOLE

    upstream.arrived = []
    upstream.script = script  # type: ignore[assignment]
    another = ("authorization", f"Bearer sk-{turns}-{streams}")  # else the digest in the summary's place is known
    got = ask(url, body=chat(messages=talk(turns), stream=streams), headers=(JSON, another))
    assert got.status == 200
    assert (COMMENT in got.body) == streams
    assert sum(b"<transcript" in arrived.body for arrived in upstream.arrived) >= parts
    assert uncollected.comes_to_rest()


@pytest.mark.parametrize("cut", ["event", "connection", "end", "hang", None])
def test_of_a_translated_stream(start_proxy: StartProxy, uncollected: Uncollected, cut: str | None) -> None:
    """One that is whole, that breaks off, or that hangs until the client leaves."""
    with AnthropicServer() as anthropic:
        main = {"provider": "anthropic", "base_url": anthropic.url, "api_key": anthropic.key}
        url = start_proxy(anthropic.url, {"upstreams": {"main": main}})
        assert ask(url, body=chat(stream=True)).status == 200  # what LiteLLM makes once
        requests = Uncollected(ChatRequest, LiteLLMStream)  # the other server here keeps its own
        anthropic.script.cut = cut
        for _ in range(3):
            if cut == "hang":
                with connected(url) as connection:
                    connection.sendall(request_bytes(chat(stream=True)))
                    assert connection.recv(12) == b"HTTP/1.1 200"
            else:
                ask(url, body=chat(stream=True))
        assert requests.comes_to_rest()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("status", [400, 429, 529, 502])
def test_of_a_translated_error(start_proxy: StartProxy, uncollected: Uncollected, streams: bool, status: int) -> None:
    """502 is the proxy's own status: it can't connect to the provider."""
    with AnthropicServer() as anthropic:
        main = {"provider": "anthropic", "base_url": anthropic.url, "api_key": anthropic.key}
        url = start_proxy(anthropic.url, {"upstreams": {"main": main}})
        assert ask(url, body=chat(stream=streams)).status == 200  # what LiteLLM makes once
        requests = Uncollected(ChatRequest, LiteLLMStream)
        anthropic.script.error = (status, "some_error", "No.")
        if status == 502:
            anthropic.__exit__()
        for _ in range(3):
            assert ask(url, body=chat(stream=streams)).status == status
        assert requests.comes_to_rest()
