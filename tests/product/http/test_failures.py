"""Upstreams that fail, and loops: each gets its status and words, and says nothing of keys and addresses."""

import logging
import shutil
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.client import CHAT, JSON, Got, StartProxy, ask, chat
from tests.kit.program import free_port
from tests.kit.raw_upstream import End, RawUpstream, Stage, Step, answer, chunk, head, stream_head

CANARY = "sk-canary-5ec4e7"
CALLERS = "sk-callers-5ec4e7"
HOST = "canary-upstream.invalid"


def everywhere(url: str) -> list[Got]:
    headers = [JSON, ("authorization", f"Bearer {CALLERS}")]
    return [
        ask(url, CHAT, chat("canary words of a prompt"), headers),
        ask(url, CHAT, chat("canary words of a prompt", stream=True), headers),
        ask(url, "/v1/embeddings", b'{"input":"canary words of a prompt"}', headers),
        ask(url, "/v1/models", None, headers),
    ]


def assert_nothing_shows(got: Sequence[Got], logs: str, port: int | str) -> None:
    shown = logs + "".join(f"{answer.headers}{answer.body!r}" for answer in got)
    for secret in (CANARY, CALLERS, HOST, "canary words", f"127.0.0.1:{port}", f":{port}"):
        assert secret not in shown, secret


def logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    out, err = capfd.readouterr()
    return out + err + caplog.text


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def configured(**server: Any) -> dict[str, Any]:
    return {"upstreams": {"main": {"api_key": CANARY}}, "server": server}


def test_nobody_listens(
    start_proxy: StartProxy, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    got = everywhere(start_proxy(f"http://127.0.0.1:{port}", configured()))
    assert [(g.status, g.error["code"], g.error["type"]) for g in got] == [
        (502, "upstream_unreachable", "server_error")
    ] * 4
    assert got[0].error["message"].startswith("Cannot connect to upstream 'main': connection refused. Try again later")
    assert_nothing_shows(got, logged(capfd, caplog), port)


def test_no_such_host(
    start_proxy: StartProxy, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    got = everywhere(start_proxy(f"http://{HOST}", configured()))
    assert [(g.status, g.error["code"]) for g in got] == [(502, "upstream_unreachable")] * 4
    assert_nothing_shows(got, logged(capfd, caplog), "no port")


def test_no_tls(
    start_proxy: StartProxy,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other side waits for HTTP, and never says a word of TLS."""
    monkeypatch.setattr("proxy.upstream.connections.CONNECT_SECONDS", 0.3)
    with RawUpstream() as upstream:
        port = upstream.url.rpartition(":")[2]
        got = everywhere(start_proxy(upstream.url.replace("http:", "https:"), configured()))
    assert [(g.status, g.error["code"]) for g in got] == [(502, "upstream_unreachable")] * 4
    assert_nothing_shows(got, logged(capfd, caplog), port)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_a_certificate_that_nobody_signed(
    start_proxy: StartProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 2 -subj /CN=127.0.0.1"
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with RawUpstream(tls=context) as upstream:
        got = everywhere(start_proxy(upstream.url.replace("http:", "https:"), configured()))
        assert upstream.arrived == []
    assert [(g.status, g.error["code"]) for g in got] == [(502, "upstream_unreachable")] * 4
    assert "certificate" in got[0].error["message"]
    assert_nothing_shows(got, logged(capfd, caplog), upstream.url.rpartition(":")[2])


@pytest.mark.parametrize(
    "steps",
    [
        [End.SILENCE],
        [b"HTTP/1.1 200 OK\r\nContent-Type: text/ev", End.SILENCE],
        [b"HTTP/1.1 100 Continue\r\n\r\n", End.SILENCE],
    ],
)
def test_no_answer(
    start_proxy: StartProxy,
    stage: Stage,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    steps: list[Step],
) -> None:
    with stage(lambda _: steps) as upstream:
        url = start_proxy(upstream.url, configured(deadline=0.5))
        began = time.monotonic()
        got = [ask(url, CHAT, chat(), [JSON, ("authorization", f"Bearer {CALLERS}")]), ask(url, "/v1/embeddings")]
        assert time.monotonic() - began < 15
        assert [(g.status, g.error["code"]) for g in got] == [(504, "upstream_timeout")] * 2
        assert upstream.wait_left() is not None
        assert_nothing_shows(got, logged(capfd, caplog), upstream.url.rpartition(":")[2])


@pytest.mark.parametrize(
    "begun", [[stream_head()], [stream_head(), chunk(b": comment\n\n")], [head("200 OK", [("Content-Length", "9")])]]
)
def test_an_answer_that_never_begins(start_proxy: StartProxy, stage: Stage, begun: list[Step]) -> None:
    """A head alone isn't an answer: the deadline continues until the first content."""
    with stage(lambda _: [*begun, End.SILENCE]) as upstream:
        got = ask(start_proxy(upstream.url, configured(deadline=0.5)), CHAT, chat(stream=True))
        assert (got.status, got.error["code"]) == (504, "upstream_timeout")
        assert upstream.wait_left() is not None


@pytest.mark.parametrize(
    "steps",
    [
        [b"garbage\r\n\r\n", End.CLOSE],
        [b"\x00\x01\x02\x03", End.CLOSE],
        [b"HTTP/1.1 abc OK\r\n\r\n", End.CLOSE],
        [b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", End.CLOSE],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", End.CLOSE],
        [b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n", End.CLOSE],
        [b"HTTP/1.1 200 OK\r\nContent-Type: text/", End.CLOSE],
        [End.CLOSE],
        [End.RESET],
        [stream_head(), End.RESET],
    ],
)
def test_no_http(
    start_proxy: StartProxy,
    stage: Stage,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    steps: list[Step],
) -> None:
    with stage(lambda _: steps) as upstream:
        url = start_proxy(upstream.url, configured())
        got = [ask(url, CHAT, chat(), [JSON, ("authorization", f"Bearer {CALLERS}")])]
        assert (got[0].status, got[0].error["code"]) == (502, "upstream_interrupted")
        assert_nothing_shows(got, logged(capfd, caplog), upstream.url.rpartition(":")[2])
        upstream.script = lambda _: [answer()]
        assert ask(url, CHAT, chat()).status == 200


def test_a_fault_of_ours_shows_nothing(
    start_proxy: StartProxy, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error nobody thought of: the client gets words without a cause, the server lives."""

    def broken(*_: object) -> None:
        raise RuntimeError(f"{CANARY} at {HOST}")

    with RawUpstream() as upstream:
        url = start_proxy(upstream.url, configured())
        with monkeypatch.context() as patch:
            patch.setattr("proxy.pipeline.sending.for_upstream", broken)
            got = ask(url, CHAT, chat())
        assert (got.status, got.error["code"]) == (500, "proxy_error")
        assert CANARY.encode() not in got.body
        assert "request.crashed" in capfd.readouterr().out
        assert ask(url, CHAT, chat()).status == 200


@pytest.mark.parametrize(
    "part", ["compactor.Compactor.untouched", "compactor.Compactor.compact", "recorder.Tags.describe"]
)
def test_a_fault_in_compaction_costs_no_request(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    with RawUpstream() as upstream:
        url = start_proxy(upstream.url)
        monkeypatch.setattr("proxy.pipeline.compactor.Compactor.untouched", lambda *_: None)
        monkeypatch.setattr(f"proxy.pipeline.{part}", broken)
        got = ask(url, CHAT, chat())
        assert (got.status, got.header("x-compaction"), upstream.last.body) == (200, "failed", chat())


@pytest.mark.parametrize("part", ["limits.calibration.Calibration.wants", "dialects.answers.AnswerTail.finished"])
def test_a_fault_in_learning_from_an_answer_costs_no_request(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], part: str
) -> None:
    """The first one is before the answer is sent, the second one after it."""

    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    with RawUpstream(lambda _: [answer(b'{"choices":[]}')]) as upstream:
        url = start_proxy(upstream.url)
        monkeypatch.setattr("proxy.pipeline.compactor.Compactor.untouched", lambda *_: None)
        monkeypatch.setattr(f"proxy.{part}", broken)
        got = ask(url, CHAT, chat())
        assert (got.status, got.body) == (200, b'{"choices":[]}')
        until = time.monotonic() + 10
        while "counting.failed" not in (printed := capfd.readouterr().out):
            assert time.monotonic() < until, printed
            time.sleep(0.01)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/embeddings"])
def test_a_proxy_that_is_its_own_upstream(start_proxy: StartProxy, path: str) -> None:
    relay = RawUpstream()
    with relay:
        # The second proxy's upstream is found out only once the first one runs: a redirecting host in between.
        first = start_proxy(relay.url)
        second = start_proxy(first)

        def around(arrived: Any) -> list[Step]:
            headers = [(name, value) for name, value in arrived.headers if name in ("x-compaction-via", "content-type")]
            got = ask(second, path, None if path == "/v1/models" else arrived.body, headers)
            return [answer(got.body, f"{got.status} X")]

        relay.script = around
        began = time.monotonic()
        got = ask(first, path, None if path == "/v1/models" else chat())
    assert (got.status, got.error["code"]) == (508, "loop_detected")
    assert "base_url" in got.error["message"]
    assert time.monotonic() - began < 15


def test_a_chain_of_proxies_is_no_loop(start_proxy: StartProxy) -> None:
    with RawUpstream() as upstream:
        url = upstream.url
        for _ in range(4):
            url = start_proxy(url)
        assert ask(url, CHAT, chat()).status == 200
        assert upstream.last.body == chat()
