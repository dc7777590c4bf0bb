"""Requests and upstream errors of 64 KB that try to cost more than their size: CPU time, memory, and other callers."""

from __future__ import annotations

import functools
import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator

import brotli
import psutil
import pytest
import zstandard

from proxy.body import MAX_MESSAGES, MAX_VALUES
from tests.door.client import CHAT, JSON, ask, chat
from tests.door.raw_upstream import Arrived, RawUpstream, Step, answer
from tests.door.test_drain import Server
from tests.robustness.test_bodies import waits, watched

KB64 = 65_536
MB = 1_000_000
CPU_SECONDS = 1.5
"""The aim is 1 second on a quiet machine."""
SKIPPABLE = b"\x50\x2a\x4d\x18\x00\x00\x00\x00"


def body(messages: str, **fields: object) -> bytes:
    """Return a request with these messages, written as JSON."""
    others = json.dumps({"model": "gpt-4o-mini", **fields})
    return others[:-1].encode() + b',"messages":[' + messages.encode() + b"]}"


def user(content: str) -> str:
    return '{"role":"user","content":' + content + "}"


def packed(plain: Callable[[int], bytes]) -> bytes:
    """Return a body compressed to 64 KB, with as much bulk in it as a body of that size may have.

    A field of random text makes up for what compresses well.
    """
    for size in (1_350_000, 1_000_000, 500_000, 250_000, 125_000):
        bulk = plain(size)
        room = KB64 - 2_000 - len(gzip.compress(bulk, 6))
        if room > 0:
            return gzip.compress(
                b'{"user":"' + random.Random(1).randbytes(room * 5 // 6).hex().encode() + b'",' + bulk[1:], 6
            )
    raise AssertionError("the body doesn't compress")


def asking(model: str, plain: Callable[[int], bytes], size: int) -> bytes:
    return plain(size).replace(b"gpt-4o-mini", model.encode(), 1)


def repeated(piece: str, between: str = ",") -> Callable[[int], bytes]:
    return lambda size: body(between.join([piece] * (size // len(piece + between))))


def text(piece: str) -> Callable[[int], bytes]:
    return lambda size: body(user(json.dumps(piece * (size // len(piece)), ensure_ascii=False)))


def parts(part: str) -> Callable[[int], bytes]:
    return lambda size: body(user("[" + ",".join([part] * (size // (len(part) + 1))) + "]"))


def counted(size: int) -> bytes:
    """Messages that differ from each other."""
    return body(",".join(user(f'"{number}"') for number in range(size // 34)))


def calls(size: int) -> bytes:
    count = size // 160
    made = [
        {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for number in range(count)
    ]
    asked = json.dumps({"role": "assistant", "content": None, "tool_calls": made})
    results = [
        json.dumps({"role": "tool", "tool_call_id": f"c{count - number - 1}", "content": "1"})
        for number in range(count)
    ]
    return body(",".join([user('"go"'), asked, *results]))


def tools(size: int) -> bytes:
    parameters = {f"p{number}": {"type": "string", "enum": ["a", "b"]} for number in range(size // 50)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": parameters}}}
    return body(user('"hi"'), tools=[tool])


def many_tools(size: int) -> bytes:
    return body(user('"hi"'), tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(size // 60)])


PLAIN: dict[str, Callable[[int], bytes]] = {
    "numbers": repeated("1"),
    "objects": repeated("{}"),
    "arrays": repeated("[]"),
    "short messages": repeated(user('""')),
    "different messages": counted,
    "empty parts": parts("{}"),
    "number parts": parts("1"),
    "text parts": parts('{"type":"text","text":"a"}'),
    "image parts": parts('{"type":"image_url","image_url":{"url":"https://a/b"}}'),
    "calls": calls,
    "tool parameters": tools,
    "many tools": many_tools,
    "one letter": text("a"),
    "two letters": text("ab"),
    "spaces": text(" "),
    "carets": text("^"),
    "base64": text("QUJD"),
    "escapes": lambda size: text('"')(size // 2),
    "lines": lambda size: text("\n")(size // 2),
    "families": lambda size: text("👩‍👩‍👧‍👦")(size // 4),
    "deep arrays": lambda size: body(user("[" * (size // 2) + "]" * (size // 2))),
    "deep but legal": lambda size: body(",".join([user("[" * 60 + "]" * 60)] * (size // 150))),
    "keys": lambda size: body("{" + ",".join(f'"k{number}":1' for number in range(size // 10)) + "}"),
    "escaped keys": lambda size: body("{" + ",".join(f'"\\u0061{number}":1' for number in range(size // 16)) + "}"),
    "long id": lambda size: body('{"role":"tool","tool_call_id":"' + "i" * size + '","content":""}'),
    "surrogates": lambda size: body(user('"' + "\\ud800" * (size // 6) + '"')),
    "fields": lambda size: b'{"model":"gpt-4o-mini",' + b'"a":1,' * (size // 6) + b'"messages":[]}',
    "not JSON": lambda size: b'{"model":"gpt-4o-mini","messages":[' + b"[1,NaN]," * (size // 8) + b"1]}",
}


def chance(size: int, alphabet: str) -> str:
    return "".join(random.Random(1).choices(alphabet, k=size))


def requests(model: str = "gpt-4o-mini") -> Iterator[tuple[str, bytes, str | None]]:
    """Names, bodies of 64 KB at most, and how these are compressed."""
    for name, plain in PLAIN.items():
        made = functools.partial(asking, model, plain)
        yield name, made(KB64 - 2_000), None
        yield f"{name}, compressed", packed(made), "gzip"
    yield "one word", text(chance(60_000, "abcdefghijklmnopqrstuvwxyz"))(60_000), None
    empty = gzip.compress(b"")
    yield "gzip members", empty * (KB64 // len(empty)), "gzip"
    yield "nested gzip members", gzip.compress(empty * 1_000_000)[:KB64], "gzip, gzip"
    yield "nested gzip members that end", gzip.compress(empty * 200_000), "gzip, gzip"
    yield "nested deflate streams", gzip.compress(zlib.compress(b"") * 500_000), "deflate, gzip"
    yield (
        "empty stored blocks",
        gzip.compress(zlib.compress(b"")[:2] + b"\0\0\0\xff\xff" * 4 * MB)[:KB64],
        "deflate, gzip",
    )
    yield "zstd frames", gzip.compress(zstandard.compress(b"") * MB), "zstd, gzip"
    yield "skippable frames", gzip.compress(SKIPPABLE * 2 * MB), "zstd, gzip"
    yield "zstd", zstandard.compress(bytes(100 * MB)), "zstd"
    yield "brotli", brotli.compress(bytes(100 * MB), quality=1), "br"
    yield "gzip", gzip.compress(bytes(64 * MB)), "gzip"
    yield "gzip, gzip", gzip.compress(gzip.compress(bytes(100 * MB))), "gzip, gzip"


def nested(opening: str, closing: str, depth: int, times: int) -> bytes:
    one = opening * depth + "1" + closing * depth
    return ('{"error":{"message":"no","details":[' + ",".join([one] * times) + "]}}").encode()


ERRORS: dict[str, bytes] = {
    "nested arrays": nested("[", "]", 60, 500),
    "nested objects": nested('{"error":', "}", 60, 90),
    "errors": b'{"error":[' + b",".join([b'{"message":"too long"}'] * 2_700) + b"]}",
    "numbers": b'{"error":{"message":"no","param":[' + b"1," * 30_000 + b"1]}}",
    "JSON in JSON": json.dumps({"error": {"message": "{" * 60_000}}).encode(),
    "Python in JSON": json.dumps({"error": {"message": "[{'a': " * 9_000}}).encode(),
    "limits": json.dumps({"error": {"message": "maximum context length is 8192 tokens, " * 1_600}}).encode(),
    "page": b"<html>" + b"<p>too long" * 5_500,
    "tags": b"<" * 65_000,
    "quotes": b'{"error":{"message":"' + b'\\"' * 32_000 + b'"}}',
    "spaces": json.dumps({"error": {"message": "context" + " " * 60_000 + "length"}}).encode(),
    "words": chance(64_000, "abcdefgh ").encode(),
}


def errors() -> Iterator[tuple[str, bytes, str | None]]:
    """Names, upstream errors of 64 KB at most, and how these are compressed."""
    for name, plain in ERRORS.items():
        yield name, plain, None
        start, end = plain[: len(plain) // 2], plain[len(plain) // 2 :]
        yield f"{name}, compressed", gzip.compress(start + start[-20_000:] * 15 + end), "gzip"
    yield from ((name, raw, how) for name, raw, how in requests() if how not in (None, "gzip"))


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    bodies = {name: (raw, how) for name, raw, how in errors()}

    def script(arrived: Arrived) -> list[Step]:
        name = arrived.header("x-error")
        if name is None:
            return [answer(b'{"choices":[{"message":{"content":"hi"}}]}')]
        raw, how = bodies[name]
        headers = [("Content-Type", "application/json"), *([("Content-Encoding", how)] if how else [])]
        return [answer(raw, "400 Bad Request", headers)]

    with RawUpstream(script) as running:
        yield running


@pytest.fixture(scope="module")
def server(upstream: RawUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(upstream.url, tmp_path_factory.mktemp("proxy"))
    try:
        running.wait_ready()
        # Loads the encoding.
        assert ask(running.url, CHAT, chat("word " * 100_000)).status == 200
        yield running
    finally:
        running.process.terminate()
        running.process.wait(20)


def cost(server: Server, work: Callable[[], object]) -> float:
    """Seconds of CPU that the server uses for some work."""
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    work()
    after = process.cpu_times()
    return after.user - before.user + after.system - before.system


def test_no_request_of_64_kb_takes_a_second(server: Server) -> None:
    """The model's window of 8,192 tokens makes most of them be compacted."""
    expensive = {}
    for name, raw, how in requests("gpt-4"):
        assert len(raw) <= KB64 + 2_000, name
        headers = [JSON, *([("content-encoding", how)] if how else [])]
        taken = cost(server, functools.partial(ask, server.url, CHAT, raw, headers))
        if taken > CPU_SECONDS:
            expensive[name] = taken
    assert expensive == {}


def test_no_error_of_64_kb_takes_a_second(server: Server) -> None:
    expensive = {}
    for name, raw, _ in errors():
        assert len(raw) <= KB64 + 2_000, name
        for stream in (False, True):
            sent = chat("hi", stream=stream)
            taken = cost(server, functools.partial(ask, server.url, CHAT, sent, [JSON, ("x-error", name)]))
            if taken > CPU_SECONDS:
                expensive[name] = taken
    assert expensive == {}


def sized(piece: str, count: int) -> bytes:
    return body(",".join([piece] * count))


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
    server: Server, upstream: RawUpstream, sent: bytes, says: str
) -> None:
    upstream.arrived = []
    got = ask(server.url, CHAT, sent)
    assert (got.status, got.error["code"]) == (400, "invalid_body")
    assert says in got.error["message"]
    assert upstream.arrived == []


@pytest.mark.parametrize("text", ["1, 2, " * 300_000, '"a","b",' * 100_000, "\\," * MAX_VALUES])
def test_commas_in_texts_are_no_values(server: Server, upstream: RawUpstream, text: str) -> None:
    sent = body(user(json.dumps(text)), model="gpt-4.1")
    assert ask(server.url, CHAT, sent, [JSON, ("x-compaction", "off")]).status == 200
    assert upstream.last.body == sent


HEAVY: dict[str, bytes] = {
    "messages": sized(user('""'), MAX_MESSAGES),
    "different messages": body(",".join(user(f'"{number}"') for number in range(MAX_MESSAGES))),
    "calls": calls(1_600_000),
    "values": body(user("[" + "1," * (MAX_VALUES - 10) + "1]")),
    "64 MB of messages": sized(user('""'), 2_000_000),
    "64 MB of numbers": sized("1", 31_900_000),
}


@pytest.mark.parametrize("name", HEAVY)
def test_many_small_messages_hold_nobody_up(server: Server, name: str) -> None:
    """Other callers get their answers meanwhile, and memory grows by less than four times the limit on bodies."""
    process = psutil.Process(server.process.pid)
    slowest, took, grown = 0.0, 0.0, 0
    for _ in range(4):  # a busy machine holds somebody up now and then, work on the event loop would each time
        with watched(process) as highest:
            slowest, took = waits(server.url, HEAVY[name])
        grown = highest()
        assert grown < 256 * MB
        if slowest < max(0.25, took / 3):
            return
    raise AssertionError(f"health took {slowest} s of {took} s, {grown} bytes")
