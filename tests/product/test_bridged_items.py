"""Each item, part, tool, and tool choice of ``/v1/responses`` in front of chat completions, with the official SDK.

It's translated, inlined as text, or refused by its name. The types come from the SDK's own declarations, so a new
version of the SDK fails here until its new types have a decision.
"""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types.responses import response_create_params, response_input_item_param, tool_param
from openai.types.responses import response_function_call_output_item_param as output_types
from openai.types.responses import response_input_content_param as content_types
from openai.types.responses.tool_choice_types_param import ToolChoiceTypesParam

from proxy.server.loopback import serve
from tests.kit.scripted import client, proxied
from tests.kit.sdk_types import Value, markers, planted, variants
from tests.kit.upstream import Reply, StandIn, ToolCall
from tests.product.test_sdk_types import conversation

TRANSLATED, INLINED, REFUSED, REMOVED = "translated", "inlined", "refused", "removed"

ITEMS = {
    **dict.fromkeys(("message", "user", "reasoning", "additional_tools", "tool_search_call"), TRANSLATED),
    **dict.fromkeys(("function_call", "custom_tool_call", "local_shell_call", "shell_call"), TRANSLATED),
    **dict.fromkeys(("apply_patch_call", "computer_call", "function_call_output", "shell_call_output"), TRANSLATED),
    **dict.fromkeys(("custom_tool_call_output", "local_shell_call_output", "tool_search_output"), TRANSLATED),
    **dict.fromkeys(("apply_patch_call_output", "computer_call_output"), TRANSLATED),
    **dict.fromkeys(("file_search_call", "web_search_call", "code_interpreter_call", "mcp_call"), INLINED),
    **dict.fromkeys(("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"), INLINED),
    **dict.fromkeys(("program", "program_output", "image_generation_call"), INLINED),
    **dict.fromkeys(("compaction", "compaction_trigger", "item_reference"), REFUSED),
}
TOOLS = {
    **dict.fromkeys(("function", "custom", "namespace", "local_shell", "shell", "apply_patch"), TRANSLATED),
    **dict.fromkeys(("tool_search", "file_search", "computer", "computer_use_preview", "web_search", "mcp"), REMOVED),
    **dict.fromkeys(("code_interpreter", "programmatic_tool_calling", "image_generation"), REMOVED),
    "web_search_preview": REMOVED,
}
P = {"type": "object", "properties": {"q": {"type": "string"}}}
FIND = {"type": "function", "name": "find", "description": "Find", "parameters": P}
DOCS = {"type": "namespace", "name": "mcp__docs", "description": "The documents.", "tools": [FIND]}
WIKI = {"type": "namespace", "name": "mcp__wiki", "description": "The wiki.", "tools": [FIND]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Load.", "parameters": P}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}
SHELLS = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
EVERY = [FIND, DOCS, WIKI, SEARCH, PATCH, *SHELLS]


class Door:
    """A proxy in front of chat completions. ``reply`` is the next answer."""

    def __init__(self, upstream: StandIn, gpt: openai.OpenAI) -> None:
        self.upstream, self.gpt = upstream, gpt
        self.reply = Reply(content="ok")
        upstream.responder = lambda body: self.reply

    def send(self, items: Any, *, stream: bool = False, **fields: Any) -> Any:
        """Send a request. Return the response."""
        made = self.gpt.responses.create(model="m", input=items, stream=stream, **fields)
        *_, last = made if stream else [made]
        return last.response if stream else last

    @property
    def body(self) -> Any:
        return self.upstream.requests[-1].body

    @property
    def texts(self) -> str:
        return json.dumps(self.body["messages"]).replace('\\"', '"')

    @property
    def sent(self) -> str:
        """The texts of the newest request to the upstream, also those inside JSON."""
        return json.dumps(self.body, ensure_ascii=False).replace("\\\\", "\\")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    upstream = StandIn(window=100_000)
    with serve(upstream.app) as url:
        profile = {"context_window": 100_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "speaks": ["chat"]}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
        }
        with proxied(settings, tmp_path_factory.mktemp("items")) as entrance, client(entrance) as gpt:
            yield Door(upstream, gpt)
    assert upstream.faults == []


def words(value: Value) -> dict[str, str]:
    return {marker: f"QZX{marker.strip('@')}7741" for marker in markers(value)}


def cases(union: Any) -> dict[str, Value]:
    return {f"{name} {number}": value for number, (name, value) in enumerate(variants(union))}


def is_hosted(tool: Value) -> bool:
    """Return whether the provider runs a tool that clients also run."""
    return "container" in json.dumps(tool.get("environment"))


def kind_of(value: Value) -> str:
    return value.get("type") or ("message" if "role" in value else "item_reference")


@pytest.mark.parametrize("name", cases(response_input_item_param.ResponseInputItemParam))
def test_each_item_has_a_decision(name: str, door: Door) -> None:
    value = cases(response_input_item_param.ResponseInputItemParam)[name]
    kind, known = kind_of(value), words(value)
    if ITEMS[kind] == REFUSED:
        with pytest.raises(openai.BadRequestError, match=kind):
            door.send([{"role": "user", "content": "x"}, planted(value, known)])
        return
    items = conversation("responses", planted(value, known))
    door.send([{"role": "user", "content": "x"}, *items, {"role": "user", "content": "Go on."}])
    unread: Any = [tool for tool in value.get("tools", ()) if TOOLS.get(tool.get("type")) == REMOVED or is_hosted(tool)]
    if kind == "reasoning" and value.get("content"):
        unread = value["summary"]
    readable = {known[marker] for marker in markers(value).keys() - markers(unread).keys()}
    assert {word for word in readable if word not in door.sent} == set()
    assert (f'"type": "{kind}"' in door.texts) == (ITEMS[kind] == INLINED)


@pytest.mark.parametrize("place", ["message", "result"])
def test_each_part_arrives(place: str, door: Door) -> None:
    union = {
        "message": content_types.ResponseInputContentParam,
        "result": output_types.ResponseFunctionCallOutputItemParam,
    }
    call = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
    lost = []
    for name, value in cases(union[place]).items():
        part = planted(value, words(value))
        part |= {"image_url": "https://host/a.png"} if part["type"] == "input_image" else {}
        message = {"role": "user", "content": [part]}
        result = {"type": "function_call_output", "call_id": "c", "output": [part]}
        door.send([message] if place == "message" else [{"role": "user", "content": "x"}, call, result])
        wanted = [*words(value).values(), part.get("image_url")]
        lost += [f"{name}: {text}" for text in wanted if text and text not in door.sent]
    assert lost == []


TEXT_FILE = "data:text/plain;base64,UVpYNzc0MQ=="


@pytest.mark.parametrize("role", ["user", "developer", "assistant"])
def test_a_text_file_is_inlined_and_pictures_are_the_users(role: str, door: Door) -> None:
    file = {"type": "input_file", "filename": "a.txt", "file_data": TEXT_FILE}
    picture = {"type": "input_image", "image_url": "https://host/a.png", "detail": "original"}
    door.send([{"role": role, "content": [file, picture]}, {"role": "user", "content": "x"}])
    assert "a.txt\\nQZX7741" in door.sent
    holders = [message["role"] for message in door.body["messages"] if "https://host/a.png" in json.dumps(message)]
    assert holders == ["user"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "file_id": "file_1"},
        {"type": "input_file", "file_id": "file_1"},
        {"type": "input_file", "file_url": "https://host/a.pdf"},
    ],
)
def test_what_chat_completions_cannot_take_is_refused_by_name(part: Value, door: Door) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"input\[1\].content\[0\].*{part['type']}.*Fix: ") as raised:
        door.send([{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])
    assert raised.value.param == "input[1].content[0]"


def test_an_unknown_item_becomes_json(door: Door) -> None:
    door.send(
        [{"role": "user", "content": "x"}, {"type": "new_call", "id": "n_1", "deep": {"text": ["QZX7741"], "n": 3}}]
    )
    assert '{"type": "new_call", "deep": {"text": ["QZX7741"], "n": 3}}' in door.body["messages"][1]["content"]


def test_a_turn_of_the_assistant_is_one_message(door: Door) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "find", "namespace": "mcp__docs", "arguments": "{}"}
    second = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "X"}
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "two"},
    ]
    door.send([{"role": "user", "content": "x"}, thought, said, call, second, *results], tools=EVERY)
    _, assistant, *answers = door.body["messages"]
    assert (assistant["reasoning_content"], assistant["content"]) == ("Hm.", "I look.")
    names = [(made["function"]["name"], json.loads(made["function"]["arguments"])) for made in assistant["tool_calls"]]
    assert names == [("mcp__docs__find", {}), ("patch", {"content": "X"})]
    assert [answer["content"] for answer in answers] == ["one", "two"]


@pytest.mark.parametrize("name", cases(tool_param.ToolParam))
def test_each_tool_has_a_decision(name: str, door: Door) -> None:
    value = cases(tool_param.ToolParam)[name]
    known = words(value)
    kind = value["type"]
    decision = REMOVED if is_hosted(value) else TOOLS[kind]
    response = door.send("x", tools=[planted(value, known)])
    assert [tool.type for tool in response.tools] == [kind]
    assert bool(door.body.get("tools")) == (decision == TRANSLATED)
    if decision == TRANSLATED:
        assert {word for word in known.values() if word not in door.sent} == set()


LOADED = {"type": "tool_search_output", "call_id": "s1", "execution": "client", "status": "completed", "tools": [DOCS]}
LOADING = {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"query": "docs"}}


@pytest.mark.parametrize(
    "items", [[LOADING, LOADED], [{"type": "additional_tools", "role": "developer", "tools": [DOCS]}]]
)
def test_tools_in_items_are_offered(items: list[Value], door: Door) -> None:
    door.send([{"role": "user", "content": "x"}, *items, {"role": "user", "content": "Go on."}], tools=[SEARCH])
    assert [tool["function"]["name"] for tool in door.body["tools"]] == ["tool_search", "mcp__docs__find"]


def test_names_in_namespaces_differ_and_fit(door: Door) -> None:
    long = "mcp__" + "a" * 60
    taken = {**FIND, "name": "mcp__docs__find"}
    spaces = [{**DOCS, "name": name} for name in (f"{long}x", f"{long}y", "mcp__docs__", "mcp__dócs")]
    door.send("x", tools=[*spaces, DOCS, taken])
    names = [tool["function"]["name"] for tool in door.body["tools"]]
    assert len({*names}) == 6
    assert all(len(name) <= 64 and name.isascii() for name in names)
    for name in names:
        door.reply = Reply(tool_calls=(ToolCall("c", name, "{}"),))
        (call,) = door.send("x", tools=[*spaces, DOCS, taken]).output
        back = {"type": "function_call_output", "call_id": "c", "output": "r"}
        door.reply = Reply(content="ok")
        door.send(
            [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True), back], tools=[*spaces, DOCS, taken]
        )
        assert door.body["messages"][1]["tool_calls"][0]["function"]["name"] == name


COMMAND = {"command": ["ls"], "timeout_ms": 5}
OPERATION = {"type": "delete_file", "path": "a"}
CALLS: dict[str, tuple[Value, Value]] = {
    "find": ({"q": "x"}, {"type": "function_call", "name": "find", "arguments": '{"q": "x"}'}),
    "mcp__wiki__find": ({}, {"type": "function_call", "name": "find", "namespace": "mcp__wiki", "arguments": "{}"}),
    "patch": ({"content": "X"}, {"type": "custom_tool_call", "name": "patch", "input": "X"}),
    "tool_search": ({"q": "x"}, {"type": "tool_search_call", "execution": "client", "arguments": {"q": "x"}}),
    "local_shell": (COMMAND, {"type": "local_shell_call", "action": {"type": "exec", "env": {}, **COMMAND}}),
    "shell": ({"commands": ["ls"]}, {"type": "shell_call", "action": {"commands": ["ls"]}}),
    "apply_patch": (OPERATION, {"type": "apply_patch_call", "operation": OPERATION}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_comes_back_as_its_item(name: str, stream: bool, door: Door) -> None:
    arguments, expected = CALLS[name]
    door.reply = Reply(tool_calls=(ToolCall("c1", name, json.dumps(arguments)),))
    (item,) = door.send("x", tools=EVERY, stream=stream).output
    made = item.model_dump(exclude_none=True)
    assert {key: made[key] for key in expected} == expected
    assert (made["call_id"], made["status"], bool(made["id"])) == ("c1", "completed", True)
    output = {"shell_call": [{"stdout": "QZX7741", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]}
    kind = expected["type"].removesuffix("_call") + "_output" if name == "tool_search" else f"{expected['type']}_output"
    result = {"type": kind, "call_id": "c1", "id": "c1", "output": output.get(expected["type"], "QZX7741")}
    if name == "tool_search":
        result = {"type": kind, "call_id": "c1", "tools": [DOCS], "execution": "client"}
    door.reply = Reply(content="ok")
    door.send([{"role": "user", "content": "x"}, made, result], tools=EVERY)
    _, assistant, answer = door.body["messages"]
    assert assistant["tool_calls"][0]["function"]["name"] == name
    sent = json.loads(assistant["tool_calls"][0]["function"]["arguments"])
    assert {key: sent[key] for key in arguments} == arguments
    assert (answer["tool_call_id"], "QZX7741" in answer["content"] or name == "tool_search") == ("c1", True)


FORCED: dict[str, tuple[Any, Any]] = {
    "function": ({"type": "function", "name": "patch"}, "patch"),
    "custom": ({"type": "custom", "name": "patch"}, "patch"),
    "shell": ({"type": "shell"}, "shell"),
    "apply_patch": ({"type": "apply_patch"}, "apply_patch"),
    "in a namespace": ({"type": "function", "name": "find", "namespace": "mcp__wiki"}, "mcp__wiki__find"),
    "a namespace": ({"type": "namespace", "name": "mcp__docs"}, "mcp__docs__find"),
}


@pytest.mark.parametrize("name", FORCED)
def test_a_tool_that_the_client_runs_can_be_forced(name: str, door: Door) -> None:
    choice, function = FORCED[name]
    door.send("x", tools=EVERY, tool_choice=choice)
    assert door.body["tool_choice"] == {"type": "function", "function": {"name": function}}


def test_each_choice_has_a_decision(door: Door) -> None:
    """A new type of choice is refused until the proxy has it."""
    forced = {choice["type"] for choice, _ in FORCED.values()}
    kinds = {kind for name, value in variants(response_create_params.ToolChoice) if (kind := value["type"])}
    hosted = get_args(get_args(get_type_hints(ToolChoiceTypesParam)["type"])[0] or ())
    for kind in kinds.union(hosted) - forced - {"allowed_tools"}:
        with pytest.raises(openai.BadRequestError, match=f"tool_choice.*{kind}.*Fix: "):
            door.send("x", tools=EVERY, tool_choice={"type": kind, "server_label": "s"})
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        door.send("x", tools=[{"type": "web_search"}], tool_choice="required")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones(mode: str, door: Door) -> None:
    allowed = [{"type": "namespace", "name": "mcp__docs"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}]
    door.send("x", tools=EVERY, tool_choice={"type": "allowed_tools", "mode": mode, "tools": allowed})
    assert [tool["function"]["name"] for tool in door.body["tools"]] == ["patch", "mcp__docs__find"]
    assert door.body["tool_choice"] == mode


def test_other_fields(door: Door) -> None:
    format = {"type": "json_schema", "name": "n", "schema": P, "strict": True}
    fields = {"temperature": 0.5, "top_p": 0.5, "user": "u", "safety_identifier": "s", "parallel_tool_calls": False}
    door.send("x", text={"format": format}, max_output_tokens=50, instructions="QZX7741", tools=[FIND], **fields)
    schema = {"name": "n", "schema": P, "strict": True}
    assert door.body["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert door.body["messages"][0] == {"role": "system", "content": "QZX7741"}
    assert {name: door.body[name] for name in fields} == fields
    assert door.body["max_tokens"] == 50
