"""Test OpenTelemetry by sending requests through the proxy to a stand-in upstream, with a collector on loopback."""

import contextlib
import socket
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.config.server import INSTALL
from tests.kit.scripted import behind, chat, key_hash
from tests.kit.upstream import Reply, StandIn

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=f"run: {INSTALL}")

from tests.kit.collector import collecting

CANARY = "CANARY-3a90"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the machine don't change what is sent, and a proxy to the collector isn't used."""
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def conversation(size: int = 30) -> list[Any]:
    messages = chat(size, 400)
    for message in messages:
        message["content"] += f" {CANARY}"
    return messages


def parents(upstream: StandIn) -> list[str]:
    return [one.headers.get("traceparent", "") for one in upstream.requests]


def test_a_compacted_request_is_a_trace(tmp_path: Path) -> None:
    replies = count()

    def reply(body: dict[str, Any]) -> Reply:
        # The first attempt ends before its first content, so the proxy repeats it.
        if next(replies) == 0:
            return Reply(error="[DONE]")
        return Reply(content=f"Answer {CANARY}")

    upstream = StandIn(window=100_000, responder=reply)
    teams = {"search": {"policy": "default", "keys": [key_hash("sk-search")]}}
    body = {"model": "gpt-5", "messages": conversation(), "stream": True, "stream_options": {"include_usage": True}}
    with collecting() as collector:
        otel = {"endpoint": collector.url, "headers": {"authorization": "Bearer otlp-key"}}
        with behind(upstream, tmp_path, teams=teams, otel=otel) as url:
            answer = httpx.post(
                url + PATH,
                json=body,
                headers={"authorization": "Bearer sk-search", **SAMPLED},
                trust_env=False,
                timeout=60,
            )
    assert answer.status_code == 200
    (server,) = collector.servers()
    assert (server.name, server.trace, server.parent, server.state) == (f"POST {PATH}", TRACE, PARENT, "vendor=1")
    assert not server.failed
    about = server.attributes
    assert about["compaction.id"] == answer.headers["x-compaction-id"]
    assert (about["compaction.verdict"], about["compaction.trigger"]) == ("compacted", "fraction")
    assert (about["compaction.team"], about["compaction.policy"]) == ("search", "default")
    assert about["compaction.tokens_before"] == int(answer.headers["x-compaction-tokens-before"])
    assert about["compaction.tokens_sent"] == int(answer.headers["x-compaction-tokens-after"])
    assert about["http.response.status_code"] == 200
    # The upstream continues the span of the attempt or summary that it got.
    children = collector.children(server)
    assert {child.trace for child in collector.spans} == {TRACE}
    assert sorted(f"00-{TRACE}-{child.id}-01" for child in children) == sorted(parents(upstream))
    attempts = [child for child in children if child.attributes["compaction.kind"] == "request"]
    summaries = [child for child in children if child.attributes["compaction.kind"] == "summary"]
    assert len(attempts) == 2 == len(upstream.conversations)
    assert len(summaries) == len(upstream.summaries) >= 1
    assert {(child.name, child.kind) for child in children} == {("chat gpt-5", "CLIENT")}
    assert [child.failed for child in attempts] == [True, False]
    assert [child.attributes["compaction.result"] for child in attempts] == ["empty", "accepted"]
    broken, accepted = (child.attributes for child in attempts)
    assert (broken["error.type"], broken["http.response.status_code"]) == ("empty", 200)
    assert accepted["http.request.resend_count"] == 1
    assert accepted["gen_ai.conversation.compacted"] is True
    assert accepted["gen_ai.request.stream"] is True
    assert accepted["gen_ai.usage.input_tokens"] == upstream.conversations[-1].tokens
    assert accepted["gen_ai.usage.output_tokens"] > 0
    assert accepted["gen_ai.operation.name"] == "chat"
    assert accepted["gen_ai.provider.name"] == "openai"
    assert accepted["server.address"] == "127.0.0.1"
    assert all(server.start <= child.start <= child.end <= server.end for child in children)
    assert {one["authorization"] for one in collector.headers} == {"Bearer otlp-key"}
    assert {one["service.name"] for one in collector.resources} == {"compaction-proxy"}
    exported = b"".join(collector.raw)
    assert CANARY.encode() not in exported
    assert b"sk-search" not in exported
    assert b"sk-upstream" not in exported


def test_errors_and_other_paths_have_spans_too(tmp_path: Path) -> None:
    broken = Reply(status=500, error={"error": {"message": f"Internal {CANARY}"}})
    upstream = StandIn(responder=lambda body: broken)
    body = {"model": "gpt-5", "messages": conversation(1)}
    with (
        collecting() as collector,
        behind(upstream, tmp_path, otel={"endpoint": collector.url}) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
    ):
        client.post(PATH, json=body)
        client.post(PATH, json=body, headers={"x-compaction": "on"})
        client.get("/v1/files/abc", headers={"traceparent": "nonsense", "tracestate": "vendor=1"})
        client.post(PATH, json=body, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        client.get("/readyz")
    failed, refused, passed = collector.servers()
    assert failed.failed
    assert (failed.attributes["error.type"], failed.parent) == ("500", "")
    (attempt,) = collector.children(failed)
    assert attempt.failed
    assert attempt.attributes["error.type"] == "500"
    assert not refused.failed
    assert refused.attributes["compaction.error"] == "invalid_body"
    assert collector.children(refused) == []
    # The rest of the path may have ids, and an invalid parent begins another trace.
    assert (passed.name, passed.attributes["url.path"]) == ("GET", "/v1/files/…")
    assert upstream.others[0].headers["traceparent"] == f"00-{passed.trace}-{passed.id}-01"
    assert "tracestate" not in upstream.others[0].headers
    # The client's decision not to sample holds for the upstream, too.
    last = parents(upstream)[-1]
    assert last.startswith(f"00-{TRACE}-")
    assert last.endswith("-00")
    assert PARENT not in last
    assert CANARY.encode() not in b"".join(collector.raw)


def test_without_the_setting_the_headers_pass_unchanged(tmp_path: Path) -> None:
    upstream = StandIn()
    body = {"model": "gpt-5", "messages": conversation(1)}
    with behind(upstream, tmp_path) as url:
        httpx.post(url + PATH, json=body, headers=SAMPLED, trust_env=False, timeout=60)
        httpx.post(url + PATH, json=body, trust_env=False, timeout=60)
    assert upstream.requests[0].headers["traceparent"] == SAMPLED["traceparent"]
    assert upstream.requests[0].headers["tracestate"] == "vendor=1"
    assert parents(upstream)[1] == ""


@pytest.mark.parametrize("collector", ["lost", "silent", "401", "503"])
def test_a_collector_that_fails_harms_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: str
) -> None:
    monkeypatch.setattr("proxy.telemetry.otel_export.CLOSING_SECONDS", 0.1)
    body = {"model": "gpt-5", "messages": conversation(1)}
    with contextlib.ExitStack() as stack:
        if collector == "lost":
            endpoint = "http://127.0.0.1:9"
        elif collector == "silent":
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        else:
            endpoint = stack.enter_context(collecting(int(collector))).url
        url = stack.enter_context(behind(StandIn(), tmp_path, otel={"endpoint": endpoint}))
        answers = [httpx.post(url + PATH, json=body, trust_env=False, timeout=60) for _ in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 200]
