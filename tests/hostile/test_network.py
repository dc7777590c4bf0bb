"""R15: a clock that jumps, names, certificates and addresses that fail, and what the environment says of proxies."""

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.upstream.connections import environment_proxy
from tests.kit.client import CHAT, JSON, StartProxy, ask, chat
from tests.kit.program import call, run, served
from tests.kit.raw_upstream import Arrived, RawUpstream, Stage, Step, answer
from tests.kit.scripted import proxied

GOOD = b'{"choices":[]}'


@pytest.mark.parametrize("days", [-400, 400])
def test_a_clock_that_jumps(start_proxy: StartProxy, stage: Stage, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """It jumps while a summary is made: deadlines do not follow it, and what is kept by it is at worst made again."""
    now = time.time

    def compacted(url: str) -> str | None:
        messages = [{"role": "user", "content": f"Jump of {days} days"}]
        for turn in range(12):
            messages += [{"role": "assistant", "content": "some words " * 200}, {"role": "user", "content": str(turn)}]
        got = ask(url, CHAT, chat(messages=messages))
        assert (got.status, got.header("x-compaction")) == (200, "compacted")
        return got.header("x-compaction-summary")

    summary = answer(json.dumps({"choices": [{"message": {"content": "Goal: nothing."}}]}).encode())

    def script(arrived: Arrived) -> list[Step]:
        if b"<transcript>" not in arrived.body:
            return [answer(GOOD)]
        monkeypatch.setattr(time, "time", lambda: now() + days * 86_400)
        return [summary]

    with stage(script) as upstream:
        policy = {"trigger": {"tokens": 1000}, "keep": {"messages": 2}, "summary": {"max_tokens": 200}}
        policy |= {"user_messages": {"max_tokens": 200}, "index": {"max_tokens": 50}}
        url = start_proxy(upstream.url, {"policies": {"default": policy}, "server": {"deadline": 30}})
        assert compacted(url) == "made"
        assert time.time() != pytest.approx(now(), abs=86_400)
        assert compacted(url) in ("stored", "made")
        monkeypatch.setattr(time, "time", now)
        assert compacted(url) in ("stored", "made")


@pytest.mark.parametrize("broken", ["gaierror", "UnicodeError"])
def test_a_name_that_leads_nowhere(start_proxy: StartProxy, broken: str) -> None:
    reason = {
        "gaierror": r"(name not found|the name server doesn't answer)",
        "UnicodeError": "the host name isn't valid",
    }
    host = "no-such-host.invalid" if broken == "gaierror" else f"{'long' * 20}.invalid"
    url = start_proxy(f"http://{host}")
    for path, body in ((CHAT, chat()), (CHAT, chat(stream=True)), ("/v1/embeddings", b"{}"), ("/v1/models", None)):
        got = ask(url, path, body)
        assert (got.status, got.error["code"]) == (502, "upstream_unreachable"), path
        assert host not in got.error["message"]
        assert re.match(f"Cannot connect to upstream 'main': {reason[broken]}[.] Try again", got.error["message"])


def _can_use_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not _can_use_ipv6(), reason="no IPv6 on this machine")
def test_an_upstream_with_ipv6_alone(start_proxy: StartProxy) -> None:
    with RawUpstream(lambda _: [answer(GOOD)], host="::1") as upstream:
        url = start_proxy(upstream.url)
        assert "[::1]" in upstream.url
        for path in (CHAT, "/v1/embeddings"):
            assert ask(url, path, chat()).body == GOOD
        assert len(upstream.arrived) == 2


def test_a_proxy_that_the_environment_names(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``HTTP_PROXY`` holds for upstreams elsewhere, and not for those on this machine."""
    with stage(lambda _: [answer(GOOD)]) as upstream, RawUpstream(lambda _: [answer(b'{"by":"proxy"}')]) as forward:
        monkeypatch.setenv("http_proxy", forward.url)
        far = {"upstreams": {"main": {"base_url": "http://far.invalid/v1", "api_key": "sk-far"}}}
        near = {"upstreams": {"main": {"base_url": f"{upstream.url}/v1"}}}
        with proxied(far, tmp_path) as url:
            assert ask(url, CHAT, chat()).body == b'{"by":"proxy"}'
        assert forward.last.target == "http://far.invalid/v1/chat/completions"
        with proxied(near, tmp_path) as url:
            assert ask(url, CHAT, chat()).body == GOOD
        assert (len(forward.arrived), len(upstream.arrived)) == (1, 1)


def test_a_proxy_of_the_environment_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with proxied({"upstreams": {"main": {"base_url": "http://far.invalid/v1"}}}, tmp_path) as url:
        got = ask(url, CHAT, chat())
    assert (got.status, got.error["code"]) == (502, "upstream_unreachable")


def test_where_no_proxy_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "inside.invalid")
    assert environment_proxy("https://far.invalid/v1") == "http://proxy.invalid:3128"
    assert environment_proxy("https://api.inside.invalid/v1") is None
    assert environment_proxy("http://far.invalid/v1") is None
    for local in ("localhost", "127.0.0.1", "[::1]"):
        assert environment_proxy(f"https://{local}:8000/v1") is None


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate authority, and with two servers' certificates from it: ``valid`` and ``expired``."""
    folder = tmp_path_factory.mktemp("authority")
    (folder / "index.txt").touch()
    (folder / "serial").write_text("01")
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={folder}/index.txt\nserial={folder}/serial\nnew_certs_dir={folder}\n"
        "default_md=sha256\npolicy=p\nunique_subject=no\nx509_extensions=e\n[p]\ncommonName=supplied\n"
        "[e]\nsubjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n"
    )

    def openssl(command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)

    openssl(
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 30 -subj /CN=Tests "
        "-addext keyUsage=critical,keyCertSign"
    )
    for name, dates in {"valid": "-days 20", "expired": "-startdate 20200101000000Z -enddate 20200201000000Z"}.items():
        openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN=127.0.0.1")
        openssl(f"ca -batch -config ca.cnf -cert ca.pem -keyfile ca.key -in {name}.csr -out {name}.pem {dates}")
    return folder


@contextlib.contextmanager
def secured(authority: Path, name: str) -> Iterator[RawUpstream]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / f"{name}.pem", authority / f"{name}.key")
    with RawUpstream(lambda _: [answer(GOOD)], tls=context) as upstream:
        yield upstream


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_a_certificate_that_has_expired(authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers' certificates are from an authority that is trusted; one is out of date."""
    monkeypatch.setitem(os.environ, "SSL_CERT_FILE", str(authority / "ca.pem"))
    with secured(authority, "valid") as valid, secured(authority, "expired") as expired:
        addresses = {"good": valid.url, "old": expired.url}
        settings = {
            "upstreams": {
                name: {"base_url": url.replace("http:", "https:") + "/v1"} for name, url in addresses.items()
            },
            "models": [{"match": "old", "upstream": "old"}, {"match": "*", "upstream": "good"}],
        }
        with served(settings, tmp_path) as url:
            assert ask(url, CHAT, chat()).body == GOOD
            got = ask(url, CHAT, chat().replace(b"gpt-4o-mini", b"old"), [JSON, ("authorization", "Bearer sk-canary")])
        assert (got.status, got.error["code"]) == (502, "upstream_unreachable")
        assert "certificate isn't valid (certificate has expired)" in got.error["message"]
        assert CHAT in {arrived.target for arrived in valid.arrived}
        assert expired.arrived == [], "no key goes to it"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")
def test_a_private_authority_needs_a_variable(authority: Path, tmp_path: Path) -> None:
    """Without it, the response and `check --live` name it. The test above trusts the authority by it."""
    with secured(authority, "valid") as upstream:
        settings = {"upstreams": {"main": {"base_url": upstream.url.replace("http:", "https:") + "/v1"}}}
        with served(settings, tmp_path) as url:
            got = ask(url, CHAT, chat())
            forwarded = httpx.get(f"{url}/v1/files", trust_env=False)
        live = call(tmp_path, "check", "--live", "config.yaml").stdout
        trusting = run(tmp_path, "check", "--live", "config.yaml", SSL_CERT_FILE=str(authority / "ca.pem")).stdout
    said = "(unable to get local issuer certificate; for a private CA, SSL_CERT_FILE must name its file)"
    assert (got.status, said in got.error["message"]) == (502, True)
    assert forwarded.status_code == 502
    assert len(forwarded.headers["x-compaction-id"]) == 24
    assert "Fix: set the environment variable SSL_CERT_FILE to a file with the certificate of the CA" in live
    assert "ok       upstream main: reachable" in trusting
