"""Streams: every split, every break, errors in them, and what OpenAI's own client makes of it."""

import contextlib
import gzip
import itertools
import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from proxy.dialects.apis import DIALECTS
from proxy.server.loopback import serve
from proxy.upstream import transport as opening
from tests.kit.client import JSON, Got, StartProxy, ask, chat
from tests.kit.combinations import combined
from tests.kit.raw_upstream import Arrived, End, Stage, Step, answer, chunk, head, stream_head, streamed
from tests.kit.three_apis import APIS, PATHS, Answer
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

STREAM = chat(stream=True)


def piece(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields} | {
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    }


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


ROLE = data(
    {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
)
STOP = data({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
DONE = b"data: [DONE]\n\n"

# Characters of two, three and four bytes; comments; ids; all three line ends.
AWKWARD = (
    b": hello\n\n"
    + data(piece("é€😀"))
    + b'id: 1\r\nevent: chunk\r\ndata: {"choices":[{"delta":{"content":"\\u00e9\xc3\xa9"}}]}\r\n\r\n'
    + b': ping\n\ndata:{"choices":[]}\n\n'
    + DONE
)
EVENTS = [match.group() for match in re.finditer(rb".*?(?:\r\n\r\n|\n\n)", AWKWARD, re.DOTALL)]


def test_a_stream_split_anywhere_arrives_whole(start_proxy: StartProxy, stage: Stage) -> None:
    def script(arrived: Arrived) -> list[Step]:
        at = int(arrived.header("x-at") or 0)
        return streamed([AWKWARD[:at], AWKWARD[at:]] if at else [AWKWARD], pause=0.001)

    with stage(script) as upstream:
        url = start_proxy(upstream.url)
        for at in range(len(AWKWARD)):
            got = ask(url, body=STREAM, headers=[JSON, ("x-at", str(at))])
            assert (got.status, got.body, got.whole) == (200, AWKWARD, True), at


def assert_broken(got: Got, passed: bytes) -> None:
    """The stream held these bytes, then one error event, and ended properly."""
    assert got.status == 200
    assert got.whole
    assert got.body.startswith(passed)
    last = got.body[len(passed) :]
    assert last.startswith(b"data: ")
    assert last.endswith(b"\n\n")
    assert last.count(b"\n") == 2
    error = json.loads(last[6:])["error"]
    assert error["code"] == "upstream_interrupted"
    assert b"[DONE]" not in got.body


@pytest.mark.parametrize("how", [End.CLOSE, End.RESET])
def test_a_stream_that_breaks_gives_all_whole_events_and_an_error(
    start_proxy: StartProxy, stage: Stage, how: End
) -> None:
    first = AWKWARD.index(b"\n\ndata") + 2  # the comment
    ends = [sum(map(len, EVENTS[:count])) for count in range(1, len(EVENTS) + 1)]
    last = len(AWKWARD) - len(DONE)

    def script(arrived: Arrived) -> list[Step]:
        at = int(arrived.header("x-at") or 0)
        return [stream_head(), chunk(AWKWARD[:at]), 0.002, how]

    with stage(script) as upstream:
        url = start_proxy(upstream.url)
        # Every offset within the first content and the one after it; later ones in steps.
        for at in [*range(first + len(EVENTS[1]), ends[2] + 2), *range(ends[2], last + 6, 3)]:
            got = ask(url, body=STREAM, headers=[JSON, ("x-at", str(at))])
            assert_broken(got, AWKWARD[: max(end for end in ends if end <= at)])


@pytest.mark.parametrize("sent", [b"", b": comment\n\n", ROLE, ROLE + b"data: {"])
def test_a_stream_that_breaks_before_its_first_content_is_a_502(
    start_proxy: StartProxy, stage: Stage, sent: bytes
) -> None:
    with stage(lambda _: [stream_head(), *([chunk(sent)] if sent else []), 0.01, End.CLOSE]) as upstream:
        got = ask(start_proxy(upstream.url), body=STREAM)
    assert (got.status, got.error["code"]) == (502, "upstream_interrupted")


def test_a_stream_with_a_length_that_breaks_still_ends_in_an_error(start_proxy: StartProxy, stage: Stage) -> None:
    headers = [("Content-Type", "text/event-stream"), ("Content-Length", "100000")]
    with stage(lambda _: [head("200 OK", headers), ROLE, data(piece("hi")), 0.01, End.CLOSE]) as upstream:
        got = ask(start_proxy(upstream.url), body=STREAM)
    assert_broken(got, ROLE + data(piece("hi")))


def test_a_stream_without_any_length_ends_with_its_connection(start_proxy: StartProxy, stage: Stage) -> None:
    body = ROLE + data(piece("hi")) + DONE
    with stage(lambda _: [head("200 OK", [("Content-Type", "text/event-stream")]), body, End.CLOSE]) as upstream:
        got = ask(start_proxy(upstream.url), body=STREAM)
    assert (got.status, got.body, got.whole) == (200, body, True)


@pytest.mark.parametrize("size", [0, 1_000])
def test_a_plain_answer_that_breaks_is_a_502(start_proxy: StartProxy, stage: Stage, size: int) -> None:
    begun = answer(b'{"id": "c", "choices": [{"message": {"content": "' + b"x" * size + b'"}}]}')[:-10]
    with stage(lambda _: [begun, 0.02, End.CLOSE]) as upstream:
        got = ask(start_proxy(upstream.url), body=chat())
    assert (got.status, got.error["code"]) == (502, "upstream_interrupted")


def paced(start_proxy: StartProxy, stage: Stage, top: bytes, parts: Sequence[bytes], body: bytes = STREAM) -> bytes:
    """The client receives each part before the upstream sends the next one."""
    gates = [threading.Event() for _ in parts]
    steps = [step for part, gate in zip(parts, gates, strict=True) for step in (chunk(part), gate)]
    got = b""
    with stage(lambda _: [top, *steps, chunk(b"")]) as upstream:
        url = f"{start_proxy(upstream.url)}/v1/chat/completions"
        with httpx.stream("POST", url, content=body, timeout=30) as response:
            for piece in response.iter_raw():
                got += piece
                for gate, size in zip(gates, itertools.accumulate(map(len, parts)), strict=True):
                    if len(got) >= size:
                        gate.set()
    return got


CHUNKED_JSON = head("200 OK", [JSON, ("Transfer-Encoding", "chunked")])


def test_a_plain_answer_is_passed_on_as_soon_as_something_is_written(start_proxy: StartProxy, stage: Stage) -> None:
    """The proxy waits neither for its end nor for an error in it."""
    parts = [b'{"id":"c","choices":[{"message":{"content":"h', b'i"}}],"error":{"message":"prompt is too long"}}']
    assert paced(start_proxy, stage, CHUNKED_JSON, parts, chat()) == b"".join(parts)


def test_blank_lines_that_keep_a_connection_alive_are_passed_on(
    start_proxy: StartProxy, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "HELD_SECONDS", 0.05)
    body, go = b'{"error":{"message":"no such tool"}}', threading.Event()
    steps: list[Step] = [CHUNKED_JSON, *[chunk(b"\n"), 0.2] * 2, go, chunk(body), chunk(b"")]
    with stage(lambda _: steps) as upstream:
        url = f"{start_proxy(upstream.url)}/v1/chat/completions"
        with httpx.stream("POST", url, content=chat(), timeout=30) as response:
            pieces = response.iter_raw()
            begun = next(pieces)
            go.set()
            assert begun + b"".join(pieces) == b"\n\n" + body


def test_an_event_is_passed_on_at_once(start_proxy: StartProxy, stage: Stage) -> None:
    parts = [ROLE + data(piece("one")), data(piece("two")), b"data: x\r\n\r\n", DONE]
    assert paced(start_proxy, stage, stream_head(), parts) == b"".join(parts)


def test_a_stream_that_comes_compressed_is_passed_on_as_it_comes(start_proxy: StartProxy, stage: Stage) -> None:
    """The client unpacks it, so the proxy doesn't hold it back for line ends that it doesn't have."""
    packed = gzip.compress(AWKWARD)
    top = stream_head(("Content-Encoding", "gzip"))
    assert paced(start_proxy, stage, top, [packed[:40], packed[40:]]) == packed


def test_a_long_event_and_many_events_arrive_whole(start_proxy: StartProxy, stage: Stage) -> None:
    long = data(piece("x" * 3_000_000))
    many = b"".join(data(piece(str(number))) for number in range(20_000))
    for body in (ROLE + long + DONE, ROLE + many + DONE, long, b"data: " + b"y" * 2_500_000):
        parts = [body[start : start + 60_001] for start in range(0, len(body), 60_001)]
        with stage(lambda _, parts=parts: streamed(parts)) as upstream:
            got = ask(start_proxy(upstream.url), body=STREAM)
        assert got.body == body


OVERFLOW = {
    "error": {
        "message": "This model's maximum context length is 4000 tokens. However, your messages resulted in 7300.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
}
BUSY = {"error": {"message": "The server is busy", "type": "server_error", "param": None, "code": 503}}

LONG_TALK = [
    {"role": "user" if turn % 2 == 0 else "assistant", "content": f"Turn {turn}. " + "words and more words " * 60}
    for turn in range(30)
]


def test_an_overflow_after_content_is_passed_on(start_proxy: StartProxy, stage: Stage) -> None:
    body = ROLE + data(piece("so far")) + data(OVERFLOW)
    with stage(lambda _: streamed([body])) as upstream:
        got = ask(start_proxy(upstream.url), body=chat(stream=True, messages=LONG_TALK))
        assert (got.body, len(upstream.arrived)) == (body, 1)


@contextlib.contextmanager
def talking(start_proxy: StartProxy, reply: Reply) -> Iterator[openai.OpenAI]:
    """OpenAI's client, in front of a proxy, in front of an upstream that answers so."""
    upstream = StandIn(responder=lambda _: reply)
    with serve(upstream.app) as address:
        url = start_proxy(address)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-a", max_retries=0, timeout=10) as client:
            yield client


def said(client: openai.OpenAI) -> Iterator[str]:
    stream = client.chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    for part in stream:
        yield part.choices[0].delta.content or ""


def test_openais_client_sees_a_broken_stream_as_an_error(start_proxy: StartProxy) -> None:
    heard: list[str] = []
    broken = Reply(content="word " * 100, break_after=5)
    with talking(start_proxy, broken) as client, pytest.raises(openai.APIError, match="broke off"):
        heard.extend(said(client))
    assert "".join(heard).startswith("word word")


def test_openais_client_sees_an_error_in_a_stream(start_proxy: StartProxy) -> None:
    failing = Reply(content="word " * 100, error=BUSY, break_after=4)
    with talking(start_proxy, failing) as client, pytest.raises(openai.APIError, match="The server is busy"):
        list(said(client))


def test_openais_client_reads_past_comments(start_proxy: StartProxy, stage: Stage) -> None:
    parts = [b": one\n\n", b": two\r\n\r\n", ROLE, b": three\n\n", data(piece("hi")), STOP, DONE]
    with stage(lambda _: streamed(parts, pause=0.002)) as upstream:
        url = start_proxy(upstream.url)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-a", max_retries=0, timeout=10) as client:
            assert "".join(said(client)) == "hi"


UPSTREAMS = {
    "native": {"speaks": ["chat", "responses", "messages"]},
    "translated": {"speaks": ["chat"]},
    "litellm": {"provider": "deepseek", "api_key": "sk-upstream"},
}
SILENT = ("after the head", "in the first event", "after the first event", "in a later event", "after content")


@pytest.mark.parametrize(("lane", "api", "where"), combined(3, UPSTREAMS, APIS, SILENT))
def test_a_silent_stream_begins_and_has_heartbeats(
    start_proxy: StartProxy, stage: Stage, monkeypatch: pytest.MonkeyPatch, lane: str, api: str, where: str
) -> None:
    """The upstream goes on only after the client has the status and a heartbeat."""
    monkeypatch.setattr(opening, "HELD_SECONDS", 0.05)
    monkeypatch.setattr("proxy.upstream.litellm.transport.HELD_SECONDS", 0.05)
    go, beat = threading.Event(), DIALECTS[api].heartbeat

    def script(arrived: Arrived) -> list[Step]:
        path = arrived.target.removeprefix("/v1")
        events, _ = Answer("All is well.").parts(path.strip("/").partition("/")[0], stream=True)
        first, content = len(events[0]), b"".join(events).index(b"well.") + 5
        sizes = (0, first - 9, first, first + 9, content + b"".join(events)[content:].index(b"\n\n") + 2)
        whole, size = b"".join(events), sizes[SILENT.index(where)]
        return [stream_head(), *([chunk(whole[:size])] if size else []), go, chunk(whole[size:]), chunk(b"")]

    body = {"model": "m", "stream": True, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
    if api == "responses":
        body = {"model": "m", "stream": True, "input": "hi"}
    with stage(script) as upstream:
        settings = {"upstreams": {"main": UPSTREAMS[lane]}, "server": {"keepalive": 0.05}}
        url = f"{start_proxy(upstream.url, settings)}{PATHS[api]}"
        with httpx.stream("POST", url, json=body, headers={"authorization": "Bearer k"}, timeout=60) as response:
            assert (response.status_code, "x-compaction-id" in response.headers) == (200, True)
            got, pieces = b"", response.iter_raw()
            while beat not in got:
                got += next(pieces)
            go.set()
            got += b"".join(pieces)
    assert b"well." in got
    assert b"interrupted" not in got
    if lane == "native":
        whole = b"".join(Answer("All is well.").parts(api, stream=True)[0])
        assert got.replace(beat, b"") == whole.replace(beat, b"")


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "500 Internal Server Error"])
@pytest.mark.parametrize("begun", [b"", b'{"error": {"mess'])
def test_a_silent_answer_that_is_no_stream_begins(
    start_proxy: StartProxy, stage: Stage, monkeypatch: pytest.MonkeyPatch, status: str, begun: bytes
) -> None:
    monkeypatch.setattr(opening, "HELD_SECONDS", 0.05)
    body, go = b'{"error": {"message": "no such tool"}}', threading.Event()
    steps: list[Step] = [head(status, [JSON, ("Content-Length", str(len(body)))]), begun, go, body[len(begun) :]]
    with stage(lambda _: steps) as upstream:
        url = f"{start_proxy(upstream.url)}/v1/chat/completions"
        with httpx.stream("POST", url, content=chat(), timeout=60) as response:
            assert response.status_code == int(status[:3])
            go.set()
            assert response.read() == body


def test_a_client_that_leaves_a_silent_stream_ends_it(
    start_proxy: StartProxy, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "HELD_SECONDS", 0.05)
    with stage(lambda _: [stream_head(), chunk(ROLE), End.SILENCE]) as upstream:
        url = f"{start_proxy(upstream.url)}/v1/chat/completions"
        with httpx.stream("POST", url, content=STREAM, timeout=60) as response:
            assert next(response.iter_raw()) == ROLE
        assert until(lambda: upstream.arrived[-1].left_at is not None)
