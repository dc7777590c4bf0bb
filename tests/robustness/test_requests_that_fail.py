"""R4, R16, S21: what fails or repeats on the way of a request costs no more than it must."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.demo.serving import serve
from proxy.demo.upstream import StandIn
from tests.door.client import CHAT, Got, StartProxy, ask, chat, connected, request_bytes
from tests.door.raw_upstream import Arrived, RawUpstream, Step, answer
from tests.door.test_disconnects import SUMMARY, TRIGGERED, talk
from tests.e2e.e2e_harness import chat as conversation
from tests.e2e.e2e_harness import proxied

REFUSED = answer(
    b'{"error":{"message":"This model\'s maximum context length is 4000 tokens. However, your messages resulted in '
    b'9000 tokens.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"}}',
    "400 Bad Request",
)


@pytest.mark.parametrize("streams", [True, False])
def test_all_attempts_have_one_deadline(start_proxy: StartProxy, streams: bool) -> None:
    """R4. Each attempt takes 0.6 s of 1 s: the second one is cut, a third one never begins."""

    def slowly(arrived: Arrived) -> Iterator[Step]:
        if hurried.is_set():
            yield answer(b'{"choices":[]}', "500 No") if b"<transcript>" in arrived.body else REFUSED
        else:
            yield 0.6
            yield REFUSED

    hurried = threading.Event()
    hurried.set()

    with RawUpstream(slowly) as upstream:  # type: ignore[arg-type]
        url = start_proxy(upstream.url, {"server": {"deadline": 1}, "policies": {"default": {"overflow_retries": 5}}})
        # The tables of models and of tokens are read now, and what was learned is another model's.
        assert ask(url, CHAT, chat(messages=talk(40), model="gpt-4o")).status == 400
        hurried.clear()
        before = len(upstream.arrived)
        began = time.monotonic()
        got = ask(url, CHAT, chat(stream=streams, messages=talk(40)))
        took = time.monotonic() - began
        attempts = [arrived for arrived in upstream.arrived[before:] if b"<transcript>" not in arrived.body]
    assert got.status == 504, got.body
    assert got.error["code"] == "upstream_timeout"
    assert 0.9 < took < 1.8
    assert len(attempts) == 2
    assert len(attempts[1].body) < len(attempts[0].body)


def test_fifty_at_once_ask_for_one_summary_and_the_first_one_leaves(start_proxy: StartProxy) -> None:
    """R16. Whoever began the making is no more than one of those who wait for it."""
    go = threading.Event()

    def script(arrived: Arrived) -> Iterator[Step]:
        if b"<transcript>" in arrived.body:
            while not go.is_set():
                yield 0.01
            yield SUMMARY
        else:
            yield answer(b'{"choices":[]}')

    body = chat(messages=[{"role": "user", "content": "fifty"}, *talk()])
    with RawUpstream(script) as upstream, ThreadPoolExecutor(49) as pool:  # type: ignore[arg-type]
        url = start_proxy(upstream.url, TRIGGERED)
        leader = connected(url)
        leader.sendall(request_bytes(body))
        assert upstream.wait_arrived(1)
        others = [pool.submit(ask, url, CHAT, body) for _ in range(49)]
        time.sleep(0.5)
        leader.close()
        time.sleep(0.1)
        go.set()
        answers: list[Got] = [other.result(15) for other in others]
        sent = [arrived.body for arrived in upstream.arrived if b"<transcript>" not in arrived.body]
        assert len(upstream.arrived) - len(sent) == 1
    assert {(got.status, got.header("x-compaction-summary")) for got in answers} == {(200, "made")}
    assert (len(sent), len(set(sent))) == (49, 1)


def test_a_proxy_that_is_its_own_summary_model(tmp_path: Path) -> None:
    """S21. The request for a summary is seen to come back, and a digest stands in."""
    upstream = StandIn(window=16_000)
    entrance = ""

    def around(arrived: Arrived) -> Iterator[Step]:
        headers = [pair for pair in arrived.headers if pair[0] in ("x-compaction-via", "content-type")]
        back = pool.submit(ask, entrance, arrived.target, arrived.body, headers)
        while not back.done():
            yield 0.01
        yield answer(back.result().body, f"{back.result().status} X")

    with serve(upstream.app) as url, RawUpstream(around) as mirror, ThreadPoolExecutor(8) as pool:  # type: ignore[arg-type]
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}, "itself": {"base_url": f"{mirror.url}/v1"}},
            "models": [
                {"match": "summary", "upstream": "itself"},
                {"match": "*", "upstream": "main", "profile": {"context_window": 16_000, "tokenizer": "o200k_base"}},
            ],
            "policies": {"default": {"summary": {"model": "summary", "timeout": 20}}},
        }
        with proxied(settings, tmp_path) as entrance:
            began = time.monotonic()
            got = ask(entrance, CHAT, json.dumps({"model": "m", "messages": conversation(7, 2_000)}).encode())
            took = time.monotonic() - began
        assert (got.status, got.header("x-compaction")) == (200, "compacted")
        assert got.header("x-compaction-summary") == "digest"
        assert took < 10
        assert len(mirror.arrived) == 2, "once out, and once more before it is recognised"
        assert mirror.arrived[1].header("x-compaction-via") is not None
        assert len(upstream.requests) == 1
