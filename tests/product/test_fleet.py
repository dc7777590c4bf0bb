"""Three replicas share one Redis server: conversations whose turns go to any of them."""

import contextlib
import itertools
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.program import program, write_config
from tests.kit.redis_server import RedisServer
from tests.kit.scripted import PROFILE, chat, key_hash, proxied
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

WINDOW = 16_000
REPLICAS = 3


@contextlib.contextmanager
def fleet(upstream: StandIn, server: RedisServer, folder: Path, **sections: Any) -> Iterator[list[str]]:
    """The URLs of replicas in front of an upstream, with a Redis server as their store."""
    with serve(upstream.app) as url, contextlib.ExitStack() as replicas:
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": dict(PROFILE)}],
            "store": {"url": server.url},
            **sections,
        }
        urls = []
        for number in range(REPLICAS):
            own = folder / f"replica{number}"
            own.mkdir()
            urls.append(replicas.enter_context(proxied(settings, own)))
        yield urls


def turns(conversation: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """The requests of a conversation, which nearly fills the window three times."""
    whole = chat(count, 250)
    whole = [{**message, "content": f"{conversation}. {message['content']}"} for message in whole]
    for turn in range(1, count + 1):
        yield whole[: 2 * turn]


def test_turns_go_to_any_replica(redis: RedisServer, tmp_path: Path, full: bool) -> None:
    conversations, count = (200, 40) if full else (6, 40)
    upstream = StandIn(window=WINDOW)
    failed: list[str] = []

    def talk(number: int) -> None:
        chosen = random.Random(number)
        with httpx.Client(trust_env=False, timeout=60) as http:
            for messages in turns(number, count):
                body = {"model": "m", "messages": messages}
                answer = http.post(f"{chosen.choice(urls)}/v1/chat/completions", json=body)
                if answer.status_code != 200:
                    failed.append(answer.text)

    with fleet(upstream, redis, tmp_path) as urls, ThreadPoolExecutor(4) as threads:
        list(threads.map(talk, range(conversations)))
    assert failed == []
    assert {one.status for one in upstream.conversations} == {200}
    made = Counter(one.raw for one in upstream.summaries)
    assert len(made) > conversations
    assert max(made.values()) == 1, "each summary is made once"
    of_each: dict[str, list[list[Any]]] = defaultdict(list)
    for one in upstream.conversations:
        of_each[one.body["messages"][0]["content"]].append(one.body["messages"])
    pairs = [pair for prompts in of_each.values() for pair in itertools.pairwise(prompts)]
    breaks = sum(new[: len(old)] != old for old, new in pairs)
    assert breaks <= len(made), "a prompt changes at a checkpoint only, whichever replica renders it"


def test_every_replica_sends_the_same_bytes_and_reports_the_same_records(redis: RedisServer, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    key = {"authorization": "Bearer sk-one"}
    with fleet(upstream, redis, tmp_path) as urls, httpx.Client(trust_env=False, timeout=60, headers=key) as http:
        for url in urls:
            answer = http.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": chat(60, 250)})
            assert answer.headers["x-compaction"] == "compacted"
        assert len({one.raw for one in upstream.conversations}) == 1
        assert len(upstream.summaries) == len({one.raw for one in upstream.summaries})
        id = answer.headers["x-compaction-id"]
        for url in urls:
            assert until(lambda url=url: http.get(f"{url}/compaction/requests/{id}").status_code == 200)
            assert until(lambda url=url: http.get(f"{url}/compaction/report").json()["total"]["requests"] == len(urls))
        archived = http.get(f"{urls[0]}/compaction/requests/{id}/diff")
        assert archived.status_code == 200
        assert archived.text == http.get(f"{urls[2]}/compaction/requests/{id}/diff").text
        other = {"authorization": "Bearer sk-two"}
        assert [http.get(f"{url}/compaction/requests/{id}", headers=other).status_code for url in urls] == [404] * 3


@pytest.mark.parametrize("encrypted", combined(2, [True, False]))
def test_replicas_go_on_while_the_server_is_down(redis: RedisServer, tmp_path: Path, encrypted: bool) -> None:
    upstream = StandIn(window=WINDOW)
    store = {"url": redis.url, **({"encryption": {"key": "a" * 64}} if encrypted else {})}
    body = {"model": "m", "messages": chat(60, 250)}

    def ask(url: str) -> httpx.Response:
        return http.post(f"{url}/v1/chat/completions", json=body)

    with fleet(upstream, redis, tmp_path, store=store) as urls, httpx.Client(trust_env=False, timeout=60) as http:
        assert ask(urls[0]).headers["x-compaction-summary"] == "made"
        assert ask(urls[1]).headers["x-compaction-summary"] == "stored"
        assert (b"last message" in redis.raw()) is not encrypted
        redis.stop()
        assert [ask(url).status_code for url in urls] == [200, 200, 200]
        redis.start()
        assert [ask(url).status_code for url in urls] == [200, 200, 200]
        body["messages"] = chat(61, 251)
        assert until(lambda: [ask(url).headers["x-compaction-summary"] for url in urls] == ["stored"] * 3)


@pytest.mark.full
def test_a_replica_that_is_killed_during_a_summary_is_replaced(redis: RedisServer, tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def summarise(body: dict[str, Any]) -> Reply:
        first = not begun.is_set()
        begun.set()
        return Reply(content="Goal: SUMMARY.", go=go if first else None)

    def ask(url: str) -> httpx.Response:
        body = {"model": "m", "messages": chat(60, 250)}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)

    upstream = StandIn(window=WINDOW, summariser=summarise)
    with fleet(upstream, redis, tmp_path) as urls, serve(upstream.app) as behind_it, ThreadPoolExecutor(3) as threads:
        settings = {
            "upstreams": {"main": {"base_url": f"{behind_it}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": dict(PROFILE)}],
            "store": {"url": redis.url},
        }
        with program(write_config(settings, tmp_path)) as killed:
            lost = threads.submit(ask, killed.url)
            assert begun.wait(30)
            others = [threads.submit(ask, url) for url in urls[:2]]
            killed.process.kill()
            killed.process.wait(10)
            lost_calls = len(upstream.summaries)
            with pytest.raises(httpx.TransportError):
                lost.result()
            go.set()
            answers = [one.result() for one in others]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert sum(count - 1 for count in Counter(one.raw for one in upstream.summaries).values()) == lost_calls, (
        "only the lost ones"
    )


def test_a_replica_that_is_paused_during_a_summary_uses_the_one_of_its_successor(
    redis: RedisServer, tmp_path: Path
) -> None:
    begun, go, made = threading.Event(), threading.Event(), itertools.count()

    def summarise(body: dict[str, Any]) -> Reply:
        first = not begun.is_set()
        begun.set()
        return Reply(content=f"Goal: SUMMARY {next(made)}.", go=go if first else None)

    def ask(url: str) -> httpx.Response:
        body = {"model": "m", "messages": chat(60, 250)}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)

    upstream = StandIn(window=WINDOW, summariser=summarise)
    with fleet(upstream, redis, tmp_path) as urls, ThreadPoolExecutor(1) as threads, redis.client() as client:
        settings = yaml.safe_load((tmp_path / "replica0" / "config.yaml").read_text())
        with program(write_config(settings, tmp_path)) as paused:
            waiting = threads.submit(ask, paused.url)
            assert begun.wait(30)
            paused.process.send_signal(signal.SIGSTOP)
            (lease,) = client.keys("compaction:entry:*:making:*")
            client.unlink(lease)  # it would end after 5 seconds
            successor = ask(urls[0])
            stored = {key: client.get(key) for key in client.keys("compaction:entry:*:summary.2:*")}
            go.set()
            paused.process.send_signal(signal.SIGCONT)
            resumed = waiting.result()
        assert [answer.status_code for answer in (successor, resumed)] == [200, 200]
        assert successor.headers["x-compaction-summary"] == "made"
        assert stored
        assert {key: client.get(key) for key in stored} == stored
        assert len({one.raw for one in upstream.conversations}) == 1, "both replicas send the same prompt"


TEAM = {"authorization": "Bearer sk-team"}
SHORT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def limited(limits: dict[str, int], choice: str = "local") -> dict[str, Any]:
    team = {"keys": [key_hash("sk-team")], "limits": limits}
    return {"auth": {"mode": "keys"}, "teams": {"one": team}, "limits": {"on_store_failure": choice}}


def send(urls: Sequence[str], count: int, threads: int) -> Counter[int]:
    """Send requests to the replicas in turn. Return the number of each status."""

    def ask(number: int) -> int:
        url = f"{urls[number % len(urls)]}/v1/chat/completions"
        return httpx.post(url, json=SHORT, headers=TEAM, trust_env=False, timeout=60).status_code

    with ThreadPoolExecutor(threads) as pool:
        return Counter(pool.map(ask, range(count)))


def test_replicas_count_the_rate_of_a_team_together(redis: RedisServer, tmp_path: Path) -> None:
    upstream, rate = StandIn(), 30
    with fleet(upstream, redis, tmp_path, **limited({"requests_per_minute": rate})) as urls:
        began = time.monotonic()
        statuses = send(urls, 60, 6)
        refilled = (time.monotonic() - began) * rate / 60
        assert set(statuses) == {200, 429}
        assert rate <= statuses[200] <= rate + refilled + 1
        assert len(upstream.conversations) == statuses[200]


@pytest.mark.full
def test_the_places_of_a_killed_replica_are_free_after_a_minute(redis: RedisServer, tmp_path: Path) -> None:
    go = threading.Event()
    held = StandIn(responder=lambda _: Reply(content="Hi.", go=go))
    settings = limited({"concurrent": 2})
    with (
        fleet(StandIn(), redis, tmp_path, **settings) as urls,
        serve(held.app) as url,
        ThreadPoolExecutor(2) as threads,
    ):
        models = [{"match": "*", "upstream": "main", "profile": dict(PROFILE)}]
        upstreams = {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}}
        whole = {"upstreams": upstreams, "models": models, "store": {"url": redis.url}, **settings}
        with program(write_config(whole, tmp_path)) as killed:
            lost = [threads.submit(send, [killed.url], 1, 1) for _ in range(2)]
            assert until(lambda: len(held.conversations) == 2)
            killed.process.kill()
            killed.process.wait(10)
            began = time.monotonic()
            assert send(urls, 3, 1) == {429: 3}, "nobody renews the places, but they aren't free yet"
            assert until(lambda: send(urls, 1, 1) == {200: 1}, seconds=90)
        print(f"\nfree after {time.monotonic() - began:.0f} s")
        go.set()
        for one in lost:
            with pytest.raises(httpx.TransportError):
                one.result()


@pytest.mark.full
def test_a_budget_is_exceeded_by_summaries_in_progress_at_most(redis: RedisServer, tmp_path: Path) -> None:
    upstream, budget, threads = StandIn(window=WINDOW), 60_000, 6

    def ask(number: int) -> str:
        messages = [{**message, "content": f"{number} {message['content']}"} for message in chat(60, 250)]
        url = f"{urls[number % len(urls)]}/v1/chat/completions"
        body = {**SHORT, "messages": messages}
        return httpx.post(url, json=body, headers=TEAM, trust_env=False, timeout=60).headers["x-compaction-summary"]

    settings = limited({"summary_tokens_per_day": budget})
    with fleet(upstream, redis, tmp_path, **settings) as urls, ThreadPoolExecutor(threads) as pool:
        summaries = Counter(pool.map(ask, range(24)))
    assert set(summaries) == {"made", "digest"}
    sizes = [request.tokens for request in upstream.summaries]
    print(f"\n{sum(sizes)} tokens of a budget of {budget}, the largest call has {max(sizes)}")
    assert budget / 2 < sum(sizes) <= budget + (threads - 1) * max(sizes)


def test_replicas_never_exceed_the_concurrency_of_a_team(redis: RedisServer, tmp_path: Path) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def respond(body: dict[str, Any]) -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        return Reply(content="Hi.")

    upstream = StandIn(responder=respond)
    with fleet(upstream, redis, tmp_path, **limited({"concurrent": 2})) as urls:
        statuses = send(urls, 60, 9)
    assert statuses[200] >= 30
    assert set(statuses) <= {200, 429}
    assert most <= 2
    with redis.client() as client:
        (key,) = client.keys("*compaction-limits*") or (b"",)
        assert client.zcard(key) == 0, "the replicas have released every place"
