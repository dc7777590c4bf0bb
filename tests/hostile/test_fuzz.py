"""Anything at all at the door, and any way of cutting a stream: never a 500, never silence, never a byte lost."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from proxy.dialects.chat.answers import ChatAnswers
from proxy.dialects.chat.request import parse
from proxy.errors import BadBody
from proxy.http.sse import EventBuffer
from proxy.overflow import recognise
from proxy.server.app import Proxy
from proxy.server.http_protocol import BoundedProtocol
from proxy.server.loopback import serve
from tests.conftest import settings_for
from tests.kit.client import CHAT, ask, chat, connected
from tests.kit.raw_upstream import RawUpstream, Stage, answer
from tests.product.http.test_streams import STREAM

GOOD = b'{"choices":[]}'

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def entrance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with RawUpstream(lambda _: [answer(GOOD)]) as upstream:
        app = Proxy(settings_for(upstream.url, tmp_path_factory.mktemp("proxy"), {"server": {"deadline": 5}}))
        with serve(app, http=BoundedProtocol) as url:
            yield url


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.fixed_dictionaries(
    {"model": st.just("gpt-4o-mini") | json_values},
    optional={
        "messages": json_values
        | st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | json_values},
                optional={"content": json_values, "tool_calls": json_values, "tool_call_id": json_values},
            ),
            max_size=6,
        ),
        **dict.fromkeys(
            ("stream", "tools", "max_tokens", "max_completion_tokens", "response_format", "tool_choice", "n"),
            json_values,
        ),
    },
)
bodies = (
    st.binary(max_size=300)
    | json_values.map(lambda v: json.dumps(v).encode())
    | fields.map(lambda v: json.dumps(v, ensure_ascii=False).encode("utf-8", "surrogatepass"))
)
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40)
NAMES = (
    "content-encoding content-type authorization api-key x-compaction x-compaction-via accept-encoding accept expect "
    "connection te cookie host user-agent forwarded upgrade origin x-any"
)
names = st.sampled_from(NAMES.split())
paths = st.sampled_from([CHAT, "/v1/embeddings", "/v1/models", "/compaction/archive/x", "/readyz", "/v1/", "/"]) | (
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30).map(lambda text: "/" + text)
)


@quick
@given(bodies, st.lists(st.tuples(names, header_values), max_size=4), paths, st.sampled_from(["POST", "GET", "PUT"]))
@example(chat(), [("content-encoding", "gzip, br, gzip")], CHAT, "POST")
def test_any_request(entrance: str, body: bytes, headers: list[tuple[str, str]], path: str, method: str) -> None:
    """Any body, headers, and path get an answer without an internal error, and the proxy serves the next request."""
    headers = [(name, value.strip()) for name, value in headers]
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers), "", ""])
    got = told(entrance, head.encode("latin-1") + body)
    assert got.startswith(b"HTTP/1.1 "), got[:100]
    status = int(got[9:12])
    assert status in (200, 303, 400, 401, 403, 404, 405, 408, 411, 413, 415, 417, 431, 508), got[:300]
    assert ask(entrance, CHAT, chat()).body == GOOD


@quick
@given(st.binary(max_size=400))
@example(
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"
)
@example(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
def test_any_bytes(entrance: str, sent: bytes) -> None:
    """Bytes that aren't HTTP, cut off anywhere."""
    got = told(entrance, sent, end=True)
    assert not got.startswith(b"HTTP/1.1 5")
    assert ask(entrance, CHAT, chat()).body == GOOD


def told(entrance: str, sent: bytes, *, end: bool = False) -> bytes:
    """Return the answer until the proxy closes, which it does soon. With ``end`` the client sends no more."""
    parts = []
    with connected(entrance) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent)
        if end:
            connection.shutdown(1)
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


PIECES = st.sampled_from(
    [
        *(
            b"data: ",
            b"\n\n",
            b"\r\n\r\n",
            b"\r\r",
            b"\r",
            b"\n",
            b": c",
            b"event: error\n",
            b'{"error":{}}',
            b"[DONE]",
        ),
        *(b'{"choices":[{"delta":{"content":"x"}}]}', "é€😀".encode(), b"\xf0\x9f", b"x" * 50),
    ]
) | st.binary(max_size=12)
STREAMS = st.lists(PIECES, max_size=40).map(b"".join)


@settings(max_examples=400, deadline=None)
@given(STREAMS, st.lists(st.integers(0, 600), max_size=20))
def test_what_goes_into_the_buffer_comes_out(stream: bytes, places: list[int]) -> None:
    """Events arrive in order and complete. If the stream breaks, the forwarded part ends after a whole event."""
    buffer = EventBuffer()
    bounds = sorted({0, len(stream), *(place for place in places if place < len(stream))})
    out = b""
    for start, end in itertools.pairwise(bounds):
        out += buffer.feed(stream[start:end])
        assert stream.startswith(out)
        assert out.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) or not out
    assert out + buffer.rest() == stream


@settings(max_examples=150, deadline=None)
@given(STREAMS)
@example(b'data: {"choices":' + b"[" * 5_000 + b"\n\n")
def test_any_beginning_of_a_stream_is_judged(stream: bytes) -> None:
    assert ChatAnswers().event_reader().feed(stream) in (None, "content", "error", "end")


@pytest.mark.parametrize("deep", [b'{"data":' + b"[" * 5_000, b"data: " + b'{"a":' * 5_000 + b"\n\n"])
def test_what_an_upstream_nests_too_deep_is_passed_on(start_proxy: Any, stage: Stage, deep: bytes) -> None:
    headers = [("Content-Type", "text/event-stream" if deep.startswith(b"data") else "application/json")]
    with stage(lambda _: [answer(deep, "200 OK", headers)]) as upstream:
        assert ask(start_proxy(upstream.url), body=STREAM).body == deep
        routed = start_proxy(upstream.url, {"models": [{"match": "known", "upstream": "main"}]})
        assert ask(routed, "/v1/models", None).status == 200


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([200, 400, 413, 422, 429, 500, 503]), bodies | STREAMS)
def test_any_error_is_read(status: int, body: bytes) -> None:
    """The recogniser has an opinion on anything, and no limit that no model has."""
    found = recognise(status, body)
    assert found is None or found.limit is None or 0 < found.limit < 10**9


@settings(max_examples=150, deadline=None)
@given(bodies)
def test_any_body_is_read_and_written_again(body: bytes) -> None:
    """Unchanged data keeps its bytes, and damaged data is reported."""
    try:
        parsed = parse(body)
    except BadBody:
        return
    assert parsed.raw == body
    assert parsed.rewritten(units=None, model=None, max_output=None) == body
    if parsed.units and parsed.model is not None:
        changed = json.loads(parsed.rewritten(units=None, model="another", max_output=None))
        assert changed["model"] == "another"
