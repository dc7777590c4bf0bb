"""Requests that ask for another protocol: ``h2c`` is ignored and the body arrives whole, WebSocket gets 426."""

import contextlib
import json
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.test_smuggling import told
from tests.kit.client import CHAT, StartProxy, chat, connected, read_until
from tests.kit.raw_upstream import RawUpstream, answer

PATHS = [CHAT, "/v1/embeddings", "/v1/responses"]
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
ANSWER = b'{"choices":[],"data":"hello"}'

JAVA = """
import java.net.URI;
import java.net.http.*;

public class Client {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 1; i < args.length; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[i]))
                .header("content-type", "application/json").POST(HttpRequest.BodyPublishers.ofString(args[0])).build();
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(response.statusCode() + " " + response.body());
        }
    }
}
"""


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(lambda _: [answer(ANSWER)]) as running:
        yield running


@pytest.fixture
def entrance(upstream: RawUpstream, start_proxy: StartProxy) -> str:
    upstream.arrived = []
    return start_proxy(upstream.url)


def head(path: str, body: bytes, framing: bytes = b"") -> bytes:
    length = framing or b"Content-Length: %d\r\n" % len(body)
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode() + H2C + length + b"\r\n"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pause", [None, 0.1], ids=["one segment", "two segments"])
def test_h2c_is_ignored(entrance: str, upstream: RawUpstream, path: str, pause: float | None) -> None:
    """The request and its keep-alive connection work as if ``Upgrade`` weren't there."""
    body = chat()
    with connected(entrance) as connection:
        for turn in range(2):
            if pause is None:
                connection.sendall(head(path, body) + body)
            else:
                connection.sendall(head(path, body))
                time.sleep(pause)
                connection.sendall(body)
            assert read_until(connection, ANSWER).startswith(b"HTTP/1.1 200 ")
            assert len(upstream.arrived) == turn + 1
    for one in upstream.arrived:
        assert (one.target, one.body) == (path, body)
        assert not {"upgrade", "connection", "http2-settings"} & {name for name, _ in one.headers}


def test_h2c_with_chunks(entrance: str, upstream: RawUpstream) -> None:
    body = chat()
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert told(entrance, head(CHAT, body, b"Transfer-Encoding: chunked\r\n") + chunks).startswith(b"HTTP/1.1 200 ")
    assert [one.body for one in upstream.arrived] == [body]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_behind_an_upgrade_is_no_request(entrance: str, upstream: RawUpstream, path: str) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-inner\r\n\r\n"
    with connected(entrance) as connection:
        connection.sendall(head(path, hidden))
        time.sleep(0.3)
        connection.sendall(hidden)
        connection.settimeout(0.5)
        got = b""
        with contextlib.suppress(TimeoutError):
            while part := connection.recv(65_536):
                got += part
    assert got.count(b"HTTP/1.1 ") == 1
    assert [one.target for one in upstream.arrived] == [path]
    assert all(one.body == hidden for one in upstream.arrived)


def test_thousands_of_upgrades_in_one_segment(entrance: str, upstream: RawUpstream) -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    got = told(entrance, one * 2_000)
    assert got.count(b"HTTP/1.1 200 ") == 2_000


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/realtime?model=x", "/v1/models"])
@pytest.mark.parametrize("relayed", [False, True])
def test_websocket_is_refused(
    entrance: str, upstream: RawUpstream, path: str, relayed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also behind a relay that drops ``Upgrade`` and forwards the rest, as nginx does by default."""
    upgrade = b"" if relayed else b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    lines = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    with caplog.at_level(logging.INFO):
        got = told(entrance, b"GET %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode() + upgrade + lines)
    top, _, body = got.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 426 ")
    assert b"upgrade: HTTP/1.1" in top
    assert b"connection: upgrade" in top
    assert json.loads(body)["error"]["code"] == "upgrade_required"
    assert upstream.arrived == []
    assert "WebSocket" not in caplog.text


def test_connect_opens_no_tunnel(entrance: str, upstream: RawUpstream) -> None:
    got = told(entrance, b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\nGET /v1/models")
    assert got.startswith(b"HTTP/1.1 400 ")
    assert got.count(b"HTTP/1.1 ") == 1
    assert upstream.arrived == []


@pytest.mark.parametrize("path", PATHS)
def test_curl_http2(entrance: str, upstream: RawUpstream, path: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is missing: apt-get install curl")
    command = ["curl", "-s", "--http2", "-m", "20", "-w", " %{http_code}", "-H", "content-type: application/json"]
    done = subprocess.run([*command, "-d", chat().decode(), entrance + path], capture_output=True, check=True)
    assert done.stdout == ANSWER + b" 200"
    assert [one.body for one in upstream.arrived] == [chat()]


@pytest.mark.long
def test_java_http_client(entrance: str, upstream: RawUpstream, tmp_path: Path) -> None:
    """Java's own client, which LangChain4j and Spring AI use, asks for ``h2c`` by default."""
    if shutil.which("java") is None:
        pytest.skip("java is missing: apt-get install default-jdk-headless")
    source = tmp_path / "Client.java"
    source.write_text(JAVA)
    urls = [entrance + path for path in PATHS]
    done = subprocess.run(["java", str(source), chat().decode(), *urls], capture_output=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [b"200 " + ANSWER] * len(PATHS)
    assert [(one.target, one.body) for one in upstream.arrived] == [(path, chat()) for path in PATHS]
