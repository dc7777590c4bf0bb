"""The tools of a request of the Responses API, in its list and in items."""

import json
from typing import Any

import pytest

from proxy.dialects.responses.rounds import ResponsesTool

ADDED = b'{"type":"function","name":"added"}'


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **more}


def item(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": list(tools)}


def space(*tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "functions", "tools": list(tools)}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def body(*items: Any, **fields: Any) -> bytes:
    return json.dumps({"input": list(items), **fields}).encode()


def added(raw: bytes) -> Any:
    return json.loads(ResponsesTool().with_tool(raw, ADDED))


@pytest.mark.parametrize(
    "raw",
    [
        body(user("Hi"), tools=[tool("a"), tool("b")]),
        body(item(tool("a")), user("Hi")),
        body(user("Hi"), item(space(tool("a"))), item(tool("b")), user("And?"), item(tool("c")), tools=[]),
    ],
)
def test_a_body_without_the_tool_is_as_before(raw: bytes) -> None:
    assert json.loads(ResponsesTool().without_tool(ResponsesTool().with_tool(raw, ADDED))) == json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "accepts"),
    [
        (body(item(tool("other")), user("Hi")), True),
        (body(item(space(tool("other"))), user("Hi"), tools=None), True),
        (body(item(space(tool("own"))), user("Hi")), False),
        (body(user("Hi"), item(tool("own")), tools=[tool("other")]), False),
        (body(item(), user("additional_tools")), False),
        (body(user("Hi"), tools=[]), False),
        (json.dumps({"input": "additional_tools", "tools": "x"}).encode(), False),
        (json.dumps({"input": {"type": "additional_tools"}}).encode(), False),
        (json.dumps({"input": [{"type": "additional_tools", "tools": 1}, "additional_tools", 4]}).encode(), False),
    ],
)
def test_a_request_needs_tools_without_the_name(raw: bytes, accepts: bool) -> None:
    assert ResponsesTool().accepts(raw, "own") is accepts


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_follows_the_tools_in_items(strict: bool | None) -> None:
    raw = body(item(space(tool("a"), tool("b", strict=strict), {"type": "custom", "name": "c"})))
    assert json.loads(ResponsesTool().definition(raw, "own", "", {}))["strict"] is (strict is not False)
