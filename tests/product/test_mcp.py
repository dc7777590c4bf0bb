"""``/compaction/mcp`` of a running proxy, with the official SDK's client and with raw HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.config import load
from proxy.recall import tool
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.front_door import HUGE, archive_id, long_talk, summary_messages, text_of
from tests.kit.upstream import StandIn
from tests.kit.waiting import until

needs_mcp = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="needs the MCP SDK: pip install 'mcp>=2.3'"
)

SECRET = "The vault opens with 4711-zebra."
KEYS = ("sk-search", "sk-ops", "sk-slow")
UNKNOWN = "0" * 20
PATH = "/compaction/mcp"
VERSION = "2025-11-25"
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


@dataclass(frozen=True)
class Served:
    """A proxy in which the team of ``sk-search`` has an archived conversation, and another one."""

    url: str
    id: str
    other_id: str
    app: Any

    def post(self, body: Any, key: str | None = "sk-search", **headers: str) -> httpx.Response:
        given = {
            "authorization": f"Bearer {key}" if key else "",
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": VERSION,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name: value for name, value in given.items() if value}
        return httpx.post(self.url + PATH, content=content, headers=sent, trust_env=False, timeout=30)

    def call(self, name: str, key: str = "sk-search", **arguments: Any) -> dict[str, Any]:
        answer = self.post({**LIST, "method": "tools/call", "params": {"name": name, "arguments": arguments}}, key)
        assert answer.status_code == 200, answer.text
        assert "no-store" in answer.headers["cache-control"]
        return dict(answer.json())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("mcp")
    upstream = StandIn(window=HUGE, max_output=32_000)
    teams = {key: {"keys": [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"]} for key in KEYS}
    teams["sk-slow"] |= {"limits": {"requests_per_minute": 1}}
    profile = {"context_window": 16_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
    with serve(upstream.app) as behind:
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "auth": {"mode": "keys"},
            "teams": {key.removeprefix("sk-"): team for key, team in teams.items()},
            "server": {"cors_origins": ["https://app.example"]},
            "upstreams": {"main": {"base_url": f"{behind}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        app = Proxy(load(folder / "config.yaml", {}))
        with serve(app) as url:
            ids = []
            for secret in (SECRET, "Bring a ladder."):
                messages = long_talk()
                messages[2] = {**messages[2], "content": f"{messages[2]['content']} {secret} \ud800"}
                sent = httpx.post(
                    f"{url}/v1/chat/completions",
                    content=json.dumps({"model": "m", "messages": messages}),
                    headers={"authorization": "Bearer sk-search"},
                    trust_env=False,
                )
                assert sent.headers["x-compaction"] == "compacted", sent.text
                (summary,) = summary_messages(upstream.requests[-1].body["messages"])
                ids.append(archive_id(text_of(summary)))
            yield Served(url, *ids, app)


def text(answer: dict[str, Any], *, failed: bool = False) -> str:
    result = answer["result"]
    assert result.get("isError", False) is failed
    (content,) = result["content"]
    assert content["type"] == "text"
    return str(content["text"])


@needs_mcp
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_the_official_client_lists_and_calls_both_tools(served: Served, mode: str) -> None:
    from mcp.client import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async def run() -> None:
        http = create_mcp_http_client(headers={"authorization": "Bearer sk-search"})
        async with http, Client(streamable_http_client(served.url + PATH, http_client=http), mode=mode) as client:
            assert "archive id" in (client.instructions or "")
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools) == {"search_earlier_messages", "read_earlier_messages"}
            assert set(tools["search_earlier_messages"].input_schema["required"]) == {"query", "id"}
            found = await client.call_tool("search_earlier_messages", {"query": "vault zebra", "id": served.id})
            assert not found.is_error
            quote = found.content[0].text  # type: ignore[union-attr]
            assert SECRET in quote
            place = re.search(rf"<earlier_message id={served.id} offset=(\d+) role=assistant>", quote)
            assert place is not None
            arguments = {"id": served.id, "offset": int(place.group(1))}
            read = await client.call_tool("read_earlier_messages", arguments)
            assert SECRET in read.content[0].text  # type: ignore[union-attr]
            missing = await client.call_tool("read_earlier_messages", {"id": UNKNOWN})
            assert missing.is_error

    asyncio.run(run())


@needs_mcp
def test_a_search_covers_one_conversation(served: Served) -> None:
    assert SECRET in text(served.call("search_earlier_messages", query="vault", id=served.id))
    assert "No earlier message" in text(served.call("search_earlier_messages", query="vault", id=served.other_id))
    assert text(served.call("search_earlier_messages", query="Question", id=served.id, limit=1)).count("offset=") == 1
    assert SECRET in text(served.call("search_earlier_messages", query="vault", id=served.id, limit="2"))
    assert "[1] user" in text(served.call("read_earlier_messages", id=served.id, offset=None))


@needs_mcp
def test_other_tenants_get_what_they_get_for_unknown_ids(served: Served) -> None:
    for arguments in ({}, {"query": "vault"}):
        name = "search_earlier_messages" if arguments else "read_earlier_messages"
        other = text(served.call(name, "sk-ops", id=served.id, **arguments), failed=True)
        unknown = text(served.call(name, "sk-ops", id=UNKNOWN, **arguments), failed=True)
        assert other.replace(served.id, UNKNOWN) == unknown
        assert "no archive entry" in unknown


@needs_mcp
@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, -32700),
        (b"\xff", {}, 400, -32700),
        (b"[" * 100_000, {}, 400, -32700),
        ([], {}, 400, -32600),
        ([LIST], {}, 400, -32600),
        ({"id": 1, "method": "tools/list"}, {}, 400, -32600),
        ({"jsonrpc": "2.0", "id": 1}, {}, 400, -32600),
        ({**LIST, "method": "prompts/list"}, {}, 200, -32601),
        ({**LIST, "method": "tools/call", "params": {"name": "x"}}, {}, 200, -32602),
        ({**LIST, "method": "tools/call", "params": {}}, {}, 200, -32602),
        (LIST, {"mcp_protocol_version": "2001-01-01"}, 400, None),
        (LIST, {"accept": "text/html"}, 406, None),
        (LIST, {"content_type": "text/plain"}, 400, None),
        ({"jsonrpc": "2.0", "method": "notifications/initialized"}, {}, 202, None),
        (LIST, {"mcp_protocol_version": ""}, 200, None),
        (LIST, {"mcp_session_id": "unknown"}, 200, None),
        (LIST, {"accept": "application/json"}, 200, None),
    ],
)
def test_messages_get_what_the_protocol_states(
    served: Served, body: Any, headers: dict[str, str], status: int, code: int | None
) -> None:
    answer = served.post(body, **headers)
    assert (answer.status_code, "no-store" in answer.headers["cache-control"]) == (status, True), answer.text
    if code is not None:
        assert answer.json()["error"]["code"] == code
    assert "mcp-session-id" not in answer.headers


@needs_mcp
def test_a_listed_page_may_call_and_quotas_count(served: Served) -> None:
    listed = served.post(LIST, origin="https://app.example")
    assert (listed.status_code, listed.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert served.post(LIST, "sk-slow").status_code == 200
    assert served.post(LIST, "sk-slow").json()["error"]["code"] == "rate_limit_exceeded"


@needs_mcp
def test_a_failing_archive_is_an_error_of_the_tool(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxy.store import StoreFailed

    async def failing(tenant: str, id: str) -> None:
        raise StoreFailed("down")

    async def crashing(tenant: str, id: str) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(served.app.service.stores.archive, "fetch", failing)
    assert "can't be read" in text(served.call("read_earlier_messages", id=served.id), failed=True)
    monkeypatch.setattr(served.app.service.stores.archive, "fetch", crashing)
    answer = served.call("read_earlier_messages", id=served.id)
    assert answer["error"]["code"] == -32603
    assert SECRET not in json.dumps(answer)


def test_without_the_package_the_path_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(f"store: {{url: 'sqlite:///{tmp_path}/store.db'}}")
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setattr("proxy.endpoints.mcp.find_spec", lambda name: None)
    with serve(Proxy(load(tmp_path / "config.yaml", {}))) as url:
        answer = Served(url, "", "", None).post(LIST)
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_installed")
    assert "pip install 'mcp>=2.3'" in answer.json()["error"]["message"]


@needs_mcp
def test_a_tenant_has_few_calls_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the model's own, and other messages, aren't refused."""
    begun, go, real = threading.Event(), threading.Event(), tool._answer

    def held(*arguments: Any) -> str:
        begun.set()
        assert go.wait(30)
        return real(*arguments)

    monkeypatch.setattr(tool, "_answer", held)
    monkeypatch.setattr(tool, "PLACES", 1)
    call = {**LIST, "method": "tools/call", "params": {"name": "read_earlier_messages", "arguments": {"id": served.id}}}
    with ThreadPoolExecutor() as pool:
        first = pool.submit(served.post, call)
        try:
            assert begun.wait(30)
            second = served.post(call)
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            assert second.json()["error"]["code"] == "rate_limit_exceeded"
            assert served.post(LIST).status_code == 200
            assert served.call("read_earlier_messages", "sk-ops", id=UNKNOWN)["result"]["isError"]
        finally:
            go.set()
        assert first.result(30).status_code == 200
    assert until(lambda: served.post(call).status_code == 200)  # a place is free just after the answer
