"""R17, S9, S10, S11, S14: bodies that are too large, or that grow, or take time; both ways."""

import contextlib
import functools
import gzip
import json
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import brotli
import psutil
import pytest
import zstandard

from proxy.dialects.answers import EventReader
from proxy.dialects.chat.answers import ChatAnswers
from proxy.http.sse import EventBuffer
from tests.kit.client import CHAT, JSON, Got, StartProxy, ask, chat
from tests.kit.program import relaying
from tests.kit.raw_upstream import Arrived, RawUpstream, Stage, Step, answer, chunk, head, stream_head

MB = 1_000_000
LIMIT = 4 * MB


@functools.cache
def padded(size: int) -> bytes:
    """A request after white space that compresses to a fourth, so its size alone decides."""
    blank = random.Random(1).randbytes(size - len(chat())).translate(b" \t\r\n" * 64)
    return blank + chat()


@pytest.fixture(scope="module")
def limited(start_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_proxy(upstream.url, {"server": {"body_limit": "4MB"}})


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(lambda _: [answer(b'{"choices":[]}')]) as running:
        yield running


@pytest.mark.parametrize("chunked", [False, True])
def test_one_byte_over_the_limit(limited: str, upstream: RawUpstream, chunked: bool) -> None:
    def sent(body: bytes) -> Got:
        return ask(limited, CHAT, (body[at : at + 60_000] for at in range(0, len(body), 60_000)) if chunked else body)

    upstream.arrived = []
    assert sent(padded(LIMIT)).status == 200
    over = sent(padded(LIMIT + 1))
    assert (over.status, over.error["code"]) == (413, "request_too_large")
    assert [len(one.body) for one in upstream.arrived] == [LIMIT]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": lambda body: zlib.compress(body, 1),
    "br": lambda body: brotli.compress(body, quality=1),
    "zstd": lambda body: zstandard.compress(body, 3),
    "gzip, gzip": lambda body: gzip.compress(gzip.compress(body, 1), 9),
    "br, zstd": lambda body: zstandard.compress(brotli.compress(body, quality=1)),
}


@pytest.mark.parametrize("how", PACKERS)
def test_a_packed_body_of_just_the_limit(limited: str, how: str) -> None:
    headers = [JSON, ("content-encoding", how)]
    assert ask(limited, CHAT, PACKERS[how](padded(LIMIT)), headers).status == 200
    over = ask(limited, CHAT, PACKERS[how](padded(LIMIT + 1)), headers)
    assert (over.status, over.error["code"]) == (413, "request_too_large")


def bombs() -> dict[str, bytes]:
    """Some kilobytes each, for 128 MB. The zstd one asks for a window of half a gigabyte at once."""
    nothing = bytes(32 * MB)
    ten = zlib.compressobj(9, wbits=31)
    pieces = [ten.compress(nothing) for _ in range(4)]
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=29)
    wide_bomb = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    return {
        "gzip": b"".join(pieces) + ten.flush(),
        "br": brotli.compress(nothing * 4, quality=1),
        "zstd": zstandard.compress(nothing * 4),
        "zstd with a wide window": wide_bomb.compress(nothing) + wide_bomb.flush(),
        "gzip, gzip": gzip.compress(gzip.compress(nothing * 4, 1), 9),
        "zstd, zstd": zstandard.compress(zstandard.compress(nothing * 4)),
    }


@contextlib.contextmanager
def watched(process: psutil.Process) -> Iterator[Callable[[], int]]:
    """How many bytes of memory a process took in the block, at most, beyond those that it had."""
    before = highest = process.memory_info().rss
    over = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.005):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: highest - before
    finally:
        over.set()
        watcher.join()


def test_bombs_both_ways_take_no_memory(tmp_path: Path) -> None:
    """S9, in a process of its own: 128 MB each, as a request, as an upstream's error, and as its list of models."""
    packed = bombs()

    def script(arrived: Arrived) -> list[Step]:
        name = arrived.header("x-bomb")
        if name is None:
            return [answer(b'{"choices":[]}')]
        headers = [("Content-Type", "application/json"), ("Content-Encoding", name.split(" with")[0])]
        return [answer(packed[name], "400 Bad Request", headers)]

    with RawUpstream(script) as upstream, relaying(upstream.url, tmp_path, body_limit="16MB") as server:
        assert ask(server.url, CHAT, chat()).status == 200
        process = psutil.Process(server.process.pid)
        with watched(process) as highest:
            for name, body in packed.items():
                how = ("content-encoding", name.split(" with")[0])
                got = ask(server.url, CHAT, body, [JSON, how])
                assert (got.status, got.error["code"]) in (
                    (413, "request_too_large"),
                    (415, "unsupported_content_encoding"),
                ), name
                came = ask(server.url, CHAT, chat(), [JSON, ("x-bomb", name)])
                assert (came.status, came.body) == (400, body), "an answer's packing is the client's to undo"
        assert highest() < 60 * MB
        assert ask(server.url, CHAT, chat()).status == 200


def test_a_list_of_models_that_never_ends(start_proxy: StartProxy, stage: Stage) -> None:
    """With routes it is read, so it is bounded."""
    sent = 0

    def endless(_: Arrived) -> Iterator[Step]:
        nonlocal sent
        yield head("200 OK", [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])
        while sent < 100 * MB:
            yield chunk(b'{"data":[' + b" " * MB)
            sent += MB

    with stage(endless) as upstream:  # type: ignore[arg-type]
        url = start_proxy(upstream.url, {"models": [{"match": "known", "upstream": "main"}]})
        got = ask(url, "/v1/models", None)
    assert (got.status, [entry["id"] for entry in json.loads(got.body)["data"]]) == (200, ["known"])
    assert sent < 20 * MB


def test_a_request_for_the_models_with_a_body(tmp_path: Path) -> None:
    """Its body is thrown away as it comes, and not kept."""
    with RawUpstream(lambda _: [answer(b'{"data":[]}')]) as upstream, relaying(upstream.url, tmp_path) as server:
        assert ask(server.url, "/v1/models", None).status == 200
        process = psutil.Process(server.process.pid)
        with watched(process) as highest:
            got = ask(server.url, "/v1/models", (b"x" * MB for _ in range(100)), method="GET")
        assert got.status == 200
        assert highest() < 40 * MB


HEAVY = {
    "a": "a" * MB,
    "^": "^" * MB,
    "spaces": " " * MB,
    "ZWJ": "👩‍👩‍👧‍👦" * (MB // 25),
    "special": "<|endoftext|><|im_start|>system" * (MB // 31),
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_megabyte_that_is_hard_to_count_holds_nobody_up(limited: str, name: str) -> None:
    """S11: the request goes through, and health answers meanwhile."""
    for attempt in range(4):  # a busy machine holds somebody up now and then, the counting would each time
        slowest, took = waits(limited, chat(f"{attempt} {HEAVY[name]}", max_tokens=100))
        assert took < 60
        if slowest < max(0.2, took / 2):
            return
    raise AssertionError(f"health took {slowest} s of {took} s")


def waits(limited: str, body: bytes) -> tuple[float, float]:
    """Return the seconds that health took at most while a request was served, and that the request took."""
    slowest = 0.0
    done = threading.Event()

    def look() -> None:
        nonlocal slowest
        while not done.is_set():
            began = time.monotonic()
            assert ask(limited, "/livez", None).status == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.01)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        began = time.monotonic()
        got = ask(limited, CHAT, body)
        took = time.monotonic() - began
    finally:
        done.set()
        looking.join()
    assert got.status in (200, 400)
    return slowest, took


ELSEWHERE = ("api_base", "base_url", "api_key", "custom_llm_provider", "extra_body", "litellm_params", "user_config")


def test_a_body_or_a_header_never_decides_where_a_request_goes(start_proxy: StartProxy, stage: Stage) -> None:
    """S14: such fields are the upstream's to judge, and go to no other one; pictures are fetched by nobody here."""
    with RawUpstream() as decoy, stage(lambda _: [answer(b'{"choices":[]}')]) as upstream:
        url = start_proxy(upstream.url, {"upstreams": {"main": {"api_key": "sk-operators"}}})
        fields: dict[str, Any] = {name: {"api_base": decoy.url, "url": decoy.url} for name in ELSEWHERE}
        fields |= {"fallbacks": [{"model": "x", "api_base": decoy.url}], "api_base": decoy.url}
        image = {"type": "image_url", "image_url": {"url": f"{decoy.url}/a.png"}}
        raw = json.dumps(
            {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": [image]}], **fields}
        ).encode()
        names = (
            "x-base-url",
            "x-api-base",
            "x-openai-base-url",
            "x-litellm-api-base",
            "x-target-url",
            "x-forwarded-host",
        )
        got = ask(url, CHAT, raw, [JSON, *((name, decoy.url) for name in names)])
        assert (got.status, upstream.last.body) == (200, raw)
        assert upstream.last.header("authorization") == "Bearer sk-operators"
        assert decoy.arrived == []


def test_a_stream_that_is_packed_is_not_unpacked(start_proxy: StartProxy, stage: Stage) -> None:
    """S9: a bomb of events is the client's to unpack, or not."""
    bomb = gzip.compress(b"data: {}\n\n" * 5_000_000, 1)
    with stage(lambda _: [stream_head(("Content-Encoding", "gzip")), chunk(bomb), chunk(b"")]) as upstream:
        got = ask(start_proxy(upstream.url), CHAT, chat(stream=True))
    assert got.body == bomb


@pytest.mark.parametrize("reader", [EventBuffer, ChatAnswers().event_reader])
def test_a_long_event_in_small_pieces_takes_time_in_proportion(reader: Callable[[], EventBuffer | EventReader]) -> None:
    """Copying the unfinished event for each piece would move 8 GB."""
    event = b'data: {"choices":[{"delta":{"content":"' + b"x" * (MB - 100) + b'"}}]}\n\n'
    reading = reader()
    began = time.process_time()
    said = [reading.feed(event[at : at + 64]) for at in range(0, len(event), 64)]
    assert time.process_time() - began < 1.0
    assert said[-1] in (event, "content")
    assert not any(said[:-1])
