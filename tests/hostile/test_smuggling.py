"""S8: requests that two servers could read differently are refused, or reach the upstream as exactly one.

With the proxy's own parser (httptools), and with uvicorn's other parser (h11), which another server may use.
"""

import contextlib
import gzip
import json
import socket
from collections.abc import Iterator

import pytest

from proxy.endpoints.passthrough import quoted
from proxy.server.app import Proxy
from proxy.server.http_protocol import BoundedProtocol
from proxy.server.loopback import serve
from tests.conftest import settings_for
from tests.kit.client import CHAT, Got, ask, chat, connected
from tests.kit.raw_upstream import RawUpstream, answer

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: localhost\r\n"
KEY = b"Authorization: Bearer sk-own\r\n"
HIDDEN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Hidden: 1\r\nContent-Length: 2\r\n\r\n{}"
BODY = chat()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def chunks(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


REFUSED = {
    "length and chunks": LINE + HOST + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n" + chunks(BODY) + HIDDEN,
    "chunks and length": LINE + HOST + CHUNKED + b"Content-Length: 4\r\n\r\n" + chunks(BODY) + HIDDEN,
    "two lengths": LINE + HOST + b"Content-Length: 5\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN,
    "a length of two": LINE + HOST + b"Content-Length: 5, %d\r\n\r\n" % len(BODY) + BODY + HIDDEN,
    "a length with a sign": LINE + HOST + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a length in hexadecimal": LINE + HOST + b"Content-Length: 0x10\r\n\r\n" + BODY,
    "space before the colon": LINE + HOST + b"Transfer-Encoding : chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "an unknown transfer encoding": LINE + HOST + b"Transfer-Encoding: xchunked\r\n" + LENGTH + b"\r\n" + BODY,
    "chunked is not the last": LINE + HOST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + chunks(BODY),
    "NUL in a header": LINE + HOST + b"X-A: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "CR in a header": LINE + HOST + b"X-A: a\rTransfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "bad size of a chunk": LINE + HOST + CHUNKED + b"\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "negative size of a chunk": LINE + HOST + CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n",
    "a name with a space": LINE + HOST + b"X A: 1\r\n" + LENGTH + b"\r\n" + BODY,
    "gzip before the chunks": LINE + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(BODY),
    "gzip and chunks in two headers": LINE + HOST + b"Transfer-Encoding: gzip\r\n" + CHUNKED + b"\r\n" + chunks(BODY),
    "chunked twice": LINE + HOST + CHUNKED + CHUNKED + b"\r\n" + chunks(BODY),
    "chunks in HTTP/1.0": LINE.replace(b"1.1", b"1.0") + HOST + CHUNKED + b"\r\n" + chunks(BODY),
    "two Hosts": LINE + HOST + b"Host: elsewhere.test\r\n" + LENGTH + b"\r\n" + BODY,
    "the same Host twice": LINE + HOST + HOST + LENGTH + b"\r\n" + BODY,
    "no Host": LINE + LENGTH + b"\r\n" + BODY,
    "two Hosts in HTTP/1.0": LINE.replace(b"1.1", b"1.0") + HOST + HOST + LENGTH + b"\r\n" + BODY,
    "HTTP/2.0": LINE.replace(b"1.1", b"2.0") + HOST + LENGTH + b"\r\n" + BODY,
    "no such protocol": b"POST /v1/chat/completions HTTP/9.9\r\n" + HOST + LENGTH + b"\r\n" + BODY,
}

CHUNKS_WIN = {"length and chunks", "chunks and length"}
"""h11 takes the chunks for the body and what follows for the next request, as RFC 9112 allows it to."""

ONE = {
    "obs-fold": LINE + HOST + b"X-A: a\r\n Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "bare LF": (LINE + HOST + LENGTH).replace(b"\r\n", b"\n") + b"\n" + BODY,
    "underscore twins": LINE
    + HOST
    + LENGTH
    + b"Content_Length: 3\r\nTransfer_Encoding: chunked\r\nX_Forwarded_For: 127.0.0.1\r\n\r\n"
    + BODY,
    "absolute form": b"POST http://elsewhere.test/v1/chat/completions HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY,
    "no slash": b"POST v1/chat/completions HTTP/1.1\r\n" + HOST + LENGTH + b"\r\n" + BODY,
    "a Host with a path": LINE + KEY + b"Host: a/../../v1/files?x#y\r\n" + LENGTH + b"\r\n" + BODY,
    "no Host in HTTP/1.0": LINE.replace(b"1.1", b"1.0") + KEY + LENGTH + b"\r\n" + BODY,
    "two requests, one after the other": LINE + HOST + LENGTH + b"\r\n" + BODY,
    "chunks with an extension": LINE + HOST + CHUNKED + b"\r\n%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
    "trailers": LINE + HOST + CHUNKED + b"\r\n%x\r\n%s\r\n0\r\nX-Hidden: 1\r\n\r\n" % (len(BODY), BODY),
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(lambda _: [answer(b'{"choices":[]}')]) as running:
        yield running


@pytest.fixture(scope="module")
def own(upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(Proxy(settings_for(upstream.url, tmp_path_factory.mktemp("own"))), http=BoundedProtocol) as url:
        yield url


@pytest.fixture(scope="module")
def other(upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(Proxy(settings_for(upstream.url, tmp_path_factory.mktemp("other"))), http="h11") as url:
        yield url


@pytest.fixture(params=["own", "other"])
def entrance(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


def told(entrance: str, request: bytes) -> bytes:
    """All that is answered to these bytes until the proxy closes the connection or has nothing more to say."""
    with connected(entrance) as connection:
        connection.sendall(request)
        connection.settimeout(5)
        parts = []
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while part := connection.recv(65_536):
                parts.append(part)
                connection.settimeout(0.15)
    return b"".join(parts)


def lives_on(entrance: str) -> Got:
    got = ask(entrance, CHAT, chat("still there"))
    assert got.status == 200
    return got


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_ambiguous_is_refused(own: str, upstream: RawUpstream, name: str) -> None:
    upstream.arrived = []
    got = told(own, REFUSED[name])
    assert got.startswith(b"HTTP/1.1 400 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed_request"
    assert upstream.arrived == []
    lives_on(own)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - CHUNKS_WIN))
def test_the_other_parser_refuses_it_or_takes_it_for_one(other: str, upstream: RawUpstream, name: str) -> None:
    upstream.arrived = []
    got = told(other, REFUSED[name])
    assert len(upstream.arrived) == (0 if got.startswith(b"HTTP/1.1 400 ") else 1)
    for one in upstream.arrived:
        assert_framed_once(one.headers, one.body)
        assert one.header("x-hidden") is None
    lives_on(other)


@pytest.mark.parametrize("name", ONE)
def test_what_is_odd_arrives_at_most_once(entrance: str, upstream: RawUpstream, name: str) -> None:
    upstream.arrived = []
    got = told(entrance, ONE[name])
    assert got[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 404"), got[:200]
    assert len(upstream.arrived) == (1 if got.startswith(b"HTTP/1.1 200") else 0)
    for one in upstream.arrived:
        assert (one.target, one.body) == (CHAT, BODY)
        assert_framed_once(one.headers, one.body)
        assert one.header("host") == upstream.url.removeprefix("http://")
        assert one.header("x-hidden") is None
    lives_on(entrance)


def assert_framed_once(headers: list[tuple[str, str]], body: bytes) -> None:
    """As servers read it, too, for which an underscore is a hyphen."""
    lengths = [value for name, value in headers if name.replace("_", "-") == "content-length"]
    assert lengths == [str(len(body))]
    assert not any(name.replace("_", "-") in ("transfer-encoding", "x-forwarded-for") for name, _ in headers)


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_headers_of_one_hop_end_here(entrance: str, upstream: RawUpstream, path: str) -> None:
    upstream.arrived = []
    mine = {
        "connection": "close, X-Mine, authorization",
        "x-mine": "1",
        "keep-alive": "timeout=5",
        "te": "trailers",
        "trailer": "x-a",
        "upgrade": "h2c",
        "proxy-authorization": "Basic x",
        "proxy-connection": "keep-alive",
        "x-stays": "1",
    }
    got = ask(entrance, path, BODY, list(mine.items()))
    assert got.status == 200
    (one,) = upstream.arrived
    names = {name for name, _ in one.headers}
    assert names.isdisjoint(set(mine) - {"connection", "x-stays"})
    assert "x-stays" in names


def test_twins_with_an_underscore_end_here_too(entrance: str, upstream: RawUpstream) -> None:
    upstream.arrived = []
    twins = [
        "x_api_key",
        "api_key",
        "proxy_authorization",
        "keep_alive",
        "x_forwarded_for",
        "x_compaction_via",
        "x_mine",
    ]
    mine = [("connection", "x-mine"), ("x-mine", "1"), ("x_stays", "1"), *((name, "1") for name in twins)]
    assert ask(entrance, CHAT, BODY, mine).status == 200
    (one,) = upstream.arrived
    assert {name for name, _ in one.headers}.isdisjoint(twins)
    assert one.header("x_stays") == "1"


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (b"/v1/files/a%0d%0aX-Hidden:%201", "/v1/files/a%0d%0aX-Hidden:%201"),
        (b"/v1/files/a%20HTTP/1.1%0d%0a", "/v1/files/a%20HTTP/1.1%0d%0a"),
        (b"/v1/files/\xc3\xa9", None),
        (b"/v1/files/a?b=c%0ad&e", "/v1/files/a?b=c%0ad&e"),
    ],
)
def test_a_path_cannot_end_the_line(entrance: str, upstream: RawUpstream, sent: bytes, arrives: str | None) -> None:
    upstream.arrived = []
    got = told(entrance, b"GET " + sent + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert got.startswith(b"HTTP/1.1 200 " if arrives else b"HTTP/1.1 400 "), got[:100]
    assert [one.target for one in upstream.arrived] == ([arrives] if arrives else [])
    assert all(one.header("x-hidden") is None for one in upstream.arrived)
    lives_on(entrance)


@pytest.mark.parametrize("dots", ["..;", "..;x=1", "%2e%2e%3b", ".;", "..%5c"])
def test_dots_with_a_parameter_lead_nowhere(own: str, upstream: RawUpstream, dots: str) -> None:
    """Java servers remove a path parameter before they resolve the dots."""
    upstream.arrived = []
    assert ask(own, f"/v1/a/{dots}/b", None).status == 404
    assert upstream.arrived == []


def test_requests_before_one_that_is_refused_are_answered(own: str, upstream: RawUpstream) -> None:
    """Their responses aren't mixed with the refusal, which is left out."""
    upstream.arrived = []
    got = told(own, LINE + HOST + LENGTH + b"\r\n" + BODY + REFUSED["two Hosts"])
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.count(b"HTTP/1.1 ") == 1
    assert len(upstream.arrived) == 1


def test_what_no_address_may_have_is_escaped() -> None:
    """Also if another server passes the request to the application."""
    assert quoted(b"/a\xc3 b\r\nX: 1\x00\x7f%0d") == "/a%C3%20b%0D%0AX:%201%00%7F%0d"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_a_body_that_was_unpacked_has_its_own_length(entrance: str, upstream: RawUpstream, path: str) -> None:
    """The client's length is of what it sent, which is not what travels on."""
    upstream.arrived = []
    packed = gzip.compress(BODY)
    assert ask(entrance, path, packed, [("content-encoding", "gzip")]).status == 200
    (one,) = upstream.arrived
    assert one.body == (BODY if path == CHAT else packed)
    assert_framed_once(one.headers, one.body)
    assert (one.header("content-encoding") is None) == (path == CHAT)


def test_requests_in_one_stream_are_answered_in_their_order(entrance: str, upstream: RawUpstream) -> None:
    """Two that are sent without waiting are two, and neither takes bytes of the other."""
    upstream.arrived = []
    both = b"".join(
        LINE + HOST + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in (chat("first"), chat("second"))
    )
    got = told(entrance, both)
    assert got.count(b"HTTP/1.1 200 OK") == 2
    assert [one.body for one in upstream.arrived] == [chat("first"), chat("second")]


def test_a_small_piece_at_a_time(entrance: str, upstream: RawUpstream) -> None:
    upstream.arrived = []
    request = LINE + HOST + LENGTH + b"\r\n" + BODY
    with connected(entrance) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(len(request)):
            connection.sendall(request[start : start + 1])
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert [one.body for one in upstream.arrived] == [BODY]


@pytest.mark.parametrize(
    "head", [b"X-Long: " + b"x" * 200, b"X-Many: 1\r\n" * 20, b"\r\n0\r\nX-Trailer: " + b"x" * 200]
)
def test_a_head_that_never_ends_is_cut_off(own: str, upstream: RawUpstream, head: bytes) -> None:
    """Without a bound the parser would keep it all."""
    upstream.arrived = []
    piece, sent = head[-200:] * 400, 0
    with connected(own) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(LINE + HOST + CHUNKED + head)
        while sent < 50_000_000:
            connection.sendall(piece)
            sent += len(piece)
    assert sent < 20_000_000
    assert upstream.arrived == []
    lives_on(own)
