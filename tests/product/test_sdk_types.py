"""Each type of the official SDKs' requests is read, counted, and shortened.

Values come from the SDKs' own declarations, so a new version of an SDK brings its new types here.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import anthropic.types as messages_types
import anthropic.types.beta as beta_types
import httpx
import pytest
from openai.types.chat import chat_completion_message_param as chat_types
from openai.types.responses import response_input_item_param as item_types
from openai.types.responses import tool_param

from proxy.server.loopback import serve
from tests.kit.any_api import Upstream
from tests.kit.messages import words
from tests.kit.scripted import proxied
from tests.kit.sdk_types import Value, markers, planted, variants
from tests.kit.three_apis import APIS, PATHS
from tests.kit.upstream import text_tokens

WINDOW = 8_000
UNIONS: dict[str, list[Any]] = {
    "chat": [chat_types.ChatCompletionMessageParam],
    "responses": [item_types.ResponseInputItemParam],
    "messages": [messages_types.ContentBlockParam, beta_types.BetaContentBlockParam],
}
TOOLS: dict[str, list[Any]] = {
    "responses": [tool_param.ToolParam],
    "messages": [messages_types.ToolUnionParam, beta_types.BetaToolUnionParam],
}
PRIVATE = ("reasoning", "thinking", "redacted_thinking")
NOT_SENT = ("compaction_trigger", "item_reference", "compaction", "None")
"""Requests to the server, and references. Other tests send them."""
BULKY = ("text", "output", "content", "stdout", "stderr", "logs", "result", "data", "file_data", "lines")
"""Fields of results that may be larger than a window."""
RESULTS = ("output", "result", "file_search_call", "interpreter_call", "mcp_call", "tool", "function")
ROLES = {"tool_result": "user", "tool_addition": "system", "tool_removal": "system"}
ROLES |= dict.fromkeys(("text", "image", "document", "search_result", "container_upload"), "user")
CODE = {"type": "server_tool_use", "id": "pair_1", "name": "code_execution", "input": {"code": "1"}}


def cases(api: str) -> dict[str, Value]:
    """Return the values of an API's types by name. Those that two unions share are there once."""
    found: dict[str, Value] = {}
    for union in UNIONS[api]:
        for name, value in variants(union):
            if value not in found.values() and name.split("-")[0] not in NOT_SENT:
                found[f"{name} {len(found)}"] = value
    return found


def some(api: str, *, full: bool) -> list[tuple[str, Value]]:
    """Return the values of an API's types by name, and without ``--full`` about a third of those of each type."""
    return [(name, value) for name, value in cases(api).items() if full or int(name.split()[0].split(".")[1]) % 3 == 1]


def conversation(api: str, value: Value) -> list[Value]:
    """Return the part of a conversation that a value needs around it."""
    return {"chat": _messages, "responses": _items, "messages": _blocks}[api](json.loads(json.dumps(value)))


def _messages(value: Value) -> list[Value]:
    for call in value.get("tool_calls", ()):
        call["id"] = "pair_1"
    call: Value = {"id": "pair_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    if value["role"] == "tool":
        return [{"role": "assistant", "tool_calls": [call]}, {**value, "tool_call_id": "pair_1"}]
    if value["role"] == "function":
        return [{"role": "assistant", "function_call": {"name": value["name"], "arguments": "{}"}}, value]
    answers = [{"role": "tool", "tool_call_id": "pair_1", "content": "ok"}] if value.get("tool_calls") else []
    return [value, *answers]


def _items(value: Value) -> list[Value]:
    kind = value.get("type", "message")
    value |= {"status": "completed"} if "status" in value else {}
    value |= {"id": f"{kind}_9"} if "id" in value else {}
    value |= {"call_id": "pair_1"} if "call_id" in value else {}
    named = {"call_id": "pair_1", "name": "f"}
    calls: dict[str, Value] = {
        "function_call": {**named, "arguments": "{}"},
        "custom_tool_call": {**named, "input": ""},
        "computer_call": {**named, "pending_safety_checks": [], "actions": []},
        "local_shell_call": {"call_id": "pair_1", "id": "lsh_1", "action": {"type": "exec", "command": [], "env": {}}},
        "shell_call": {**named, "action": {"commands": []}},
        "apply_patch_call": {**named, "operation": {"type": "delete_file", "path": "a"}},
        "tool_search_call": {"call_id": "pair_1", "execution": "client", "arguments": {}},
        "program": {"call_id": "pair_1", "id": "prog_1", "code": "1", "fingerprint": "f"},
    }
    outputs: dict[str, Value] = {
        "computer_call": {"output": {"type": "computer_screenshot", "image_url": "https://host/a.png"}},
        "shell_call": {"output": [{"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
        "apply_patch_call": {"status": "completed"},
        "tool_search_call": {"execution": "client", "tools": []},
        "program": {"result": "", "status": "completed"},
    }
    if kind == "local_shell_call_output":
        value["id"] = "pair_1"
    if "tool_search" in kind:
        value["execution"] = "client"
    asking = kind.removesuffix("_output").replace("tool_search", "tool_search_call")
    if kind.endswith("_output"):
        return [{"type": asking, **calls[asking]}, value]
    if kind in calls:
        answer = kind.removesuffix("_call") + "_output" if kind == "tool_search_call" else f"{kind}_output"
        id_ = {"id": "pair_1"} if kind == "local_shell_call" else {}
        return [value, {"type": answer, "call_id": "pair_1", **id_, "output": "", **outputs.get(kind, {})}]
    if kind == "mcp_approval_response":
        asked = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "f", "server_label": "s", "arguments": "{}"}
        return [asked, {**value, "approval_request_id": "mcpr_1"}]
    after = [{"type": "message", "role": "assistant", "content": "ok"}] if kind == "reasoning" else []
    return [value, *after]


def _blocks(value: Value) -> list[Value]:
    kind = value["type"]
    value |= {"id": "pair_1"} if "id" in value else {}
    value |= {"tool_use_id": "pair_1"} if "tool_use_id" in value else {}
    said: list[Value] = [{"role": "user", "content": "Please."}, {"role": "assistant", "content": "ok"}]
    role = ROLES.get(kind, "assistant")
    here: Value = {"role": role, "content": [value]}
    result = {"type": "tool_result", "tool_use_id": "pair_1", "content": "ok"}
    if kind == "tool_use":
        return [said[0], here, {"role": "user", "content": [result]}]
    if kind == "tool_result":
        call = {"type": "tool_use", "id": "pair_1", "name": "f", "input": {}}
        return [said[0], {"role": "assistant", "content": [call]}, here]
    if kind == "server_tool_use":
        done = {"type": "code_execution_result", "stdout": "", "stderr": "", "return_code": 0, "content": []}
        here["content"].append({"type": "code_execution_tool_result", "tool_use_id": "pair_1", "content": done})
    elif kind == "mcp_tool_use":
        here["content"].append({"type": "mcp_tool_result", "tool_use_id": "pair_1", "content": "ok"})
    elif kind == "mcp_tool_result":
        here["content"].insert(
            0, {"type": "mcp_tool_use", "id": "pair_1", "name": "f", "server_name": "s", "input": {}}
        )
    elif kind.endswith("_tool_result"):
        here["content"].insert(0, CODE | {"name": kind.removesuffix("_tool_result")})
    if role == "assistant":
        return [said[0], here]
    return [said[0], here, said[1]] if role == "system" else [here, said[1]]


class Door:
    """A proxy in front of an upstream, for one API."""

    def __init__(self, api: str, url: str, http: httpx.Client, upstream: Upstream) -> None:
        self.api, self.upstream = api, upstream
        self._url, self._http = f"{url}{PATHS[api]}", http

    def send(self, parts: list[Value], *, talk: int = 0, last: bool = True, **fields: Any) -> httpx.Response:
        """Send parts of a conversation before ``talk`` exchanges of 250 tokens, and maybe a last question."""
        self.upstream.bodies.clear()
        self.upstream.summaries.clear()
        key = "input" if self.api == "responses" else "messages"
        units = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "Yes."}, *parts]
        for number in range(talk):
            units.append({"role": "user", "content": words(125, f"q{number}x")})
            units.append({"role": "assistant", "content": words(125, f"a{number}x")})
        units += [{"role": "user", "content": "Go on."}] if last else []
        fields |= {"max_tokens": 500} if self.api == "messages" else {}
        response = self._http.post(self._url, json={"model": "m", key: units, **fields})
        assert response.status_code == 200, response.text[:300]
        return response

    @property
    def sent(self) -> str:
        """The newest request to the upstream."""
        return json.dumps(self.upstream.bodies[-1], ensure_ascii=False)


@pytest.fixture(scope="module", params=APIS)
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    upstream = Upstream()
    profile = {"context_window": WINDOW, "max_output_tokens": 500, "tokenizer": "o200k_base"}
    with contextlib.ExitStack() as running:
        behind = running.enter_context(serve(upstream.app))
        settings = {
            "upstreams": {"main": {"base_url": f"{behind}/v1", "api_key": "k", "speaks": [*APIS]}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
            "policies": {"default": {"prepare": None}},
        }
        url = running.enter_context(proxied(settings, tmp_path_factory.mktemp("sdk")))
        http = running.enter_context(httpx.Client(trust_env=False, timeout=60))
        http.headers["authorization"] = "Bearer k"
        yield Door(request.param, url, http, upstream)


def facts(value: Value) -> dict[str, str]:
    return {marker: f"QZX{marker.strip('@')}7741" for marker in markers(value)}


def test_each_text_is_read(door: Door, full: bool) -> None:
    """The summary's model reads it, or it stays in the prompt."""
    unread = []
    for name, value in some(door.api, full=full):
        known = facts(value)
        response = door.send(conversation(door.api, planted(value, known)), talk=40)
        assert response.headers["x-compaction"] == "compacted"
        seen = door.sent + "".join(door.upstream.summaries)
        private = value.get("type") in PRIVATE
        unread += [f"{name} {field}" for m, field in markers(value).items() if known[m] not in seen and not private]
    assert not unread, "\n".join(["", *unread])


def test_each_text_is_counted(door: Door, full: bool) -> None:
    wrong = []
    long = words(2_000, "long")
    for name, value in some(door.api, full=full):
        known = facts(value)
        for marker, field in markers(value).items():
            sizes = []
            for text in (known[marker], long):
                parts = conversation(door.api, planted(value, {**known, marker: text}))
                sizes.append(int(door.send(parts, talk=18).headers["x-compaction-tokens-before"]))
            expected = text_tokens(long) - text_tokens(known[marker])
            if abs(sizes[1] - sizes[0] - expected) > expected / 10:
                wrong.append(f"{name} {field}: {sizes[1] - sizes[0]} of {expected}")
    assert not wrong, "\n".join(["", *wrong])


def test_a_huge_text_in_the_newest_result_fits(door: Door) -> None:
    """A result of a client's tool keeps much of its text. A result before the user's message may be summarized."""
    wrong = []
    huge = "HEAD " + words(12_000, "huge")
    for name, value in cases(door.api).items():
        kind = value.get("type") or value["role"]
        if not kind.endswith(RESULTS):
            continue
        own = kind.endswith("_output") or kind in ("tool_result", "tool", "function")
        for marker, field in markers(value).items():
            if field not in BULKY:
                continue
            parts = conversation(door.api, planted(value, {**facts(value), marker: huge}))
            response = door.send(parts, last=not own)
            after = int(response.headers.get("x-compaction-tokens-after", 10**6))
            seen = door.sent + ("" if own else "".join(door.upstream.summaries))
            read = field == "file_data" or "HEAD " in seen
            if after > WINDOW or not read or (own and after < WINDOW // 5):
                wrong.append(f"{name} {field}: {after}, {response.headers['x-compaction']}")
    assert not wrong, "\n".join(["", *wrong])


def test_each_tool_is_counted_and_unchanged(door: Door) -> None:
    wrong = []
    long = words(2_000, "long")
    for union in TOOLS.get(door.api, []):
        for name, value in variants(union):
            for marker, field in markers(value).items():
                sizes = []
                for text in (facts(value)[marker], long):
                    tool = planted(value, {**facts(value), marker: text})
                    response = door.send([], talk=18, tools=[tool])
                    assert door.upstream.bodies[-1]["tools"] == [tool]
                    sizes.append(int(response.headers["x-compaction-tokens-before"]))
                if not 1_700 < sizes[1] - sizes[0] < 2_300:
                    wrong.append(f"{name} {field}: {sizes[1] - sizes[0]}")
    assert not wrong, "\n".join(["", *wrong])
