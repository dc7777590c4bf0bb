"""Web pages in a real browser: listed origins can use the proxy, all others get nothing."""

import threading
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import pytest

from tests.kit.client import CHAT, StartProxy
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head
from tests.product.browser import CHROMIUM, DRIVER, MISSING, Browser, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)

FOREIGN = "foreign.example"
REBOUND = "rebound.example"

ASK = """
    const [url, path, headers, mode, signal] = given;
    const init = {method: path.endsWith("completions") ? "POST" : "GET", headers, mode};
    if (init.method === "POST")
        init.body = JSON.stringify({model: "m", stream: true, messages: [{role: "user", content: "Hello"}]});
    let response;
    try { response = await fetch(url + path, init); } catch (error) { return {failed: String(error)}; }
    let text = "", pieces = 0;
    if (response.body) {
        const reader = response.body.getReader(), decoder = new TextDecoder();
        for (;;) {
            const {done, value} = await reader.read();
            if (done) break;
            text += decoder.decode(value, {stream: true});
            if (++pieces === 1 && signal) await fetch(signal);
        }
    }
    return {type: response.type, status: response.status, text, pieces, headers: Object.fromEntries(response.headers)};
"""

HELD = threading.Event()
"""Set once a page has read the first event of a stream."""

FIRST = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{"content":"lo"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    rules = f"MAP {FOREIGN} 127.0.0.1, MAP {REBOUND} 127.0.0.1"
    with browser(tmp_path_factory.mktemp("chromium"), rules) as running:
        yield running


@pytest.fixture(scope="module")
def pages() -> Iterator[RawUpstream]:
    """Serves an empty page for any path; ``/read`` lets the upstream go on."""

    def script(arrived: Arrived) -> Sequence[Step]:
        if arrived.target == "/read":
            HELD.set()
        return [answer(b"<!doctype html><title>page</title>", headers=[("Content-Type", "text/html")])]

    with RawUpstream(script) as running:
        yield running


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    def script(arrived: Arrived) -> Sequence[Step]:
        if arrived.method == "GET":
            return [answer(b'{"data":[]}', headers=[("Content-Type", "application/json")])]
        return [stream_head(("X-Request-Id", "req_1")), chunk(FIRST), HELD, chunk(LAST), chunk(b"")]

    with RawUpstream(script) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(start_module_proxy: StartProxy, upstream: RawUpstream, pages: RawUpstream) -> str:
    listed = {"server": {"cors_origins": [pages.url]}, "upstreams": {"main": {"api_key": "sk-operator"}}}
    return start_module_proxy(upstream.url, listed)


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/json", "authorization": "Bearer sk-own"}])
def test_a_listed_page_reads_a_stream(
    chromium: Browser, pages: RawUpstream, proxy: str, headers: dict[str, str]
) -> None:
    HELD.clear()
    chromium.open(pages.url)
    got = chromium.run(ASK, proxy, CHAT, headers, "cors", f"{pages.url}/read")
    assert got.get("status") == 200, got
    assert got["text"] == (FIRST + LAST).decode()
    assert got["pieces"] > 1, "the first event came before the last one was sent"
    assert (got["headers"]["x-compaction"], got["headers"]["x-request-id"]) == ("none", "req_1")


def test_a_listed_page_reads_the_proxys_own_errors(chromium: Browser, pages: RawUpstream, proxy: str) -> None:
    chromium.open(pages.url)
    got = chromium.run(ASK, proxy, "/nothing", {}, "cors", None)
    assert (got["status"], '"not_found"' in got["text"]) == (404, True)


@pytest.mark.parametrize("host", [FOREIGN, "localhost"])
def test_a_page_of_another_origin_reaches_nothing(
    chromium: Browser, pages: RawUpstream, upstream: RawUpstream, proxy: str, host: str
) -> None:
    before = len(upstream.arrived)
    chromium.open(f"http://{host}:{urlsplit(pages.url).port}")
    for path in (CHAT, "/v1/models", "/metrics"):
        for headers in ({}, {"authorization": "Bearer sk-any"}):
            assert "failed" in chromium.run(ASK, proxy, path, headers, "cors", None)
        # Without CORS a page can't read the response, but an upstream could have been asked for it.
        assert chromium.run(ASK, proxy, path, {}, "no-cors", None).get("status") in (0, None)
    assert len(upstream.arrived) == before


def test_a_person_comes_to_the_requests(chromium: Browser, proxy: str) -> None:
    chromium.open(proxy)
    assert "Requests" in chromium.run("return document.body.innerText")
    assert chromium.run("return document.styleSheets[0].cssRules.length") > 0, "the policy allows the style"
