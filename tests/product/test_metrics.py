"""Test /metrics by sending requests through the proxy and scraping it."""

import asyncio
import contextlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.program import program, write_config
from tests.kit.raw_upstream import RawUpstream, answer
from tests.kit.scripted import behind, chat, key_hash
from tests.kit.upstream import StandIn
from tests.kit.waiting import until

CANARY = "CANARY-51d0"
CONNECTIONS = 12

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(text: str) -> Series:
    """Return the samples that must never decrease."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def scrape(url: str) -> Series:
    return series(httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text)


def total(samples: Series, name: str, **labels: str) -> float:
    return sum(value for (found, own), value in samples.items() if found == name and labels.items() <= set(own))


def added(url: str, before: Series) -> Series:
    """Return the increase of each sample. Other tests count in the same process."""
    return {key: value - before.get(key, 0) for key, value in scrape(url).items()}


def test_each_request_is_counted_by_configured_names_alone(tmp_path: Path) -> None:
    body = {"model": f"gpt-5-{CANARY}", "messages": chat(30, 400), "user": CANARY}
    search = {"authorization": "Bearer sk-search"}
    stranger = {"authorization": f"Bearer sk-{CANARY}"}
    teams = {"search": {"policy": "default", "keys": [key_hash("sk-search")]}}
    with (
        behind(StandIn(window=16_000), tmp_path, teams=teams) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        before = scrape(url)
        compacted = client.post("/v1/chat/completions", json=body, headers=search)
        client.post("/v1/chat/completions", json={**body, "messages": body["messages"][:1]}, headers=stranger)
        client.post("/v1/chat/completions", json=body, headers={**search, "x-compaction": "on"})
        client.get(f"/v1/files/{CANARY}", headers=stranger)
        assert until(lambda: total(added(url, before), "compaction_requests_total") == 4)
        found = added(url, before)
        text = client.get("/metrics").text
    assert CANARY not in text
    place = {"team": "search", "policy": "default"}
    used = {**place, "upstream": "main", "api": "chat"}
    assert total(found, "compaction_requests_total", **used, outcome="compacted", status="2xx") == 1
    assert total(found, "compaction_requests_total", **{**used, "team": "-"}, outcome="none", status="2xx") == 1
    assert total(found, "compaction_requests_total", team="search", outcome="refused", status="4xx") == 1
    assert total(found, "compaction_requests_total", api="other", outcome="unsupported") == 1
    received, sent = (int(compacted.headers[f"x-compaction-tokens-{when}"]) for when in ("before", "after"))
    assert total(found, "compaction_tokens_before_total", **place) == received
    assert total(found, "compaction_tokens_sent_total", **place) == sent
    assert total(found, "compaction_tokens_removed_total", **place) == received - sent
    assert total(found, "compaction_request_before_tokens_bucket", le="16000.0") < 2
    assert total(found, "compaction_request_sent_tokens_count") == total(
        found, "compaction_request_before_tokens_count"
    )
    assert total(found, "compaction_errors_total", code="invalid_body") == 1
    assert total(found, "compaction_summaries_seconds_count", upstream="main") >= 1
    assert total(found, "compaction_summaries_tokens_total", **place, direction="output") > 0
    assert total(found, "compaction_upstream_seconds_count", upstream="main") == 2
    assert total(found, "compaction_overhead_seconds_count", api="chat") == 2


async def _requests(port: int, count: int) -> Counter[int]:
    """Send requests over one connection each, and return the statuses."""
    body = json.dumps({"model": "unknown", "messages": [{"role": "user", "content": "Hello."}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    statuses: Counter[int] = Counter()

    async def send(amount: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(amount):
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            statuses[int(answer[9:12])] += 1
            length = re.search(rb"content-length: (\d+)", answer)
            assert length is not None
            await reader.readexactly(int(length[1]))
        writer.close()

    shares = [count // CONNECTIONS + (number < count % CONNECTIONS) for number in range(CONNECTIONS)]
    async with asyncio.TaskGroup() as group:
        for share in shares:
            group.create_task(send(share))
    return statuses


async def _scraped(port: int, count: int, last: Series) -> tuple[Series, int]:
    """Send requests, and scrape meanwhile. Return the last samples, and the number of scrapes."""
    sending = asyncio.create_task(_requests(port, count))
    scrapes = 0
    while not sending.done():
        # A connection of its own reaches any of the workers.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        last = _increased(last, series(answer.partition(b"\r\n\r\n")[2].decode()))
        scrapes += 1
        await asyncio.sleep(0.02)
    assert await sending == {404: count}
    return last, scrapes


def _increased(before: Series, after: Series) -> Series:
    assert [key for key, value in before.items() if after.get(key, -1) < value] == []
    return after


def _workers(parent: int) -> list[psutil.Process]:
    return [one for one in psutil.Process(parent).children() if "spawn_main" in " ".join(one.cmdline())]


def _held(url: str) -> None:
    """Send a request that the upstream answers late. The connection ends without an answer if its worker is killed."""
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        httpx.post(f"{url}/v1/chat/completions", json={"model": "known", "messages": []}, trust_env=False, timeout=60)


def _in_flight(url: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "compaction_requests_in_flight"
    )


@pytest.mark.long
def test_workers_report_exact_sums_that_never_decrease(tmp_path: Path, full: bool) -> None:
    count = 10_000 if full else 300
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    route: Mapping[str, str] = {"match": "known", "upstream": "main"}
    environment = {**os.environ, "TMPDIR": str(temporary)}
    go = threading.Event()
    with ExitStack() as closing:
        closing.callback(go.set)
        upstream = closing.enter_context(RawUpstream(lambda arrived: [go, answer(b'{"choices":[]}')]))
        main = {"base_url": f"{upstream.url}/v1"}
        config = write_config({"upstreams": {"main": main}, "models": [route], "records": None}, tmp_path)
        running = closing.enter_context(program(config, "--workers", "2", env=environment))
        url, process, log = running
        clients = closing.enter_context(ThreadPoolExecutor(CONNECTIONS))
        assert until(lambda: log.read_text().count("Application startup complete") == 2)
        last, scrapes = asyncio.run(_scraped(running.port, count, {}))
        assert scrapes > 1
        counted = "compaction_requests_total"
        assert until(lambda: total(scrape(url), counted) == count), (total(scrape(url), counted), count)
        last = _increased(last, scrape(url))
        assert total(last, counted, outcome="refused", status="4xx", api="chat") == count
        assert total(last, "compaction_errors_total", code="model_not_found") == count
        workers = _workers(process.pid)
        assert len(workers) == 2
        held = [clients.submit(_held, url) for _ in range(CONNECTIONS)]
        assert until(lambda: _in_flight(url) == CONNECTIONS), _in_flight(url)
        workers[0].kill()
        workers[0].wait()
        assert until(lambda: total(scrape(url), "compaction_worker_starts_total") == 3)
        died = [line for line in log.read_text().splitlines() if "worker.died" in line]
        assert [f'"pid": {workers[0].pid}, ' in line for line in died] == [True]
        assert until(lambda: _in_flight(url) == CONNECTIONS - sum(one.done() for one in held)), _in_flight(url)
        go.set()
        assert until(lambda: _in_flight(url) == 0), _in_flight(url)
        if full:
            assert until(lambda: log.read_text().count("Application startup complete") == 3, 60)
        _increased(last, asyncio.run(_scraped(running.port, 100, last))[0])
        count += 100
        assert until(lambda: total(scrape(url), counted, outcome="refused") == count), total(scrape(url), counted)
        assert [file.stat().st_mode & 0o777 for file in temporary.glob("compaction-proxy-metrics-*")] == [0o700]
    assert list(temporary.glob("compaction-proxy-metrics-*")) == []
