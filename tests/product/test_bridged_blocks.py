"""Each block and tool of ``/v1/messages`` in front of chat completions, and generated conversations of both APIs.

A block is translated, inlined as text, or refused by its name. The types come from the SDK's own declarations, so a new
version of the SDK fails here until its new types have a decision.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import anthropic.types as stable
import anthropic.types.beta as beta
import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.newer_items import FACT, TALKS
from tests.kit.scripted import proxied
from tests.kit.sdk_types import Value, markers, planted, variants
from tests.kit.three_apis import PATHS
from tests.kit.upstream import Reply, StandIn, ToolCall
from tests.product.test_sdk_types import conversation

TRANSLATED, INLINED, REFUSED, REMOVED = "translated", "inlined", "refused", "removed"

BLOCKS = {
    **dict.fromkeys(("text", "image", "document", "tool_use", "tool_result", "thinking"), TRANSLATED),
    **dict.fromkeys(("search_result", "compaction", "fallback", "mcp_tool_listing"), INLINED),
    **dict.fromkeys(("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"), INLINED),
    **dict.fromkeys(("code_execution_tool_result", "bash_code_execution_tool_result"), INLINED),
    **dict.fromkeys(("text_editor_code_execution_tool_result", "tool_search_tool_result"), INLINED),
    **dict.fromkeys(("advisor_tool_result", "mcp_tool_use", "mcp_tool_result"), INLINED),
    **dict.fromkeys(("tool_addition", "tool_removal"), INLINED),
    "container_upload": REFUSED,
    "redacted_thinking": REMOVED,
}
SERVERS = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor", "mcp_toolset")
TOOLS = {
    **dict.fromkeys(("custom", "bash", "text_editor", "memory"), TRANSLATED),
    **dict.fromkeys(SERVERS, REMOVED),
    **dict.fromkeys(("computer", "computer_toolset", "browser_toolset"), REFUSED),
}
"""Decisions for types of tools, without their versions."""

HELLO = {"role": "user", "content": "Hello"}
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 1}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


class Door:
    """A proxy in front of chat completions. ``reply`` is the next answer."""

    def __init__(self, upstream: StandIn, http: httpx.Client) -> None:
        self.upstream, self._http = upstream, http
        self.reply = Reply(content="ok")
        upstream.responder = lambda body: self.reply

    def post(self, api: str, units: list[Any], **fields: Any) -> httpx.Response:
        """Send a request."""
        more = {"max_tokens": 500} if api == "messages" else {"store": False}
        key = "input" if api == "responses" else "messages"
        return self._http.post(PATHS[api], json={"model": "m", key: units, **more, **fields})

    def send(self, *messages: Any, **fields: Any) -> Any:
        """Send messages. Return the request that the upstream gets."""
        response = self.post("messages", [*messages], **fields)
        assert response.status_code == 200, response.text
        return self.upstream.requests[-1].body

    def refused(self, *messages: Any, **fields: Any) -> str:
        """Send messages. Return the message of the error."""
        response = self.post("messages", [*messages], **fields)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    upstream = StandIn(window=1_000_000)
    with serve(upstream.app) as url:
        profile = {"context_window": 1_000_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "k", "speaks": ["chat"]}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
        }
        with (
            proxied(settings, tmp_path_factory.mktemp("blocks")) as entrance,
            httpx.Client(base_url=entrance, headers={"x-api-key": "k"}, trust_env=False, timeout=60) as http,
        ):
            yield Door(upstream, http)
    assert upstream.faults == []


@functools.cache
def cases(*unions: Any) -> dict[str, Value]:
    """Return the values of types. A file of the SDK's own isn't a request's."""
    found: dict[str, Value] = {}
    for union in unions:
        for name, value in variants(union):
            if value not in found.values() and '"data": [' not in json.dumps(value):
                found[f"{name} {len(found)}"] = value
    return found


def words(value: Value) -> dict[str, str]:
    return {marker: f"QZX{marker.strip('@')}7741" for marker in markers(value)}


def family(tool: Value) -> str:
    return (
        str(tool.get("type") or "custom")
        .rstrip("0123456789")
        .removesuffix("_")
        .removesuffix("_bm25")
        .removesuffix("_regex")
    )


def is_sealed(value: Any, *, fetched: bool = False) -> bool:
    """Return whether only Anthropic can read a source in a value. A fetched page names its URL itself."""
    if isinstance(value, list):
        return any(is_sealed(one, fetched=fetched) for one in value)
    if not isinstance(value, dict):
        return False
    fetched = fetched or value.get("type") == "web_fetch_result"
    source = value.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    by_url = kind == "url" and value["type"] == "document" and not fetched
    return kind == "file" or by_url or any(is_sealed(one, fetched=fetched) for one in value.values())


def problem(body: Any) -> str | None:
    """Return the error of a strict server of chat completions."""
    waiting: list[str] = []
    for place, message in enumerate(body["messages"]):
        role, content = message["role"], message.get("content")
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                return f"{place}: a result without a call right before"
            waiting.remove(message["tool_call_id"])
        elif waiting:
            return f"{place}: {role} before the results of {waiting}"
        if role not in ("system", "user", "assistant", "tool"):
            return f"{place}: role {role}"
        if content is None and not message.get("tool_calls"):
            return f"{place}: no content"
        if isinstance(content, list) and (not content or role != "user"):
            return f"{place}: content of {role} is {content}"
        for part in content if isinstance(content, list) else ():
            if part["type"] not in ("text", "image_url", "file", "input_audio"):
                return f"{place}: part {part['type']}"
            if part["type"] == "image_url" and not part["image_url"]["url"].startswith(("data:image/", "http")):
                return f"{place}: {part['image_url']['url'][:30]} isn't an image"
            if part["type"] == "file" and not part["file"]["file_data"].startswith("data:application/pdf;base64,"):
                return f"{place}: a file without data"
        waiting += [call["id"] for call in message.get("tool_calls") or ()]
    return f"no results of {waiting}" if waiting else None


@pytest.mark.parametrize("name", cases(stable.ContentBlockParam, beta.BetaContentBlockParam))
def test_each_block_has_a_decision(name: str, door: Door) -> None:
    value = cases(stable.ContentBlockParam, beta.BetaContentBlockParam)[name]
    decision, known = BLOCKS[value["type"]], words(value)
    added = (value.get("tool") or {}).get("definition")
    messages = [*conversation("messages", planted(value, known)), HELLO]
    if decision == REFUSED or is_sealed(value) or (added and TOOLS[family(added)] == REFUSED):
        error = door.refused(*messages)
        assert added or value["type"] in error or "source" in error, error
        return
    sent = door.send(*messages)
    assert problem(sent) is None
    offered = added is None or TOOLS[family(added)] == TRANSLATED
    text = json.dumps(sent, ensure_ascii=False)
    assert not offered or [field for marker, field in markers(value).items() if known[marker] not in text] == []


@pytest.mark.parametrize("name", cases(stable.ToolUnionParam, beta.BetaToolUnionParam))
def test_each_tool_has_a_decision(name: str, door: Door) -> None:
    value = cases(stable.ToolUnionParam, beta.BetaToolUnionParam)[name]
    decision, known = TOOLS[family(value)], words(value)
    tool = planted(value, known)
    if decision == REFUSED:
        assert f"'{value['type']}'" in door.refused(HELLO, tools=[LOOK, tool])
        return
    functions = [one["function"] for one in door.send(HELLO, tools=[LOOK, tool])["tools"]]
    assert [one["name"] for one in functions] == ["look", *([tool["name"]] if decision == TRANSLATED else [])]
    if decision == TRANSLATED:
        assert functions[1]["parameters"]
        assert all(word in json.dumps(functions) for word in known.values())
        assert door.send(HELLO, tools=[tool], tool_choice={"type": "tool", "name": tool["name"]})["tool_choice"]
    else:
        for choice in ({"type": "any"}, {"type": "tool", "name": value.get("name", "n")}):
            assert "tool_choice" in door.refused(HELLO, tools=[tool], tool_choice=choice)


@pytest.mark.parametrize(("seed", "api"), combined(2, range(12), ["messages", "responses"]))
def test_generated_conversations_are_valid_and_whole(api: str, seed: int, door: Door) -> None:
    talk = TALKS[api](seed, 8_000, size=1.5)
    sent = 0
    for number, end in enumerate(talk.requests()):
        if talk.refers or number % 3:
            continue
        units = talk.units[:end]
        response = door.post(api, units, **{**talk.fields(), "max_tokens": 500} if api == "messages" else talk.fields())
        if any(unit.get("type") == "compaction" for unit in units):
            assert response.status_code == 400
            continue
        assert response.status_code == 200, response.text
        body = door.upstream.requests[-1].body
        assert problem(body) is None
        assert set(FACT.findall(json.dumps(units))) - set(FACT.findall(json.dumps(body))) == set()
        sent += 1
    assert sent or talk.refers or api == "responses"


def test_calls_and_results_come_in_pairs(door: Door) -> None:
    def result(id_: str, text: str) -> Value:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id_, "content": text}]}

    asked = {"role": "assistant", "content": [{"type": "text", "text": "QZX1"}, CALL, {**CALL, "id": "call_2"}]}
    note = {"role": "system", "content": "QZX2"}
    again = {"role": "assistant", "content": [{**CALL, "input": {"b": "QZX3"}}]}
    sent = door.send(HELLO, asked, note, result("call_2", "QZX4"), again, result("call_1", "QZX5"), result("x", "QZX6"))
    assert problem(sent) is None
    _, first, *results, _, second, last, orphan = sent["messages"]
    assert (first["content"], [one["tool_call_id"] for one in results]) == ("QZX1", ["call_1", "call_2"])
    assert (results[1]["content"], last["content"]) == ("QZX4", "QZX5")
    assert (second["tool_calls"][0]["function"]["arguments"], orphan["role"]) == ('{"b":"QZX3"}', "user")
    assert all(f"QZX{number}" in json.dumps(sent) for number in range(1, 7))


def test_media_and_errors_of_results(door: Door) -> None:
    pdf = {"type": "document", "title": "a.pdf", "source": {**PNG["source"], "media_type": "application/pdf"}}  # type: ignore[dict-item]
    found = {"type": "tool_result", "tool_use_id": "call_1", "is_error": True, "content": [PNG, pdf]}
    user = {"role": "user", "content": [found, {"type": "text", "text": "See?"}]}
    sent = door.send(HELLO, {"role": "assistant", "content": [CALL]}, user)["messages"]
    assert "[error]" in sent[2]["content"]
    assert [part["type"] for part in sent[3]["content"]] == ["image_url", "file", "text"]
    assert sent[3]["content"][1]["file"] == {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}


def test_a_system_message_inside_is_the_users(door: Door) -> None:
    sent = door.send(HELLO, {"role": "system", "content": "QZX1"}, system=[{"type": "text", "text": "QZX2"}])
    assert [(one["role"], one["content"]) for one in sent["messages"]] == [
        ("system", "QZX2"),
        ("user", "Hello"),
        ("user", "[system note]\nQZX1"),
    ]


def test_claude_codes_billing_header_isnt_sent(door: Door) -> None:
    """It changes with each request, so a server's prompt cache would find nothing."""
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"}
    sent = door.send(HELLO, system=[header, {"type": "text", "text": "Be brief."}])
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}


def test_long_names_come_back(door: Door) -> None:
    name = f"mcp__{'server' * 12}__find"
    door.reply = Reply(tool_calls=(ToolCall("c1", "to be named", "{}"),))
    body = {"tools": [{**LOOK, "name": name}], "tool_choice": {"type": "tool", "name": name}}
    call = {"role": "assistant", "content": [{**CALL, "name": name}]}
    short = door.send(HELLO, call, **body)["tool_choice"]["function"]["name"]
    sent = door.upstream.requests[-1].body
    assert len(short) == 64
    assert short == sent["tools"][0]["function"]["name"] == sent["messages"][1]["tool_calls"][0]["function"]["name"]
    door.reply = Reply(tool_calls=(ToolCall("c1", short, "{}"),))
    (block,) = door.post("messages", [HELLO], **body).json()["content"]
    door.reply = Reply(content="ok")
    assert (block["type"], block["name"]) == ("tool_use", name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5_000}}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1_024}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "xhigh"}),
        ({"stop_sequences": ["END"], "metadata": {"user_id": "u"}}, {"stop": ["END"], "user": "u"}),
        ({"tools": [LOOK], "tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tools": [LOOK], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ],
)
def test_parameters(fields: dict[str, Any], expected: dict[str, Any], door: Door) -> None:
    sent = door.send(HELLO, model="gpt-5", **fields)
    assert {name: sent.get(name) for name in expected} == expected
