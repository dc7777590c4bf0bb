"""A POST reaches the upstream at most once, and closed pooled connections don't make one fail.

The exception is a conversation whose reused connection closes before the first byte of a response.
"""

from collections.abc import Callable, Iterator

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.upstream import connections
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.client import CHAT, StartProxy, ask, chat
from tests.kit.raw_upstream import End, RawUpstream, Script, Stage, Step, answer, head


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 60.0)


LARGE = b'{"input":"' + b"x" * 3_000_000 + b'"}'


def pieces() -> Iterator[bytes]:
    yield b'{"input":'
    yield b'"x"}'


def breaks_off(end: End) -> Script:
    def script(arrived: object) -> list[Step]:
        return [end]

    return script


@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat()), ("/v1/embeddings", b"{}"), ("/v1/embeddings", LARGE)],
    ids=["chat", "embeddings", "large embeddings"],
)
def test_a_post_is_sent_once(
    start_proxy: StartProxy, stage: Stage, end: End, reused: bool, path: str, body: bytes
) -> None:
    with stage(lambda _: [answer()]) as upstream:
        url = start_proxy(upstream.url)
        if reused:
            assert ask(url, path, b"{}" if path != CHAT else chat()).status == 200
        upstream.arrived = []
        upstream.script = breaks_off(end)
        got = ask(url, path, body)
        assert (got.status, got.error["code"]) == (502, "upstream_interrupted")
        assert len(upstream.arrived) == (2 if reused and path == CHAT else 1)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
def test_a_conversation_is_sent_again_after_an_idle_connection_closed(
    start_proxy: StartProxy, stage: Stage, end: End, path: str
) -> None:
    with stage(lambda _: [answer()]) as upstream:
        url = start_proxy(upstream.url)
        assert ask(url, path, chat()).status == 200
        replies: list[list[Step]] = [[end], [answer()]]
        upstream.script = lambda _: replies.pop(0)
        assert ask(url, path, chat()).status == 200
        assert not replies


@pytest.mark.parametrize(
    "steps", [[head("200 OK"), End.CLOSE], [b"HTTP/1.1", End.CLOSE], [b"HTTP/1.1", End.RESET]], ids=repr
)
def test_a_begun_response_is_not_asked_for_again(start_proxy: StartProxy, stage: Stage, steps: list[Step]) -> None:
    with stage(lambda _: [answer()]) as upstream:
        url = start_proxy(upstream.url)
        assert ask(url, CHAT, chat()).status == 200
        upstream.arrived = []
        upstream.script = lambda _: steps
        assert ask(url, CHAT, chat()).status in (200, 502)
        assert len(upstream.arrived) == 1


def test_a_late_loss_is_not_retried(start_proxy: StartProxy, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.0)
    with stage(lambda _: [answer()]) as upstream:
        url = start_proxy(upstream.url)
        assert ask(url, CHAT, chat()).status == 200
        upstream.arrived = []
        upstream.script = breaks_off(End.CLOSE)
        assert ask(url, CHAT, chat()).status == 502
        assert len(upstream.arrived) == 1


def test_a_chunked_post_is_sent_once(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(breaks_off(End.CLOSE)) as upstream:
        assert ask(start_proxy(upstream.url), "/v1/embeddings", pieces()).status == 502
        assert len(upstream.arrived) == 1


def test_an_idempotent_request_is_sent_again_once(start_proxy: StartProxy, stage: Stage) -> None:
    with stage(breaks_off(End.CLOSE)) as upstream:
        assert ask(start_proxy(upstream.url), "/v1/files", None).status == 502
        assert len(upstream.arrived) == 2


def blocked_until_closed(upstream: RawUpstream) -> Callable[[ASGIApp], ASGIApp]:
    """Block the proxy's event loop before each request while the upstream closes idle connections."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def blocking(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                assert upstream.wait_closed()
            await app(scope, receive, send)

        return blocking

    return wrap


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
def test_a_closed_connection_is_not_used_again(start_proxy: StartProxy, path: str, end: End) -> None:
    """Even when the proxy's event loop hasn't learned yet that the upstream closed it."""
    with RawUpstream(lambda _: [answer(), 0.01, end]) as upstream:
        url = start_proxy(upstream.url, wrap=blocked_until_closed(upstream))
        assert [ask(url, path, chat()).status for _ in range(10)] == [200] * 10
        assert len(upstream.arrived) == 10


@pytest.mark.long
def test_a_translated_post_is_sent_once(start_proxy: StartProxy) -> None:
    """LiteLLM by default repeats a request whose connection was reset."""
    with RawUpstream(breaks_off(End.RESET)) as upstream:
        main = {"provider": "anthropic", "base_url": upstream.url, "api_key": AnthropicServer.key}
        got = ask(start_proxy(upstream.url, {"upstreams": {"main": main}}), CHAT, chat(stream=True))
        assert got.status == 502
        assert len(upstream.arrived) == 1
