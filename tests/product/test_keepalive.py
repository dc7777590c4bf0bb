"""A streaming client that waits for a summary gets heartbeats, for every outcome."""

import asyncio
import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.pipeline.compactor import Compactor
from proxy.pipeline.job import Outcome, Received
from tests.kit.scripted import PROFILE, behind, chat, client
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

WINDOW = 16_000

LONG = chat(7, 1_000)
"""A conversation just over the trigger."""

SLOWLY = 2.5
"""Seconds that a summary takes in the tests with clients that give up earlier."""

PATIENCE = 1.5
"""Seconds of silence after which those clients give up."""

A_WHILE = 0.6
"""Seconds that other summaries take: some comments come before."""

KEEPALIVE = 0.1
"""Seconds between comments."""

COMMENT = ": waiting for the model"


def slow(delay: float = A_WHILE, **responder: Any) -> StandIn:
    return StandIn(window=WINDOW, summariser=lambda body: Reply(content="Goal: SUMMARY-1.", delay=delay), **responder)


def compacting(
    upstream: StandIn, folder: Path, server: Mapping[str, Any] | None = None, believed: int = WINDOW
) -> AbstractContextManager[str]:
    """The URL of a proxy in front of the upstream, which believes its window to be as large as that."""
    profile = {**PROFILE, "context_window": believed}
    return behind(upstream, folder, profile=profile, server={"keepalive": KEEPALIVE, **(server or {})})


def metric(url: str, value: str, name: str = "requests", label: str = "outcome") -> float:
    """How many requests had an outcome; the counters are those of the whole process."""
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    mine = [line for line in lines if line.startswith(f"compaction_{name}_total{{") and f'{label}="{value}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in mine)


def stored_summaries(folder: Path) -> int:
    """How many summaries are in the proxy's store."""
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as db:
        return int(db.execute("SELECT count(*) FROM entries WHERE kind = 'summary.2'").fetchone()[0])


def lines_of(url: str, messages: list[Any], patience: float = 30) -> tuple[httpx.Response, list[tuple[float, str]]]:
    """A streamed answer: its lines that are not empty, each with the seconds after which it came."""
    started = time.monotonic()
    body = {"model": "m", "messages": messages, "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=patience) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        found = [(time.monotonic() - started, line) for line in answer.iter_lines() if line]
    return answer, found


def text_of(stream: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


def impatient(caller: openai.OpenAI) -> openai.OpenAI:
    return caller.with_options(timeout=httpx.Timeout(30, read=PATIENCE))


def test_comments_come_before_the_content(tmp_path: Path) -> None:
    upstream = slow()
    with compacting(upstream, tmp_path) as url:
        before = metric(url, "compacted")
        answer, lines = lines_of(url, LONG)
        assert until(lambda: metric(url, "compacted") == before + 1)
    comments = [when for when, line in lines if line == COMMENT]
    assert len(comments) >= 3
    assert lines[: len(comments)] == [(when, COMMENT) for when in comments], "none in the midst of the answer"
    told = lines[len(comments)][1]
    assert re.fullmatch(
        ": x-compaction: compacted, x-compaction-retries: 0, x-compaction-tokens-before: [0-9]+, "
        "x-compaction-tokens-after: [0-9]+, x-compaction-steps: [a-z,]+, x-compaction-summary: made",
        told,
    )
    assert comments[0] >= KEEPALIVE
    assert lines[-1][1] == "data: [DONE]"
    assert answer.status_code == 200
    headers = answer.headers
    assert (headers["content-type"], headers["cache-control"]) == ("text/event-stream", "no-cache")
    assert headers["x-accel-buffering"] == "no", "nginx would hold the comments back"
    assert (headers["x-compaction"], headers["x-compaction-policy"]) == ("pending", "default")
    assert len(headers["x-compaction-id"]) == 24
    assert headers.keys().isdisjoint({"x-compaction-tokens-after", "x-compaction-retries"}), "these aren't known yet"


@pytest.mark.parametrize("verdict", ["none", "failed"])
def test_a_response_that_has_begun_says_what_became_of_the_request(
    verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compact(self: Compactor, case: Any, **options: Any) -> Outcome:
        await asyncio.sleep(A_WHILE)
        if verdict == "failed":
            raise LookupError("a fault of the proxy's")
        return Outcome("none", received=Received(5), after=5)

    monkeypatch.setattr(Compactor, "compact", compact)
    with compacting(slow(), tmp_path) as url:
        answer, lines = lines_of(url, LONG)
    assert answer.headers["x-compaction"] == "pending"
    comments = [line for _, line in lines if line.startswith(":") and line != COMMENT]
    assert len(comments) == 1
    assert comments[0].startswith(f": x-compaction: {verdict}, x-compaction-retries: 0")


def test_the_clients_own_patience_lasts(tmp_path: Path) -> None:
    upstream = slow(SLOWLY)
    with compacting(upstream, tmp_path) as url, client(url) as caller:
        said = text_of(impatient(caller).chat.completions.create(model="m", messages=LONG, stream=True))
    assert said.endswith("from user, was received.")
    assert len(upstream.summaries) == 1
    assert "SUMMARY-1" in json.dumps(upstream.conversations[-1].body)


def test_comments_go_on_until_the_upstream_begins(tmp_path: Path) -> None:
    upstream = slow(responder=lambda body: Reply(content="There you are.", delay=SLOWLY))
    with compacting(upstream, tmp_path) as url, client(url) as caller:
        assert text_of(impatient(caller).chat.completions.create(model="m", messages=LONG, stream=True)) == (
            "There you are."
        )


REFUSED = {"error": {"message": "No money left.", "type": "insufficient_quota", "param": None, "code": "quota"}}


@pytest.mark.parametrize(
    ("reply", "message", "code"),
    [
        (Reply(status=429, error=REFUSED), "No money left.", "quota"),
        (Reply(error=REFUSED), "No money left.", "quota"),
        (Reply(status=502, error="<html>Bad gateway</html>"), "status 502: <html>Bad gateway</html>", "upstream_error"),
        (Reply(status=422, error={"message": "Odd.", "code": "odd"}), "Odd.", "odd"),
        (Reply(status=203, error={"base_resp": {"status_code": 1008, "status_msg": "No money."}}), "No money.", 1008),
        (Reply(status=203, error={"Response": {"Error": {"Code": "Odd", "Message": "No."}}}), "No.", "Odd"),
        (Reply(status=203, error={"detail": "Odd."}), "Odd.", None),
    ],
)
def test_a_refusal_after_comments_is_an_error_to_the_client(
    reply: Reply, message: str, code: object, tmp_path: Path
) -> None:
    with compacting(slow(responder=lambda body: reply), tmp_path) as url, client(url) as caller:
        stream = caller.chat.completions.create(model="m", messages=LONG, stream=True)
        with pytest.raises(openai.APIError) as raised:
            list(stream)
    assert message in raised.value.message
    assert raised.value.code == code


@pytest.mark.parametrize("stream", [True, False])
def test_the_deadline_holds_for_the_compaction(stream: bool, tmp_path: Path) -> None:
    upstream = slow(20)
    with compacting(upstream, tmp_path, {"deadline": 1}) as url, client(url) as caller:
        started = time.monotonic()
        with pytest.raises(openai.APIError, match="deadline has passed") as raised:
            list(caller.chat.completions.create(model="m", messages=LONG, stream=stream))
        assert 0.9 < time.monotonic() - started < 15
        assert raised.value.code == "upstream_timeout"
        assert isinstance(raised.value, openai.APIStatusError) is not stream
        assert not any(summary.abandoned for summary in upstream.summaries), "the next attempt finds it"
    assert upstream.conversations == []


def test_a_client_that_leaves_between_comments_finds_the_summary_later(tmp_path: Path) -> None:
    upstream = slow(1.5)
    with compacting(upstream, tmp_path) as url:
        before = metric(url, "client_left")
        body = {"model": "m", "messages": LONG, "stream": True}
        with (
            httpx.Client(trust_env=False, timeout=30) as http,
            http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines) == COMMENT
            time.sleep(0.3)
            assert not upstream.summaries[0].abandoned
        assert until(lambda: metric(url, "client_left") == before + 1)
        assert until(lambda: stored_summaries(tmp_path) == 1)
        assert upstream.conversations == []
        again = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": False}, trust_env=False, timeout=30)
        assert again.headers["x-compaction-summary"] == "stored"
    assert len(upstream.summaries) == 1
