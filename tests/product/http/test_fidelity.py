"""Requests that need no change pass unchanged: whole bodies, large bodies, and headers, byte for byte."""

import json
from pathlib import Path

import pytest

from tests.kit.client import CHAT, JSON, StartProxy, ask
from tests.kit.odd_bodies import generated, hand_written, with_stream
from tests.kit.raw_upstream import RawUpstream, answer

BODIES = [*hand_written(), *generated(100)]


def test_a_body_without_a_length_arrives_whole(start_proxy: StartProxy) -> None:
    with RawUpstream() as upstream:
        url = start_proxy(upstream.url)
        sent = with_stream(BODIES[1], False)
        got = ask(url, body=(sent[start : start + 7] for start in range(0, len(sent), 7)))
        assert got.status == 200
        assert upstream.last.body == sent


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_large_body_arrives_whole_with_its_length(start_proxy: StartProxy) -> None:
    with RawUpstream() as upstream:
        url = start_proxy(upstream.url)
        text = "x" * 3_000_000
        body = {"model": "gpt-4.1", "messages": [{"role": "user", "content": [{"type": "odd", "data": text}]}]}
        sent = json.dumps(body).encode()
        got = ask(url, body=sent)
        assert got.status == 200
        assert upstream.last.body == sent
        assert upstream.last.header("content-length") == str(len(sent))
        assert upstream.last.header("transfer-encoding") is None


def test_bodies_over_the_trigger_that_a_team_does_not_want_touched_are_equal(start_proxy: StartProxy) -> None:
    """``mode: off`` and ``shadow`` leave every spelling unchanged, at any size."""
    with RawUpstream() as upstream:
        for mode in ("off", "shadow"):
            policy = {"mode": mode, "trigger": {"tokens": 1}, "keep": {"messages": 1}}
            url = start_proxy(upstream.url, {"policies": {"default": policy}})
            for body in BODIES:
                sent = with_stream(body, None)
                got = ask(url, body=sent)
                assert (got.status, upstream.last.body) == (200, sent)
                assert got.header("x-compaction") == mode


SESSIONS = Path(__file__).parents[4] / "shared" / "data" / "sessions"


@pytest.mark.skipif(not SESSIONS.is_dir(), reason="the recorded sessions are not here")
def test_recorded_sessions_travel_untouched(start_proxy: StartProxy) -> None:
    whole = json.loads((SESSIONS / "coding-a.json").read_text())["messages"]
    talks = [talk["messages"] for talk in json.loads((SESSIONS / "airline-40.json").read_text())]
    talks += [whole[:count] for count in (1, 10, 100, 400, len(whole))]
    with RawUpstream() as upstream:
        url = start_proxy(upstream.url)
        for number, talk in enumerate(talks):
            # A window of a million tokens, so that nothing is to be done; three ways to write JSON.
            style = ({"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":"), "sort_keys": True})[number % 3]
            sent = json.dumps({"model": "gpt-4.1", "messages": talk, "x": [1.0]}, **style).encode()  # type: ignore[arg-type]
            got = ask(url, body=sent)
            assert (got.status, got.header("x-compaction")) == (200, "none")
            assert upstream.last.body == sent


def test_headers_travel_back(start_proxy: StartProxy) -> None:
    headers = [
        ("Content-Type", "application/json; charset=utf-8; odd=1"),
        ("X-Request-Id", "req_1"),
        ("x-ratelimit-remaining-tokens", "149984"),
        ("x-ratelimit-reset-tokens", "6ms"),
        ("openai-processing-ms", "17"),
        ("Set-Cookie", "a=1; Path=/; HttpOnly"),
        ("Set-Cookie", "b=2, 3; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
        ("Retry-After", "1"),
        ("X-Empty", ""),
        ("Connection", "X-Hop"),
        ("X-Hop", "for this hop"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("x-compaction", "forged"),
    ]
    for status in ("200 OK", "201 Created", "429 Too Many Requests", "500 Oh No", "302 Found", "404 Not Found"):
        with RawUpstream(lambda _, status=status: [answer(b'{"a": 1.0}', status, headers)]) as upstream:
            got = ask(start_proxy(upstream.url), body=with_stream(BODIES[0], None))
            assert got.status == int(status[:3])
            assert got.body == b'{"a": 1.0}'
            assert got.all("set-cookie") == [value for name, value in headers if name == "Set-Cookie"]
            assert got.all("x-compaction") == ["none"]
            for name, value in headers[:5] + headers[7:9]:
                assert got.all(name.lower()) == [value]
            assert not {"x-hop", "keep-alive", "proxy-authenticate"} & {name for name, _ in got.headers}


def test_headers_of_an_answer_keep_their_bytes(start_proxy: StartProxy) -> None:
    """Latin-1 and UTF-8 in a header's value, as some servers put their messages there."""
    with RawUpstream(
        lambda _: [b"HTTP/1.1 200 OK\r\nx-a: caf\xe9\r\nx-b: caf\xc3\xa9\r\nContent-Length: 2\r\n\r\n{}"]
    ) as upstream:
        got = ask(start_proxy(upstream.url), body=with_stream(BODIES[0], None))
    assert got.status == 200
    assert (got.header("x-a"), got.header("x-b")) == ("caf\xe9", "caf\xc3\xa9")


def test_headers_travel_there(start_proxy: StartProxy) -> None:
    sent = [
        ("content-type", "application/json;charset=UTF-8"),
        ("accept", "application/json, text/event-stream"),
        ("user-agent", "OpenAI/Python 2.0 (odd; é)".encode().decode("latin-1")),
        ("openai-organization", "org-1"),
        ("openai-beta", "assistants=v2"),
        ("x-stainless-retry-count", "0"),
        ("idempotency-key", "k"),
        ("x-multi", "1"),
        ("x-multi", "2"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ]
    dropped = [
        ("connection", "keep-alive, X-Mine"),
        ("x-mine", "for this hop"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic eDp5"),
        ("proxy-connection", "keep-alive"),
        ("cookie", "session=secret"),
        ("x-forwarded-for", "10.0.0.1"),
        ("x-compaction", "shadow"),
        ("x-http-method-override", "DELETE"),
        ("x_http_method", "DELETE"),
        ("x-method-override", "DELETE"),
    ]
    with RawUpstream() as upstream:
        url = start_proxy(upstream.url)
        assert ask(url, body=with_stream(BODIES[0], None), headers=[*sent, *dropped]).status == 200
        arrived = upstream.last
    for name in dict(sent):
        values = [value for key, value in sent if key == name]
        assert [value for key, value in arrived.headers if key == name] == values, name
    names = {name for name, _ in arrived.headers}
    assert not names & {name for name, _ in dropped if name != "connection"}
    assert "x-mine" not in (arrived.header("connection") or "").lower()
    assert arrived.header("host") == upstream.url.removeprefix("http://")
    assert arrived.target == CHAT
    assert names == set(dict(sent)) | {"host", "content-length", "x-compaction-via"}


CALLERS_KEY = "sk-callers-own-4f1d"


@pytest.mark.parametrize("name", ["Authorization", "api-key", "x-api-key", "x-goog-api-key", "Cookie"])
def test_the_callers_key_goes_nowhere_else(start_proxy: StartProxy, name: str) -> None:
    value = f"Bearer {CALLERS_KEY}" if name == "Authorization" else CALLERS_KEY
    with RawUpstream() as upstream:
        url = start_proxy(upstream.url, {"upstreams": {"main": {"api_key": "sk-operators"}}})
        for path in (CHAT, "/v1/embeddings", "/v1/models"):
            ask(url, path, None if path == "/v1/models" else b"{}", headers=[JSON, (name, value)])
            assert upstream.last.header("authorization") == "Bearer sk-operators"
        for arrived in upstream.arrived:
            assert CALLERS_KEY.encode() not in arrived.head + arrived.body
