"""Requests and upstream errors of 64 KB that try to cost more than their size: CPU time, memory, and other callers."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from proxy.dialects.request import MAX_MESSAGES, MAX_VALUES
from tests.hostile.test_bodies import waits, watched
from tests.kit.client import CHAT, JSON, ask, chat
from tests.kit.combinations import combined
from tests.kit.costly_bodies import (
    ANSWERS,
    HEAVY,
    KB64,
    MB,
    STREAMS,
    body,
    errors,
    passed_on,
    requests,
    sized,
    user,
)
from tests.kit.program import Program, program, relaying, write_config
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer

CPU_SECONDS = 3.0
"""Most bodies take under 1 second. One of 12,000 calls that is compressed to 64 KB takes up to 2."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    bodies = {name: (raw, how) for name, raw, how in errors()}

    def script(arrived: Arrived) -> list[Step]:
        if (kind := arrived.header("x-answer")) is not None:
            return [answer(ANSWERS[kind])]
        if (kind := arrived.header("x-stream")) is not None:
            return [answer(STREAMS[kind], headers=[("Content-Type", "text/event-stream")])]
        name = arrived.header("x-error")
        if name is None:
            return [answer(b'{"choices":[{"message":{"content":"hi"}}]}')]
        raw, how = bodies[name]
        headers = [("Content-Type", "application/json"), *([("Content-Encoding", how)] if how else [])]
        return [answer(raw, "400 Bad Request", headers)]

    with RawUpstream(script) as running:
        yield running


@pytest.fixture(scope="module")
def server(upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with relaying(upstream.url, tmp_path_factory.mktemp("proxy")) as running:
        # Loads the encoding.
        assert ask(running.url, CHAT, chat("word " * 100_000)).status == 200
        yield running


def cost(server: Program, work: Callable[[], object]) -> float:
    """Return the CPU seconds of the server's process for some work.

    Other processes slow this one down, so work over the bound is done three times, and the least counts.
    """
    process = psutil.Process(server.process.pid)
    least = math.inf
    for _ in range(3):
        before = process.cpu_times()
        work()
        after = process.cpu_times()
        least = min(least, after.user - before.user + after.system - before.system)
        if least <= CPU_SECONDS:
            break
    return least


def test_no_request_of_64_kb_takes_a_second(server: Program, full: bool) -> None:
    """The model's window of 8,192 tokens makes most of them be compacted."""
    expensive = {}
    for name, raw, how in requests("gpt-4", every=1 if full else 8):
        assert len(raw) <= KB64 + 2_000, name
        headers = [JSON, *([("content-encoding", how)] if how else [])]
        taken = cost(server, functools.partial(ask, server.url, CHAT, raw, headers))
        if taken > CPU_SECONDS:
            expensive[name] = taken
    assert expensive == {}


def test_no_error_of_64_kb_takes_a_second(server: Program, full: bool) -> None:
    expensive = {}
    for number, (name, raw, _) in enumerate(errors()):
        assert len(raw) <= KB64 + 2_000, name
        for stream in (False, True) if full else (number % 4 > 1,):
            sent = chat("hi", stream=stream)
            taken = cost(server, functools.partial(ask, server.url, CHAT, sent, [JSON, ("x-error", name)]))
            if taken > CPU_SECONDS:
                expensive[name] = taken
    assert expensive == {}


@pytest.mark.parametrize(
    ("header", "names"), [("x-answer", tuple(ANSWERS)), ("x-stream", tuple(STREAMS))], ids=["answers", "streams"]
)
def test_no_response_of_64_kb_takes_a_second(server: Program, header: str, names: tuple[str, ...]) -> None:
    sent = chat("hi", stream=header == "x-stream")
    taken = {
        name: cost(server, functools.partial(ask, server.url, CHAT, sent, [JSON, (header, name)])) for name in names
    }
    assert {name: seconds for name, seconds in taken.items() if seconds > CPU_SECONDS} == {}


def test_no_request_that_is_read_and_passed_through_takes_a_second(
    upstream: RawUpstream, tmp_path: Path, full: bool
) -> None:
    settings = {
        "auth": {"mode": "keys"},
        "upstreams": {"main": {"provider": "openai", "base_url": f"{upstream.url}/v1", "api_key": "sk-canary"}},
        "teams": {"some": {"keys": [f"sha256:{hashlib.sha256(b'sk-some').hexdigest()}"], "models": ["gpt-*"]}},
    }
    key, expensive = ("x-api-key", "sk-some"), {}
    with program(write_config(settings, tmp_path)) as restricted:
        send = functools.partial(ask, restricted.url, "/v1/embeddings")
        assert send(b'{"model":"gpt-4","input":"hi"}', [JSON, key]).status == 200
        for name, raw, how in passed_on("gpt-4", every=1 if full else 8):
            taken = cost(
                restricted, functools.partial(send, raw, [JSON, key, *([("content-encoding", how)] if how else [])])
            )
            if taken > CPU_SECONDS:
                expensive[name] = taken
    assert expensive == {}


BACKSLASHES = 'compaction_session="' + '\\"' * 30_000 + '"'
FORM = ("content-type", "multipart/form-data; boundary=x")
HEADS: dict[str, tuple[str, bytes | None, list[tuple[str, str]]]] = {
    "a quoted cookie": ("/compaction/", None, [("cookie", BACKSLASHES)]),
    "the quoted cookie of another server": ("/compaction/", None, [("cookie", BACKSLASHES.partition("=")[2])]),
    "many sessions": ("/compaction/requests", None, [("cookie", "compaction_session=a.b.c; " * 9_000)]),
    "many cookies": ("/compaction/", None, [("cookie", "a=b;" * 60_000)]),
    "many headers of cookies": ("/compaction/", None, [("cookie", f"{'compaction_session=a;' * 12}")] * 900),
    "a path of many names": ("/v1" * 20_000, None, []),
    "a query of many names": (f"/compaction/requests?{'a&' * 30_000}", None, []),
    "a form of one field": ("/v1/audio/transcriptions", b'name="model"\r\na:b\r\n' * 15_000, [FORM]),
    "a form of empty lines": ("/v1/audio/transcriptions", b'name="model"\r\n' * 20_000, [FORM]),
}
"""Requests whose head or form repeats what a parser could read again from each place."""


@pytest.mark.parametrize(("fields", "status"), [(900, 200), (1_001, 400), (40_000, 400)])
def test_a_head_has_a_bounded_number_of_fields(server: Program, fields: int, status: int) -> None:
    assert ask(server.url, "/livez", None, [("a", "")] * fields).status == status


@pytest.mark.parametrize("name", HEADS)
def test_no_head_and_no_form_takes_a_second(server: Program, name: str) -> None:
    path, sent, headers = HEADS[name]
    assert cost(server, functools.partial(ask, server.url, path, sent, headers)) <= CPU_SECONDS


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (sized(user('""'), MAX_MESSAGES + 1), f"{MAX_MESSAGES + 1} messages"),
        (sized("1", MAX_VALUES + 1), f"over {MAX_VALUES} JSON values"),
        (body(user("[" + "1," * MAX_VALUES + "1]")), f"over {MAX_VALUES} JSON values"),
        (body(user('"hi"'), tools=[{}] * MAX_VALUES), f"over {MAX_VALUES} JSON values"),
    ],
    ids=["messages", "numbers", "parts", "tools"],
)
def test_what_cannot_be_a_conversation_is_refused(
    server: Program, upstream: RawUpstream, sent: bytes, says: str
) -> None:
    upstream.arrived = []
    got = ask(server.url, CHAT, sent)
    assert (got.status, got.error["code"]) == (400, "invalid_body")
    assert says in got.error["message"]
    assert upstream.arrived == []


COMPACTION = '{"type":"compaction","encrypted_content":"AAAA"}'


@pytest.mark.parametrize(
    ("path", "field", "sent"),
    [
        ("/v1/responses", "input", ['{"type":"reasoning"}'] * (MAX_MESSAGES + 1)),
        ("/v1/responses", "input", [*['{"role":"user","content":"hi"}'] * MAX_MESSAGES, COMPACTION]),
        ("/v1/messages", "messages", [*[user('"hi"')] * MAX_MESSAGES, user(f"[{COMPACTION}]")]),
        ("/v1/messages", "messages", [user("[" + ",".join(['{"type":"tool_result"}'] * (MAX_MESSAGES + 1)) + "]")]),
    ],
    ids=["a run", "items before a compaction", "messages before a compaction", "results of one message"],
)
def test_every_item_that_the_client_sent_counts(
    server: Program, upstream: RawUpstream, path: str, field: str, sent: list[str]
) -> None:
    """Items that become one unit, or none, count one by one."""
    upstream.arrived = []
    raw = b'{"model":"gpt-4o-mini","max_tokens":9,"%s":[%s]}' % (field.encode(), ",".join(sent).encode())
    got = ask(server.url, path, raw)
    shown = json.loads(got.body)
    assert (got.status, shown["error"]["type"]) == (400, "invalid_request_error")
    assert f"{MAX_MESSAGES + 1} messages" in shown["error"]["message"]
    if path == "/v1/messages":
        assert shown["type"] == "error"
    else:
        assert (shown["error"]["code"], shown["error"]["param"]) == ("invalid_body", field)
    assert upstream.arrived == []


@pytest.mark.parametrize("text", ["1, 2, " * 300_000, '"a","b",' * 100_000, "\\," * MAX_VALUES])
def test_commas_in_texts_are_no_values(server: Program, upstream: RawUpstream, text: str) -> None:
    sent = body(user(json.dumps(text)), model="gpt-4.1")
    assert ask(server.url, CHAT, sent, [JSON, ("x-compaction", "off")]).status == 200
    assert upstream.last.body == sent


@pytest.mark.parametrize("name", combined(3, HEAVY))
def test_many_small_messages_hold_nobody_up(server: Program, name: str) -> None:
    """Other callers get their answers meanwhile, and memory grows by less than four times the limit on bodies."""
    process = psutil.Process(server.process.pid)
    sent = HEAVY[name]()
    slowest, took, grown = 0.0, 0.0, 0
    for _ in range(4):  # a busy machine holds somebody up now and then, work on the event loop would each time
        with watched(process) as highest:
            slowest, took = waits(server.url, sent)
        grown = highest()
        assert grown < 256 * MB
        if slowest < max(0.25, took / 3):
            return
    raise AssertionError(f"health took {slowest} s of {took} s, {grown} bytes")
