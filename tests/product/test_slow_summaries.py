"""A summary model that is slower than requests wait: they get a digest, and later requests the model's summary."""

import contextlib
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.server.loopback import serve
from proxy.summary import times
from proxy.telemetry.metrics import REGISTRY
from tests.kit.program import program, write_config
from tests.kit.scripted import PROFILE, behind, chat, client
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

WINDOW = 16_000
KEY = "sk-client"
NOTES = "Goal: SLOW-NOTES."
SLOW = Reply(content=NOTES, delay=1.5)
QUICK = {"summary": {"timeout": 0.3}}
WITHOUT_A_MODEL = "from the messages without a model"


def talk(seed: str = "Slow") -> list[Any]:
    messages = chat(8, 900)
    messages[1]["content"] = f"{seed}: {messages[1]['content']}"
    return messages


def ask(caller: openai.OpenAI, messages: list[Any]) -> Mapping[str, str]:
    answer = caller.chat.completions.with_raw_response.create(model="m", messages=messages)
    assert answer.parse().choices[0].message.content
    assert answer.headers["x-compaction"] == "compacted"
    return answer.headers


def origin(caller: openai.OpenAI, messages: list[Any]) -> str:
    return ask(caller, messages)["x-compaction-summary"]


def stored(caller: openai.OpenAI, messages: list[Any], seconds: float = 30) -> bool:
    """Send a conversation until its prompt has the stored summary. Return whether that happened in time."""

    def there() -> bool:
        time.sleep(0.1)
        return origin(caller, messages) == "stored"

    return until(there, seconds)


def record(url: str, id: str, key: str = KEY) -> dict[str, Any]:
    """Return the record of a request, once it's there."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        answer = httpx.get(
            f"{url}/compaction/requests/{id}", headers={"authorization": f"Bearer {key}"}, trust_env=False
        )
        found[:] = [answer.json()] if answer.status_code == 200 else []
        return bool(found)

    assert until(there)
    return found[0]


def test_a_digest_stands_in_until_the_summary_is_there(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=lambda body: SLOW)
    messages = talk()
    with behind(upstream, tmp_path, policy=QUICK) as url, client(url) as caller:
        first = ask(caller, messages)
        assert first["x-compaction-summary"] == "digest"
        longer = [*messages, {"role": "assistant", "content": "It is done."}, {"role": "user", "content": "And now?"}]
        assert stored(caller, longer)
        last = ask(caller, longer)
        assert len(upstream.summaries) == 1, "the call went on"
        was, then = record(url, first["x-compaction-id"]), record(url, last["x-compaction-id"])
    assert (was["summary"]["origin"], was["summary"]["cause"], was["summary"]["replaced"]) == (
        "digest",
        "timeout",
        None,
    )
    assert (then["summary"]["origin"], then["summary"]["cause"], then["summary"]["replaced"]) == (
        "stored",
        None,
        "timeout",
    )
    assert not was["summary"]["breaker_open"]
    assert any("in the background" in sentence for sentence in then["explanation"])
    sent = [request.raw.decode() for request in upstream.conversations]
    assert WITHOUT_A_MODEL in sent[0]
    assert NOTES not in sent[0]
    assert NOTES in sent[-1]
    assert WITHOUT_A_MODEL not in sent[-1]
    with_digest = [request for request in sent if WITHOUT_A_MODEL in request]
    assert sent[: len(with_digest)] == with_digest, "the beginning of the prompt changes once"


def test_replicas_switch_together_and_call_the_model_once(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=lambda body: SLOW)
    messages = talk()
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(behind(upstream, tmp_path, policy=QUICK)) for _ in range(2)]
        callers = [stack.enter_context(client(url)) for url in urls]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda caller: origin(caller, messages), callers)) == ["digest", "digest"]
        assert len({request.raw for request in upstream.conversations}) == 1, "both have the same digest"
        assert stored(callers[0], messages)
        before = len(upstream.conversations)
        for caller in callers:
            last = ask(caller, messages)
            assert last["x-compaction-summary"] == "stored", "the digest in memory doesn't hide the summary"
        assert record(urls[1], last["x-compaction-id"])["summary"]["replaced"] == "timeout"
        assert len({request.raw for request in upstream.conversations[before:]}) == 1
        assert len(upstream.summaries) == 1


def test_a_call_beyond_the_deadline_is_repeated_without_a_request_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause between the calls is a digest's lifetime. After three of them, the conversation keeps its digest."""
    monkeypatch.setattr(times, "DIGEST", 0.5)
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content=NOTES, delay=20))
    server = {"deadline": 1, "keepalive": 0.4}
    with behind(upstream, tmp_path, policy=QUICK, server=server) as url, client(url) as caller:
        messages = talk()
        assert origin(caller, messages) == "digest"

        def given_up() -> bool:
            answer = ask(caller, messages)
            assert answer["x-compaction-summary"] == "digest"
            return record(url, answer["x-compaction-id"])["summary"]["cause"] == "given_up"

        assert not until(given_up, 0.5)
        assert until(lambda: ask(caller, messages).get("x-compaction-breaker") == "open")
        assert len(upstream.summaries) == 3
        time.sleep(1)
        assert origin(caller, messages) == "digest"
        assert len(upstream.summaries) == 3, "no endless spending"
        assert len({request.raw for request in upstream.conversations}) == 1, "the prompt stays the same"


def test_a_later_call_succeeds_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "DIGEST", 0.2)
    replies = iter([Reply(content="Late.", delay=20)])
    upstream = StandIn(window=WINDOW, summariser=lambda body: next(replies, SLOW))
    server = {"deadline": 2, "keepalive": 0.4}
    with behind(upstream, tmp_path, policy=QUICK, server=server) as url, client(url) as caller:
        messages = talk()
        assert origin(caller, messages) == "digest"
        assert stored(caller, messages)
        last = record(url, ask(caller, messages)["x-compaction-id"])
        assert last["summary"]["replaced"] == "timeout"
        assert len(upstream.summaries) == 2
    prompts = {request.raw for request in upstream.conversations}
    assert len(prompts) == 2


def opened() -> float:
    return REGISTRY.get_sample_value("compaction_summaries_breaker_total", {"change": "opened"}) or 0


def test_a_slow_success_is_no_failure_of_the_model(tmp_path: Path) -> None:
    before = opened()
    upstream = StandIn(window=WINDOW, summariser=lambda body: SLOW)
    with behind(upstream, tmp_path, policy=QUICK) as url, client(url) as caller:
        for number in range(5):
            messages = talk(f"Conversation {number}")
            assert origin(caller, messages) == "digest"
            assert stored(caller, messages)
    assert len(upstream.summaries) == 5
    assert opened() == before


def test_a_signal_to_stop_ends_the_call(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, summariser=lambda body: Reply(content=NOTES, delay=60))
    with serve(upstream.app) as url:
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": QUICK},
        }
        with program(write_config(settings, tmp_path)) as running:
            with client(running.url) as caller:
                assert origin(caller, talk()) == "digest"
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(25) == 0, "it doesn't wait for the summary"
            log = running.log.read_text()
    assert "Traceback" not in log
    assert "background_failed" not in log
