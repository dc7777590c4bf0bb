"""Test that the express lane sends and returns what aiohttp's client does."""

import asyncio
import functools
import gzip
import inspect
from asyncio import selector_events
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.http_parser import RawResponseMessage
from structlog.testing import capture_logs

from proxy.errors import UpstreamError
from proxy.upstream import connections
from proxy.upstream.connections import PARTS, Connections, Express
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Script, Step, answer, chunk, head, stream_head, streamed

HEADERS = [("user-agent", "client/1"), ("x-a", "1"), ("x-a", "2"), ("content-type", "application/json"), ("x-b", "")]
BODY = b'{"model":"m"}'

SCRIPTS: dict[str, Sequence[Step]] = {
    "usual": [answer(b'{"ok":1}')],
    "empty": [answer(b"")],
    "no content": [head("204 No Content")],
    "error": [answer(b'{"error":{}}', "429 Too Many Requests", [("Retry-After", "3"), ("X-A", "1"), ("X-A", "2")])],
    "set-cookie": [answer(b"{}", headers=[("Set-Cookie", "a=b; Path=/"), ("Location", "/elsewhere")])],
    "redirect": [answer(b"", "307 Temporary Redirect", [("Location", "/elsewhere")])],
    "stream": streamed([b"data: 1\n\n", b"data: 2\n\n"], pause=0.01),
    "compressed": [answer(gzip.compress(b"{}"), headers=[("Content-Encoding", "gzip")])],
    "continue first": [b"HTTP/1.1 100 Continue\r\n\r\n", answer(b'{"ok":2}')],
    "early hints first": [b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", answer(b'{"ok":3}')],
    "until the end": [head("200 OK", [("Content-Type", "text/plain")]), b"all of it", End.CLOSE],
    "in pieces": [b"HTTP/1.1 200", 0.01, b" OK\r\nContent-Le", 0.01, b"ngth: 2\r\n\r", 0.01, b"\n{", 0.01, b"}"],
    "last on this connection": [answer(b"{}", headers=[("Connection", "close")]), End.CLOSE],
    "upgrade": [head("101 Switching Protocols", [("Upgrade", "websocket"), ("Connection", "Upgrade")])],
    "no status": [b"HTTP/1.1 abc\r\n\r\n", End.CLOSE],
    "not HTTP": [b"SSH-2.0-OpenSSH_9.2\r\n", End.CLOSE],
    "status 999": [answer(b"{}", "999 What")],
    "a long line": [head("200 OK", [("X-Long", "x" * 70_000)]), End.CLOSE],
    "closed at once": [End.CLOSE],
    "reset at once": [End.RESET],
    "closed in the head": [b"HTTP/1.1 200 OK\r\nContent-", End.CLOSE],
    "closed in the body": [head("200 OK", [("Content-Length", "9")]), b"half", End.CLOSE],
    "reset in the body": [stream_head(), chunk(b"half"), 0.05, End.RESET],
    "wrong chunk": [stream_head(), chunk(b"half"), 0.05, b"zz\r\n", 0.05, End.CLOSE],
    "wrong chunk at once": [stream_head() + chunk(b"half") + b"zz\r\n", 0.05, End.CLOSE],
    "silent": [End.SILENCE],
}  # fmt: skip

BODIES = {"usual": BODY, "empty": b"", "64 KB": b"x" * 65_536, "300 KB": b"y" * 300_000, "1.9 MB": b"z" * 1_900_000}


async def _sent(connections: Connections, url: str, body: bytes = BODY, headers: Any = HEADERS) -> tuple[Any, ...]:
    """Return the response, or the error, as a client would see it."""
    try:
        found = await connections.send("POST", url, headers, body, 0.6)
    except UpstreamError as error:
        return type(error).__name__, str(error)
    parts: list[bytes] = []
    try:
        async for part in found.body:
            parts.append(part)  # noqa: PERF401 - the parts before an error count
    except UpstreamError as error:
        return found.status, found.headers, b"".join(parts), type(error).__name__, str(error)
    finally:
        await found.close()
    return found.status, found.headers, b"".join(parts)


def _both(script: Script, work: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[Any], int]]:
    """Return the results in both lanes, the requests that arrived, and the number of connections."""
    results = []
    for lane in ("express", "general"):
        used: list[object] = []
        with monkeypatch.context() as patch, RawUpstream(script) as upstream:
            if lane == "general":
                patch.setattr(Express, "post", lambda *_: None)
            else:
                patch.setattr(Express, "_sent", functools.partialmethod(_noted, Express._sent, used))

            async def run(url: str = upstream.url) -> Any:
                connections = Connections(url, "main")
                try:
                    return await work(connections, url)
                finally:
                    await connections.aclose()

            found = asyncio.run(run())
            results.append((found, list(map(_shown, upstream.arrived)), upstream.connections))
            assert bool(used) == (lane == "express")
    return results


def _noted(self: Express, sent: Any, used: list[object], *given: Any) -> Any:
    used.append(given)
    return sent(self, *given)


def _shown(arrived: Arrived) -> tuple[Any, ...]:
    headers = [(name, value) for name, value in arrived.headers if name != "host"]
    return arrived.method, arrived.target, arrived.header("host") is not None, sorted(headers), arrived.body


@pytest.mark.parametrize("script", SCRIPTS)
def test_both_lanes_agree(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connections: Connections, url: str) -> Any:
        return [await _sent(connections, f"{url}/v1/chat/completions?a=%20b") for _ in range(2)]

    first, second = _both(lambda _: SCRIPTS[script], work, monkeypatch)
    assert first == second


@pytest.mark.parametrize("body", BODIES)
def test_bodies_arrive_whole(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = functools.partial(_posted, body=BODIES[body])
    first, second = _both(lambda _: [answer()], work, monkeypatch)
    assert first == second
    assert first[1][0][-1] == BODIES[body]


async def _posted(connections: Connections, url: str, body: bytes) -> Any:
    return await _sent(connections, f"{url}/v1/responses", body)


def test_a_connection_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connections: Connections, url: str) -> Any:
        return [await _sent(connections, f"{url}/{number}") for number in range(5)]

    first, second = _both(lambda _: [answer()], work, monkeypatch)
    assert first == second
    assert first[2] == 1


def test_an_idle_connection_that_was_closed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connections: Connections, url: str) -> Any:
        before = await _sent(connections, f"{url}/a")
        await asyncio.sleep(0.05)
        return before, await _sent(connections, f"{url}/b")

    first, second = _both(lambda _: [answer(), End.CLOSE], work, monkeypatch)
    assert first == second
    assert first[2] == 2


def test_a_request_is_cancelled_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connections: Connections, url: str) -> Any:
        task = asyncio.create_task(_sent(connections, f"{url}/a"))
        await asyncio.sleep(0.1)
        task.cancel()
        return (await asyncio.gather(task, return_exceptions=True))[0].__class__.__name__

    first, second = _both(lambda _: [End.SILENCE], work, monkeypatch)
    assert first == second
    assert first[0] == "CancelledError"


def test_a_connection_with_an_unsent_request_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream may answer with 413 before it has read the request."""
    monkeypatch.setattr(selector_events._SelectorTransport, "get_write_buffer_size", lambda self: 1)  # type: ignore[attr-defined]

    async def run(url: str) -> Any:
        connections = Connections(url, "main")
        results = [await _sent(connections, url) for _ in range(3)]
        await connections.aclose()
        return results

    with RawUpstream(lambda _: [answer(b"{}", "413 Content Too Large")]) as upstream:
        assert [(status, body) for status, _, body in asyncio.run(run(upstream.url))] == [(413, b"{}")] * 3
        assert upstream.connections == 3


@pytest.mark.parametrize(
    "headers",
    [
        [("x-a", "b\r\nx-evil: 1")],
        [("x-a", "b\nx-evil: 1")],
        [("x-a", "nul\0")],
        [("x-a", "é")],
        [("expect", "100-continue")],
        [("content-length", "13")],
        [("cookie", "a=b")],
    ],
)  # fmt: skip
def test_other_requests_take_the_general_lane(headers: Any) -> None:
    async def run() -> Any:
        async with aiohttp.ClientSession() as session:
            return Express(session).post("http://a/b", headers, BODY)

    assert asyncio.run(run()) is None


OF_POOL: dict[Callable[..., Any], Sequence[str]] = {
    ResponseHandler.set_exception: ("exc",),
    ResponseHandler.is_connected: (),
    ResponseHandler.data_received: ("data",),
}


@pytest.mark.parametrize("part", [*PARTS, *OF_POOL], ids=lambda part: part.__qualname__)
def test_the_installed_aiohttp_takes_the_arguments_that_the_proxy_gives(part: Callable[..., Any]) -> None:
    own = () if isinstance(part, type) else ("self",)
    inspect.signature(part).bind(**dict.fromkeys((*own, *(PARTS | OF_POOL)[part])))


def test_an_aiohttp_that_takes_other_arguments_costs_time_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.PARTS, ClientRequest, ("method", "gone"))  # type: ignore[arg-type]
    connections._fits.cache_clear()
    with RawUpstream(lambda _: [answer(b"{}")]) as upstream, capture_logs() as logs:

        async def run() -> list[int]:
            statuses = []
            for _ in range(2):
                to = Connections(upstream.url, "main")
                statuses.append((await _sent(to, upstream.url))[0])
                await to.aclose()
            return statuses

        assert asyncio.run(run()) == [200, 200]
    connections._fits.cache_clear()
    assert [line["event"] for line in logs] == ["upstream.express_off"]
    assert "ClientRequest" in logs[0]["reason"]


@pytest.mark.parametrize(
    ("part", "name"),
    [(ClientRequest, "request_info"), (RawResponseMessage, "code"), (RawResponseMessage, "headers")],
)
def test_the_installed_aiohttp_has_the_attributes_that_the_proxy_reads(part: type, name: str) -> None:
    assert hasattr(part, name)


def test_the_installed_aiohttp_makes_connections_and_has_bodies_where_the_proxy_looks() -> None:
    async def made() -> tuple[aiohttp.TCPConnector, ResponseHandler]:
        async with aiohttp.TCPConnector() as pool:
            return pool, ResponseHandler(asyncio.get_running_loop())

    pool, protocol = asyncio.run(made())
    assert all(hasattr(pool, name) for name in ("_factory", "_loop"))
    assert all(hasattr(protocol, name) for name in ("_payload", "_loop", "transport"))
