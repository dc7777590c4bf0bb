"""S15, S17: web pages get nothing unless the configuration lists their origin, and no route is open by accident."""

import hashlib
import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.routing import Route

from proxy.http.headers import Own
from proxy.server.app import Proxy
from tests.conftest import settings_for
from tests.kit.client import CHAT, TIMEOUT, Got, StartProxy, chat, received
from tests.kit.configurations import check
from tests.kit.raw_upstream import RawUpstream, answer

Headers = Sequence[tuple[str, str]]

ARCHIVE = "/compaction/archive/00000000000000000000"
PATHS = (CHAT, "/v1/models", "/v1/files", "/v1/embeddings", ARCHIVE, "/metrics", "/readyz")
APP = "https://app.example"
KEY = "sk-team"
OPERATOR = {"upstreams": {"main": {"api_key": "sk-operator"}}}
LISTED = {**OPERATOR, "server": {"cors_origins": [APP]}}
TEAM = {"keys": ["sha256:" + hashlib.sha256(KEY.encode()).hexdigest()]}
KEYS = {**LISTED, "auth": {"mode": "keys"}, "teams": {"a": TEAM}}
BEYOND = {**OPERATOR, "server": {"host": "0.0.0.0"}}  # noqa: S104 - the setting; tests listen on loopback
PREFLIGHT = [("access-control-request-method", "POST"), ("access-control-request-headers", "authorization,x-any")]


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    own = [("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Credentials", "true"), ("Vary", "accept")]
    with RawUpstream(lambda _: [answer(b'{"data":[],"choices":[]}', headers=own)]) as running:
        yield running


def sent(url: str, path: str, headers: Headers, method: str | None = None, body: bytes | None = None) -> Got:
    """Send a request as a browser does: with any Host, and a body that needs no preflight."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT)
    if body is None and path in (CHAT, "/v1/embeddings") and method is None:
        body = chat()
    method = method or ("GET" if body is None else "POST")
    try:
        named = any(name == "host" for name, _ in headers)
        connection.putrequest(method, path, skip_host=named, skip_accept_encoding=True)
        for name, value in [*headers, *([("content-type", "text/plain")] if body else [])]:
            connection.putheader(name, value)
        if body:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        return received(connection.getresponse())
    finally:
        connection.close()


def cors(got: Got) -> dict[str, list[str]]:
    return {name: got.all(name) for name, _ in got.headers if name.startswith("access-control-")}


FOREIGN: dict[str, tuple[str, Headers]] = {
    "a page of another site": ("origin", [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")]),
    "a browser without Sec-Fetch-Site": ("origin", [("origin", "https://evil.example")]),
    "an image": ("origin", [("sec-fetch-site", "cross-site")]),
    "another port of this machine": ("origin", [("sec-fetch-site", "same-site"), ("origin", "http://127.0.0.1:1")]),
    "a sandboxed page": ("origin", [("origin", "null")]),
    "two origins": ("origin", [("origin", APP), ("origin", "https://evil.example")]),
    "a password that the browser adds": ("origin", [("origin", "https://evil.example"), ("authorization", "Basic eA")]),
    "a listed name with more": ("origin", [("origin", f"{APP}.evil.example")]),
    "a rebound name": ("host", [("host", "evil.example:8787")]),
    "a rebound page": ("host", [("host", "evil.example:8787"), ("origin", "http://evil.example:8787")]),
    "a rebound page with a key": ("host", [("host", "evil.example"), ("authorization", "Bearer sk-any")]),
    "a rebound page with Azure's key": ("host", [("host", "evil.example"), ("api-key", "sk-any")]),
    "a name that begins right": ("host", [("host", "localhost.evil.example")]),
    "an address of elsewhere": ("host", [("host", "192.0.2.1:8787")]),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_page_of_elsewhere_gets_nothing(start_proxy: StartProxy, upstream: RawUpstream, case: str) -> None:
    code, headers = FOREIGN[case]
    url, before = start_proxy(upstream.url, LISTED), len(upstream.arrived)
    for path in PATHS:
        got = sent(url, path, headers)
        assert (got.status, got.error["code"]) == (403, f"{code}_not_allowed"), path
        assert f"server.{'hosts' if code == 'host' else 'cors_origins'}" in got.error["message"]
        assert cors(got) == {}
    assert len(upstream.arrived) == before
    assert sent(url, "/livez", headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "LocalHost")],
        [("host", "localhost:1")],
        [("host", "[::1]:8787")],
        [("sec-fetch-site", "none")],
        [("host", "127.0.0.1:8787"), ("origin", "http://127.0.0.1:8787"), ("sec-fetch-site", "same-origin")],
        [("host", "localhost:8787"), ("origin", "http://localhost:8787")],
        [("origin", "https://other.example"), ("authorization", "Bearer sk-own")],
        [("origin", "app://desktop"), ("x-api-key", "sk-own")],
    ],
    ids=str,
)
def test_others_are_served(start_proxy: StartProxy, upstream: RawUpstream, headers: Headers) -> None:
    url = start_proxy(upstream.url, LISTED)
    for path in PATHS:
        got = sent(url, path, headers)
        assert got.status == (404 if path == ARCHIVE else 200), path
        assert cors(got) == {}, "the upstream's own are dropped"
    assert upstream.last.header("origin") is None
    assert upstream.last.header("sec-fetch-site") is None


def test_a_key_that_the_upstream_gets_is_worth_more_than_a_name(start_proxy: StartProxy, upstream: RawUpstream) -> None:
    url = start_proxy(upstream.url)
    assert sent(url, CHAT, [("host", "llm.example"), ("authorization", "Bearer sk-own")]).status == 200
    assert "send your API key" in sent(url, CHAT, [("host", "llm.example")]).error["message"]
    named = start_proxy(upstream.url, {**OPERATOR, "server": {"hosts": ["LLM.example"]}})
    assert sent(named, CHAT, [("host", "llm.example:443")]).status == 200


@pytest.mark.parametrize(
    ("server", "headers", "status"),
    [
        ({}, [("host", "any.example")], 200),
        ({}, [("host", "any.example"), ("origin", "https://any.example")], 200),
        ({}, [("host", "any.example"), ("origin", "https://evil.example")], 403),
        ({}, [("host", "any.example"), ("sec-fetch-site", "same-site")], 403),
        ({"hosts": ["llm.example"]}, [("host", "llm.example")], 200),
        ({"hosts": ["llm.example"]}, [("host", "192.0.2.1:8787")], 200),
        ({"hosts": ["llm.example"]}, [("host", "[2001:db8::1]:8787")], 200),
        ({"hosts": ["llm.example"]}, [("host", "localhost")], 200),
        ({"hosts": ["llm.example"]}, [("host", "evil.example"), ("origin", "http://evil.example")], 403),
    ],
    ids=str,
)
def test_beyond_loopback(
    start_proxy: StartProxy, upstream: RawUpstream, server: dict[str, Any], headers: Headers, status: int
) -> None:
    url = start_proxy(upstream.url, {**BEYOND, "server": {**BEYOND["server"], **server}})
    assert sent(url, CHAT, headers).status == status


@pytest.mark.parametrize("overrides", [LISTED, KEYS], ids=["open", "keys"])
@pytest.mark.parametrize("path", [CHAT, "/v1/files", ARCHIVE, "/readyz"])
def test_the_proxy_answers_preflights(
    start_proxy: StartProxy, upstream: RawUpstream, overrides: dict[str, Any], path: str
) -> None:
    url, before = start_proxy(upstream.url, overrides), len(upstream.arrived)
    got = sent(url, path, [("origin", APP), *PREFLIGHT], "OPTIONS")
    assert got.status == 200
    assert got.all("access-control-allow-origin") == [APP]
    assert "POST" in (got.header("access-control-allow-methods") or "")
    assert got.header("access-control-allow-headers") == "authorization,x-any"
    assert int(got.header("access-control-max-age") or 0) > 0
    assert "Origin" in (got.header("vary") or "")
    assert got.header("access-control-allow-credentials") is None
    refused = sent(url, path, [("origin", "https://evil.example"), *PREFLIGHT], "OPTIONS")
    assert (refused.status, refused.error["code"], cors(refused)) == (403, "origin_not_allowed", {})
    assert len(upstream.arrived) == before


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ([("authorization", f"Bearer {KEY}")], chat(), 200),
        ([("authorization", "Bearer wrong")], chat(), 401),
        ([], chat(), 401),
        ([("authorization", f"Bearer {KEY}")], b"[]", 400),
    ],
    ids=str,
)
def test_a_listed_page_reads_every_response(
    start_proxy: StartProxy, upstream: RawUpstream, headers: Headers, body: bytes, status: int
) -> None:
    url = start_proxy(upstream.url, {**KEYS, "models": [{"match": "gpt-*", "upstream": "main"}]})
    got = sent(url, CHAT, [("origin", APP), ("sec-fetch-site", "cross-site"), *headers], body=body)
    assert got.status == status
    assert got.all("access-control-allow-origin") == [APP]
    assert got.all("access-control-allow-credentials") == []
    assert "Origin" in (got.header("vary") or "")
    (exposed,) = got.all("access-control-expose-headers")
    ours = {name for name, _ in got.headers if name.startswith("x-compaction")}
    assert ours <= set(Own)
    # With credentials, browsers don't read "*" as every header.
    assert {*Own, "x-request-id", "retry-after"} <= set(exposed.split(", "))


@pytest.mark.parametrize("path", ["/compaction/sign-in", "/compaction/sign-out"])
@pytest.mark.parametrize(
    "overrides", [KEYS, {"server": {"cors_origins": ["*"]}}, BEYOND], ids=["keys", "any", "beyond"]
)
def test_other_pages_start_and_end_no_session(
    start_proxy: StartProxy, upstream: RawUpstream, path: str, overrides: dict[str, Any]
) -> None:
    url = start_proxy(upstream.url, overrides)
    own = urlsplit(url).netloc
    for site, origin, status in (
        ("cross-site", "https://evil.example", 403),
        ("same-site", "http://127.0.0.1:1", 403),
        (None, "https://evil.example", 403),
        (None, "null", 403),
        ("same-origin", f"http://{own}", 303),
        (None, f"http://{own}", 303),
        (None, None, 303),
    ):
        headers = [("origin", origin)] if origin else []
        got = sent(url, path, [*headers, *([("sec-fetch-site", site)] if site else [])], body=f"key={KEY}".encode())
        assert (got.status, bool(got.all("set-cookie"))) == (status, status == 303), (site, origin)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("server: {cors_origins: [https://app.example, 'http://localhost:5173', 'chrome-extension://abc']}", None),
        ("server: {cors_origins: ['HTTPS://App.example:443', 'http://[::1]:5173']}", None),
        ("server: {cors_origins: [https://app.example/]}", "must be an origin"),
        ("server: {cors_origins: [app.example]}", "must be an origin"),
        ("server: {cors_origins: ['null']}", "must be an origin"),
        ("server: {cors_origins: ['https://*.example']}", "must be an origin"),
        ("server: {cors_origins: ['https://a@b.example']}", "must be an origin"),
        ("server: {hosts: [llm.example, '[::1]', 10.0.0.1]}", None),
        ("server: {hosts: ['llm.example:80']}", "without a port"),
        ("server: {hosts: ['*']}", "without a port"),
        ("server: {cors_origins: ['*']}", None),
        ("server: {cors_origins: ['*']}\nupstreams: {a: {api_key: k}}", "spend the key of upstreams.a"),
        ("server: {cors_origins: ['*']}\nupstreams: {a: {headers: {x-api-key: k}}}", "spend the key of upstreams.a"),
    ],
)
def test_the_settings_are_checked(tmp_path: Path, text: str, wrong: str | None) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    found = check(file, {})
    assert found == [] if wrong is None else wrong in found[0]


UNKEYED = {"/", "/compaction", "/livez", "/readyz", "/metrics"}
"""Every path that needs no key. A new route is closed unless it is added here."""


SIGNING_IN = ("/compaction/sign-in", "/compaction/sign-out", "/compaction/assets/{name}")
"""Paths of the dashboard for people who aren't signed in. They return nothing about callers."""


def test_every_other_route_needs_a_key(start_proxy: StartProxy, upstream: RawUpstream, tmp_path: Path) -> None:
    routes = Proxy(settings_for(upstream.url, tmp_path, KEYS)).routes
    assert routes
    url, before = start_proxy(upstream.url, KEYS), len(upstream.arrived)
    paths = [route.path for route in routes if isinstance(route, Route)]
    assert len(paths) == len(routes), "each is walked"
    assert set(paths) >= UNKEYED
    for path in [*paths, CHAT, "/v1/models", "/v1/files", "/v1/{anything}"]:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
            status = sent(url, path.replace("{id:path}", "0" * 20), [], method).status
            if path in UNKEYED:
                assert status == (
                    (303 if path in ("/", "/compaction") else 200) if method in ("GET", "HEAD") else 405
                ), (method, path)
            elif path in SIGNING_IN:
                assert status in (200, 303, 401, 404, 405), (method, path)
            else:
                assert status in (401, 405), (method, path)
                assert status == 401 or path.startswith("/compaction/"), (method, path)
    assert len(upstream.arrived) == before


def test_a_refusal_has_the_shape_that_the_client_expects(start_proxy: StartProxy, upstream: RawUpstream) -> None:
    url = start_proxy(upstream.url, LISTED)
    got = sent(url, "/v1/messages", [("origin", "https://evil.example")], body=b"{}")
    error = json.loads(got.body)
    assert (got.status, error["type"], error["error"]["type"]) == (403, "error", "permission_error")
