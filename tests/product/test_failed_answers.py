"""Test records and budgets of answers with status 200 that are errors, or end with one."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import brotli
import httpx
import pytest

from tests.kit.raw_upstream import Arrived, RawUpstream, Script, Step, answer, streamed
from tests.kit.scripted import PROFILE, key_hash, proxied
from tests.kit.three_apis import APIS, PATHS, Answer
from tests.kit.waiting import until

ERROR = {"message": "boom", "type": "server_error", "code": "overloaded"}
ERRORS = {
    "chat": [b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\n"],
    "responses": [
        b"event: response.failed\ndata: "
        + json.dumps({"type": "response.failed", "response": {"status": "failed", "error": ERROR}}).encode()
        + b"\n\n",
        b"event: error\ndata: " + json.dumps({"type": "error", **ERROR}).encode() + b"\n\n",
    ],
    "messages": [b"event: error\r\ndata: " + json.dumps({"type": "error", "error": ERROR}).encode() + b"\r\n\r\n"],
}
TEXT = "All is well in the harbor, and the ships sail at noon. " * 20


def scripted(parts: Sequence[bytes]) -> Script:
    return lambda _: streamed(parts)


class Caller:
    """A team with a budget, and an admin."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, api: str, *, stream: bool = True) -> httpx.Response:
        body: dict[str, Any] = {"model": "m", "stream": stream, "max_tokens": 500}
        body |= {"input" if api == "responses" else "messages": [{"role": "user", "content": "word " * 3_000}]}
        headers = {"authorization": "Bearer sk-team"}
        return httpx.post(f"{self.url}{PATHS[api]}", json=body, headers=headers, timeout=60, trust_env=False)

    def record(self, response: httpx.Response) -> Any:
        id = response.headers["x-compaction-id"]
        found: list[Any] = []

        def there() -> bool:
            got = httpx.get(
                f"{self.url}/compaction/requests/{id}", headers={"authorization": "Bearer sk-admin"}, trust_env=False
            )
            found[:] = [got.json()]
            return got.status_code == 200

        assert until(there)
        return found[0]


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[tuple[RawUpstream, Caller]]:
    with RawUpstream() as upstream:
        settings = {
            "auth": {"mode": "keys"},
            "admin": {"keys": [key_hash("sk-admin")]},
            "teams": {"t": {"keys": [key_hash("sk-team")], "limits": {"spend": {"tokens": 10**7, "per": "day"}}}},
            "upstreams": {
                "main": {"base_url": f"{upstream.url}/v1", "api_key": "sk", "speaks": list(APIS), "ask_limits": False}
            },
            "models": [{"match": "*", "upstream": "main", "profile": {**PROFILE, "context_window": 100_000}}],
        }
        with proxied(settings, tmp_path) as url:
            yield upstream, Caller(url)


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_error_in_a_stream_is_a_failure_and_costs_what_arrived(
    caller: tuple[RawUpstream, Caller], api: str, content: bool
) -> None:
    upstream, team = caller
    events, _ = Answer(TEXT).parts(api, stream=True)
    before = events[: len(events) // 2] if content else []
    for error in ERRORS[api]:
        parts = [*before, error, *([b"data: [DONE]\n\n"] if api == "chat" else [])]
        upstream.script = scripted(parts)
        record = team.record(team.ask(api))
        assert (record["status"], record["error"], record["attempts"][-1]["result"]) == (200, "upstream_error", "error")
        assert record["attempts"][-1]["error"]["type"] == "server_error"
        assert "ended with the error upstream_error" in " ".join(record["explanation"])
        usage = record["usage"] or {}
        assert (usage.get("input") or 0) < 1_000, "the prompt has 3,000 tokens"
        assert bool(usage.get("output")) == content
    report = httpx.get(f"{team.url}/compaction/report", headers={"authorization": "Bearer sk-admin"}, trust_env=False)
    assert report.json()["total"]["errors"] == len(ERRORS[api])


@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_is_only_an_error_costs_nothing(caller: tuple[RawUpstream, Caller], api: str) -> None:
    upstream, team = caller
    upstream.script = lambda _: [answer(json.dumps({"type": "error", "error": ERROR}).encode())]
    record = team.record(team.ask(api, stream=False))
    assert (record["error"], record["usage"]) == ("upstream_error", None)


@pytest.mark.parametrize("api", APIS)
def test_texts_with_the_names_of_errors_are_no_failure(caller: tuple[RawUpstream, Caller], api: str) -> None:
    upstream, team = caller
    text = 'event: error\ndata: {"error": {"message": "boom"}, "type": "response.failed", "finish_reason": "error"}'
    for stream in (True, False):
        events, whole = Answer(text).parts(api, stream=stream)
        upstream.script = scripted(events) if stream else lambda _, whole=whole: [answer(whole)]  # type: ignore[misc]
        record = team.record(team.ask(api, stream=stream))
        assert (record["error"], record["attempts"][-1]["result"]) == (None, "accepted")


DELTAS = {
    "custom": {"tool_calls": [{"index": 0, "id": "c", "type": "custom", "custom": {"name": "f", "input": TEXT}}]},
    "audio": {"audio": {"id": "a", "transcript": TEXT, "data": "AAAA" * 10_000}},
    "unknown": {"thoughts_of_next_year": TEXT},
}


@pytest.mark.parametrize("kind", [*DELTAS, "no end"])
def test_text_in_any_field_is_estimated(caller: tuple[RawUpstream, Caller], kind: str) -> None:
    """The upstream reports no usage, or, on Messages, only that of the beginning."""
    upstream, team = caller
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    if kind == "no end":
        events = [event for event in Answer(TEXT).parts("messages", stream=True)[0] if b"message_delta" not in event]
    else:
        chunks = [
            {**frame, "choices": [{"index": 0, "delta": DELTAS[kind], "finish_reason": end}]} for end in (None, "stop")
        ]
        chunks[1]["choices"] = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    upstream.script = lambda _: streamed(events)
    usage = team.record(team.ask("messages" if kind == "no end" else "chat"))["usage"]
    assert 200 < usage["output"] < 400, "the text has about 280 tokens"


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "deflate": raw_deflate,
    "gzip, br": lambda data: brotli.compress(gzip.compress(data)),
    "identity, gzip": gzip.compress,
}


@pytest.mark.parametrize("encoding", PACKED)
def test_the_usage_in_an_answer_of_any_encoding_counts(caller: tuple[RawUpstream, Caller], encoding: str) -> None:
    upstream, team = caller
    body = PACKED[encoding](Answer(TEXT, prompt=1_234, output=567).parts("chat", stream=False)[1])
    headers = [("Content-Type", "application/json"), ("Content-Encoding", encoding)]
    upstream.script = lambda _: [answer(body, headers=headers)]
    usage = team.record(team.ask("chat", stream=False))["usage"]
    assert (usage["input"], usage["output"], usage["estimated"]) == (1_234, 567, False)


REFUSALS = {
    "words": (400, b'{"error": {"message": "Bad Request"}}'),
    "fields": (422, b'{"detail": [{"type": "extra_forbidden", "msg": "Extra inputs are not permitted"}]}'),
    "crash": (500, b'{"error": "Internal Server Error"}'),
    "page": (400, b"<html>Bad request</html>"),
    "empty": (400, b""),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_the_proxy_added_is_taken_back_once(caller: tuple[RawUpstream, Caller], refusal: str, own: bool) -> None:
    """An upstream refuses the proxy's request for the usage, or it refuses every request for a reason of its own."""
    upstream, team = caller
    status, body = REFUSALS[refusal]

    def script(arrived: Arrived) -> list[Step]:
        if own or b"stream_options" in arrived.body:
            number = b" request %d" % len(upstream.arrived) if body else b""
            return [answer(body.replace(b"<html>Bad", b"<html>Bad" + number), f"{status} Refused")]
        return Answer("Fine.").steps("chat", stream=True)

    upstream.script = script
    responses = [team.ask("chat") for _ in range(3)]
    assert [response.status_code for response in responses] == [status if own else 200] * 3
    assert [response.headers["x-compaction-retries"] for response in responses] == ["1", "0", "0"]
    assert len(upstream.arrived) == 4
