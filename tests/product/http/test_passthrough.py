"""Every path but chat completions: bodies, answers, addresses and methods travel as they are."""

import asyncio
import gzip
import random

import pytest
from structlog.testing import capture_logs

from tests.kit.client import CHAT, JSON, StartProxy, ask, chat, connected, read_all
from tests.kit.raw_upstream import End, RawUpstream, Stage, Step, answer, chunk, head, stream_head, streamed
from tests.kit.waiting import until

NOISE = random.Random(7).randbytes(5_000_000)
RESPONSES_EVENT = (
    b'event: response.output_text.delta\r\ndata: {"type":"response.output_text.delta","delta":"\xc3\xa9"}\r\n\r\n'
)


@pytest.fixture(scope="module")
def proxy(start_module_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_module_proxy(upstream.url)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/gpt-4o", None),
        ("GET", "/v1/chat/completions", None),
        ("GET", "/v1/chat/completions?limit=1&after=chatcmpl-1", None),
        ("POST", "/v1/chat/completions/chatcmpl-1", b'{"metadata":{"a": 1.10}}'),
        ("DELETE", "/v1/chat/completions/chatcmpl-1", None),
        ("DELETE", "/v1/files/file-1", b'{"odd":"a DELETE with a body"}'),
        ("POST", "/v1/embeddings", b'{"input":["\\u00e9",1e400],"model":"m","x":-0.0}'),
        ("POST", "/v1/completions", b'{"prompt":"hi","model":"m","stream":false}'),
        ("POST", "/v1/moderations", b"not even JSON \xff"),
        ("POST", "/v1/responses", b'{"model":"m","input":[],"stream":false}'),
        ("POST", "/v1/responses/resp_1/cancel", b""),
        ("POST", "/v1/audio/speech", b'{"model":"tts-1","input":"hi","voice":"alloy"}'),
        ("POST", "/v1/batches", b"{}"),
        ("PUT", "/v1/things/1", b"x" * 100_000),
        ("PATCH", "/v1/things/1", b"[]"),
        ("OPTIONS", "/v1/models", None),
        ("GET", "/v1/files?purpose=a%20b&x=%C3%A9&x=%2F&empty&=&y=a+b&z=%25", None),
        ("GET", "/v1/files/a%2Fb%20c/%E2%82%AC;v=1,2", None),
        ("GET", "/v1/files/file-1/content?a=1?b=2", None),
        ("GET", "/v1//double//slashes/", None),
    ],
)
def test_a_request_travels_as_it_is(
    proxy: str, upstream: RawUpstream, method: str, path: str, body: bytes | None
) -> None:
    got = ask(proxy, path, body, headers=[("content-type", "application/json"), ("x-mine", "1")], method=method)
    assert got.status == 200
    assert got.body == b"{}"
    arrived = upstream.last
    assert (arrived.method, arrived.target, arrived.body) == (method, path, body or b"")
    assert arrived.header("x-mine") == "1"
    lengths = {str(len(body or b""))} | ({None} if body is None else set())
    assert arrived.header("content-length") in lengths
    assert arrived.header("transfer-encoding") is None


def test_a_file_is_uploaded_and_comes_back(start_proxy: StartProxy, stage: Stage) -> None:
    boundary = "--------------------------d74496d66958873e"
    form = (
        (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n--{boundary}\r\n'
            'Content-Disposition: form-data; name="file"; filename="é.bin"\r\nContent-Type: audio/mpeg\r\n\r\n'
        ).encode()
        + NOISE
        + f"\r\n--{boundary}--\r\n".encode()
    )
    sent = ("content-type", f"multipart/form-data; boundary={boundary}")
    audio = answer(NOISE, headers=[("Content-Type", "audio/mpeg"), ("Content-Disposition", 'attachment; filename="a"')])
    with stage(lambda _: [audio]) as upstream:
        got = ask(start_proxy(upstream.url), "/v1/files", form, headers=[sent])
        assert upstream.last.body == form
        assert upstream.last.header("content-type") == sent[1]
    assert got.body == NOISE
    assert (got.header("content-type"), got.header("content-disposition")) == ("audio/mpeg", 'attachment; filename="a"')


def test_an_answer_may_come_in_any_framing(start_proxy: StartProxy, stage: Stage) -> None:
    framings: list[list[Step]] = [
        [answer(NOISE)],
        [
            head("200 OK", [("Transfer-Encoding", "chunked")]),
            *(chunk(NOISE[i : i + 90_000]) for i in range(0, len(NOISE), 90_000)),
            chunk(b""),
        ],
        [head("200 OK", []), NOISE, End.CLOSE],
    ]
    for framing in framings:
        with stage(lambda _, framing=framing: framing) as upstream:
            got = ask(start_proxy(upstream.url), "/v1/files/1/content", None)
            assert (got.status, got.body == NOISE, got.whole) == (200, True, True)


def test_compressed_bodies_stay_compressed_both_ways(start_proxy: StartProxy, stage: Stage) -> None:
    packed = gzip.compress(b'{"input":"x"}')
    with stage(lambda _: [answer(packed, headers=[("Content-Encoding", "gzip")])]) as upstream:
        url = start_proxy(upstream.url)
        got = ask(url, "/v1/embeddings", packed, [JSON, ("content-encoding", "gzip"), ("accept-encoding", "gzip, br")])
        assert (upstream.last.body, upstream.last.header("content-encoding")) == (packed, "gzip")
        assert upstream.last.header("accept-encoding") == "gzip, br"
        assert (got.body, got.header("content-encoding")) == (packed, "gzip")


def test_head_has_the_length_and_no_body(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(lambda _: [head("200 OK", [("Content-Length", "1234"), ("X-A", "b")])]) as upstream:
        got = ask(start_proxy(upstream.url), "/v1/files/1/content", None, method="HEAD")
        assert upstream.last.method == "HEAD"
    assert (got.status, got.body, got.header("content-length"), got.header("x-a")) == (200, b"", "1234", "b")


def test_streams_of_other_apis_travel_as_they_are(start_proxy: StartProxy, stage: Stage) -> None:
    for parts in ([RESPONSES_EVENT] * 50, [bytes([byte]) for byte in RESPONSES_EVENT * 2]):
        with stage(lambda _, parts=parts: streamed(parts, pause=0.0005)) as upstream:
            got = ask(start_proxy(upstream.url), "/v1/responses", b'{"stream":true}')
            assert (got.status, got.body, got.whole) == (200, b"".join(parts), True)


def test_a_stream_of_another_api_that_breaks_ends_in_an_error(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(lambda _: [stream_head(), chunk(RESPONSES_EVENT + b"event: resp"), 0.01, End.CLOSE]) as upstream:
        got = ask(start_proxy(upstream.url), "/v1/responses", b'{"stream":true}')
    assert got.whole
    assert got.body.startswith(RESPONSES_EVENT + b'event: error\ndata: {"type":"error"')
    assert b"upstream_interrupted" in got.body


def test_a_body_that_is_answered_while_it_still_comes(start_proxy: StartProxy) -> None:
    """Listening for the client's disconnect doesn't lose any part of an upload."""
    sent = NOISE * 8  # more than the buffers on the way take
    size = len(sent)
    received: list[bytes] = []

    class Early(RawUpstream):
        """Answers after the head, and is slow to read the rest."""

        async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head("200 OK", [("Transfer-Encoding", "chunked")]) + chunk(b"early"))
            await asyncio.sleep(0.4)
            while part := await reader.read(65_536):
                received.append(part)
                if sum(map(len, received)) >= size:
                    break
            writer.write(chunk(b"late") + chunk(b""))
            await writer.drain()
            return False

    with Early() as upstream:
        url = start_proxy(upstream.url)
        with connected(url) as connection:
            lines = [
                "POST /v1/uploads HTTP/1.1",
                "Host: localhost",
                f"Content-Length: {size}",
                "Connection: close",
                "",
                "",
            ]
            connection.sendall("\r\n".join(lines).encode() + sent)
            answered = read_all(connection)
    assert b"early" in answered
    assert b"late" in answered
    assert b"".join(received) == sent


def test_expect_100_continue(proxy: str, upstream: RawUpstream) -> None:
    for path, body in ((CHAT, chat()), ("/v1/files", b"x" * 2_000_000)):
        with connected(proxy) as connection:
            lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Expect: 100-continue"]
            connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
            connection.sendall(body)
            assert read_all(connection).startswith(b"HTTP/1.1 200 ")
        assert upstream.last.body == body
        assert upstream.last.header("expect") is None


def test_too_large_is_said_before_the_body_is_asked_for(start_proxy: StartProxy, upstream: RawUpstream) -> None:
    url = start_proxy(upstream.url, {"server": {"body_limit": 1000}})
    with connected(url) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin",
        "/v1/files/../../admin",
        "/v1/%2e%2e/admin",
        "/v1/.%2E/x",
        "/v1/a/..%2f..%2fadmin",
        "/v1/./x",
        "/v1/..%5cadmin",
    ],
)
def test_no_path_leads_out_of_the_api(proxy: str, upstream: RawUpstream, path: str) -> None:
    before = len(upstream.arrived)
    got = ask(proxy, path, None)
    assert (got.status, got.error["code"]) == (404, "not_found")
    assert len(upstream.arrived) == before


def test_the_proxys_own_paths(proxy: str) -> None:
    assert ask(proxy, "/livez", None).body == b"alive\n"
    assert ask(proxy, "/readyz", None).body == b"ready\n"
    metrics = ask(proxy, "/metrics", None)
    assert metrics.status == 200
    assert b"compaction_requests_total" in metrics.body
    refused = ask(proxy, "/metrics", b"{}")
    assert (refused.status, refused.error["code"], refused.header("allow")) == (405, "method_not_allowed", "GET")
    assert ask(proxy, "/livez", None, method="HEAD").status == 200


def test_the_record_of_a_read_names_its_upstream(start_proxy: StartProxy, upstream: RawUpstream) -> None:
    url = start_proxy(upstream.url, {"log": {"requests": "all"}})
    for method in ("GET", "DELETE"):
        with capture_logs() as logs:
            assert ask(url, "/v1/files/f", None, method=method).status == 200
            assert until(lambda logs=logs: "request.finished" in [line["event"] for line in logs])
        assert [line["upstream"] for line in logs if line["event"] == "request.finished"] == ["main"]
