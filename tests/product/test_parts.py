"""The proxy reads each type of part, shortens it, keeps it with its partner, and keeps what it put into effect."""

import base64
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.any_api import Upstream
from tests.kit.scripted import proxied
from tests.kit.three_apis import PATHS

WINDOW = 12_000
FACT = "The vault of site 9 opens with QZX9-7741"
LARGE = "\n".join(f"row {number}: value {number * 7919}" for number in range(4_000))
HEADERS = {"authorization": "Bearer k", "anthropic-version": "2023-06-01"}


class Recording(Upstream):
    """An upstream that also remembers the requests for summaries, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def _answer(self, request: Any) -> Any:
        text = json.dumps(json.loads(await request.body()), ensure_ascii=False)
        if "<transcript>" in text:
            self.asked.append(text)
        return await super()._answer(request)


@contextlib.contextmanager
def sending(api: str, folder: Path, window: int = WINDOW, **policy: Any) -> Iterator[Any]:
    """Return a function that sends units of an API and returns the body that the upstream got."""
    upstream = Recording()
    provider, speaks = ("anthropic", ["messages"]) if api == "messages" else ("openai", ["responses", "chat"])
    with serve(upstream.app) as behind, httpx.Client(trust_env=False, timeout=60) as http:
        profile = {"context_window": window, "max_input_tokens": window, "max_output_tokens": 1_000}
        settings = {
            "upstreams": {"main": {"provider": provider, "base_url": f"{behind}/v1", "api_key": "k", "speaks": speaks}},
            "models": [{"match": "*", "upstream": "main", "profile": {**profile, "tokenizer": "o200k_base"}}],
            "policies": {"default": {"prepare": None, **policy}},
        }
        with proxied(settings, folder) as url:

            def send(units: list[Any], **fields: Any) -> Any:
                body = {"model": "m", "input" if api == "responses" else "messages": units, **fields}
                if api == "messages":
                    body["max_tokens"] = 500
                if api == "responses":
                    body["store"] = False
                response = http.post(f"{url}{PATHS[api]}", content=json.dumps(body).encode(), headers=HEADERS)
                assert response.status_code == 200, response.text
                got = upstream.bodies[-1]
                return got.get("messages", got.get("input")), response.headers, upstream.asked

            yield send


def words(count: int, seed: object) -> str:
    chosen = random.Random(str(seed))
    return " ".join(f"w{chosen.randrange(9999)}" for _ in range(count))


def said(api: str, text: str) -> dict[str, Any]:
    content: Any = text if api != "responses" else [{"type": "output_text", "text": text, "annotations": []}]
    return {"role": "assistant", "content": content, **({"type": "message"} if api == "responses" else {})}


def filler(api: str, turns: int = 50) -> list[Any]:
    pairs = (({"role": "user", "content": words(70, f"q{n}")}, said(api, words(70, f"a{n}"))) for n in range(turns))
    return [unit for pair in pairs for unit in pair]


def filled(units: list[Any], text: str) -> list[Any]:
    """Put a text in the place of the marks of a case. ``@64`` is the text as a file in base64."""
    encoded = base64.b64encode(text.encode()).decode()
    raw = json.dumps(units).replace("@64", encoded).replace("@", json.dumps(text)[1:-1])
    return list(json.loads(raw))


def used(id: str, name: str, result: dict[str, Any]) -> list[Any]:
    """A call of a provider's tool on Messages, and its result, with a text after them."""
    call = {"type": "server_tool_use", "id": id, "name": name, "input": {"q": "x"}}
    return [{"role": "assistant", "content": [call, {"tool_use_id": id, **result}, {"type": "text", "text": "ok"}]}]


def called(result: Any) -> list[Any]:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "t1", "content": result}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]


def pair(call: dict[str, Any], answer: dict[str, Any]) -> list[Any]:
    return [{"id": "x1", "call_id": "c1", **call}, {"call_id": "c1", **answer}]


PROGRAM = {"type": "program", "id": "p", "call_id": "c1", "code": "1", "fingerprint": "f"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}


OPAQUE: dict[str, tuple[str, list[Any]]] = {
    "refusal": ("chat", [{"role": "assistant", "content": None, "refusal": "@"}]),
    "unknown item": ("responses", [{"type": "new_thing", "id": "n1", "inside": [{"note": "@"}]}]),
    "unknown block": ("messages", [{"role": "assistant", "content": [{"type": "new", "inside": {"note": "@"}}]}]),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_the_summary_model_reads_the_text(name: str, tmp_path: Path) -> None:
    api, units = OPAQUE[name]
    with sending(api, tmp_path) as send:
        prompt, headers, asked = send(
            [
                {"role": "user", "content": "start"},
                *filled(units, FACT),
                *filler(api),
                {"role": "user", "content": "go"},
            ]
        )
    assert headers["x-compaction"] == "compacted"
    assert FACT not in json.dumps(prompt)
    assert any(FACT in text for text in asked)


def test_unknown_parts_are_kept_as_they_are(tmp_path: Path) -> None:
    call = {"type": "x_call", "call_id": "x1", "payload": LARGE[:3_000], "id": "xc_1"}
    answer = {"type": "x_call_output", "call_id": "x1", "payload": "p"}
    with sending("responses", tmp_path) as send:
        units = [*filler("responses"), {"role": "user", "content": "use x"}, call, answer]
        prompt, headers, _ = send(units)
    assert headers["x-compaction"] == "compacted"
    assert prompt[-2:] == [call, answer]


def paused(turn: int) -> list[Any]:
    call = {"type": "server_tool_use", "id": f"s{turn}", "name": "web_search", "input": {"query": "q"}}
    found = [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e" * 400}]
    result = {"type": "web_search_tool_result", "tool_use_id": f"s{turn}", "content": found}
    return [
        {"role": "user", "content": words(40, turn)},
        {"role": "assistant", "content": [{"type": "text", "text": words(60, f"a{turn}")}, call]},
        {"role": "assistant", "content": [result, {"type": "text", "text": words(60, f"b{turn}")}]},
    ]


def programmed(turn: int) -> list[Any]:
    caller = {"type": "program", "caller_id": f"p{turn}"}
    steps = [
        unit
        for n in range(3)
        for unit in (
            {**CALL, "id": f"f{turn}{n}", "call_id": f"c{turn}{n}", "caller": caller},
            {"type": "function_call_output", "call_id": f"c{turn}{n}", "output": words(120, n), "caller": caller},
        )
    ]
    done = {"type": "program_output", "id": f"o{turn}", "call_id": f"p{turn}", "result": f"RESULT-{turn}"}
    return [
        {"role": "user", "content": words(40, turn)},
        {**PROGRAM, "id": f"pr{turn}", "call_id": f"p{turn}"},
        *steps,
        {**done, "status": "completed"},
    ]


def approved(turn: int) -> list[Any]:
    asked = {"type": "mcp_approval_request", "id": f"r{turn}", "name": "t", "server_label": "s", "arguments": "{}"}
    return [
        {"role": "user", "content": words(150, turn)},
        asked,
        {"role": "user", "content": words(150, f"u{turn}")},
        {"type": "mcp_approval_response", "approval_request_id": f"r{turn}", "approve": True},
    ]


def halves(value: Any) -> set[str]:
    """Return the ids that only one part of a prompt has."""
    seen: dict[str, int] = {}

    def look(inner: Any) -> None:
        if isinstance(inner, dict):
            for name, one in inner.items():
                if isinstance(one, str) and name in IDS and not (name == "id" and "call_id" in inner):
                    seen[one] = seen.get(one, 0) + 1
                look(one)
        elif isinstance(inner, list):
            for one in inner:
                look(one)

    look(value)
    return {id for id, count in seen.items() if count == 1}


IDS = ("id", "call_id", "tool_use_id", "caller_id", "approval_request_id")


@pytest.mark.parametrize(("api", "turn"), [("messages", paused), ("responses", programmed), ("responses", approved)])
def test_no_pair_is_cut_apart(api: str, turn: Any, tmp_path: Path) -> None:
    units: list[Any] = []
    compacted = 0
    with sending(api, tmp_path, 6_000) as send:
        for number in range(14):
            units += turn(number)
            prompt, headers, _ = send(units if api == "responses" else [*units, {"role": "user", "content": "on"}])
            compacted += headers["x-compaction"] == "compacted"
            assert halves(prompt) == set()
            units.append(said(api, words(40, f"e{number}")))
    assert compacted > 5


def test_a_result_stays_after_a_reference_that_may_be_its_call(tmp_path: Path) -> None:
    reference, output = {"type": "item_reference", "id": "fc_7"}, {"type": "function_call_output", "call_id": "c7"}
    with sending("responses", tmp_path, archive=None) as send:
        newest = [{"role": "user", "content": "go"}, reference, {**output, "output": "found it"}]
        prompt, headers, _ = send([*filler("responses", 80), *newest])
    assert headers["x-compaction"] == "compacted"
    assert prompt[-2:] == newest[1:]


SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}}}
LOADED = {"type": "function", "name": "ticket_get", "description": "d", "parameters": SCHEMA}
SEARCH = {"type": "tool_search_call", "call_id": "ts1", "execution": "client", "arguments": {"q": "t"}}
FOUND = {"type": "tool_search_output", "call_id": "ts1", "execution": "client", "tools": [LOADED]}
REMOVED = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "deploy"}}
NOTES = [f"<system-reminder>\n# {name}\n{name} says MARK-{name}\n</system-reminder>" for name in ("rules", "skills")]
REFERENCE = {"type": "tool_reference", "tool_name": "ticket_get"}
SERVER_SEARCH = used(
    "s", "tool_search_tool_regex",
    {"type": "tool_search_tool_result",
     "content": {"type": "tool_search_tool_search_result", "tool_references": [REFERENCE]}},
)  # fmt: skip

STATE: dict[str, tuple[str, list[Any], list[str]]] = {
    "reference": ("messages", called([REFERENCE]), ['"tool_name": "ticket_get"', '"id": "t1"']),
    "search by the provider": ("messages", SERVER_SEARCH, ['"tool_name": "ticket_get"', '"id": "s"']),
    "removed": ("messages", [{"role": "system", "content": [REMOVED]}, said("messages", "ok")], ['"tool_removal"']),
    "search": ("responses", [SEARCH, FOUND], ['"tool_search_call"', '"ticket_get"']),
    "hosted search": (
        "responses",
        [{**SEARCH, "execution": "server", "call_id": None}, {**FOUND, "execution": "server", "call_id": None}],
        ['"tool_search_call"', '"ticket_get"'],
    ),
    "additional tools": (
        "responses",
        [{"type": "additional_tools", "role": "developer", "tools": [LOADED]}],
        ['"additional_tools"', '"ticket_get"'],
    ),
    "settings": (
        "responses",
        [{"type": "configuration_update", "reasoning": {"effort": "low"}}],
        ['"configuration_update"'],
    ),
}


@pytest.mark.parametrize("name", STATE)
def test_what_is_in_effect_outlives_summaries(name: str, tmp_path: Path) -> None:
    api, units, marks = STATE[name]
    history = [{"role": "user", "content": "Work on ticket 7."}, *units]
    compacted = 0
    with sending(api, tmp_path, 6_000) as send:
        for number in range(0, 60, 6):
            prompt, headers, _ = send([*history, *filler(api, number), {"role": "user", "content": "go"}])
            compacted += headers["x-compaction"] == "compacted"
            assert all(mark in json.dumps(prompt) for mark in marks)
            assert halves(prompt) == set()
    assert compacted > 4


def test_reminders_of_the_first_message_outlive_summaries(tmp_path: Path) -> None:
    texts = [{"type": "text", "text": text} for text in [*NOTES, "Work on ticket 7."]]
    newer = {"type": "text", "text": NOTES[1].replace("MARK-skills", "MARK-newer")}
    history = [{"role": "user", "content": texts}, said("messages", "ok"), *filler("messages", 20)]
    history += [{"role": "user", "content": [newer, {"type": "text", "text": "next"}]}, said("messages", "ok")]
    with sending("messages", tmp_path, 6_000) as send:
        prompt, headers, _ = send([*history, *filler("messages", 30), {"role": "user", "content": "go"}])
    assert headers["x-compaction"] == "compacted"
    sent = json.dumps(prompt)
    assert "MARK-rules" in sent
    # A later reminder adds to the earlier one, as long as it isn't equal.
    assert sent.index("MARK-skills") < sent.index("MARK-newer")


ENVIRONMENT = "<environment_details>\n# Current Time\n{}\n</environment_details>"
PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()


@pytest.mark.parametrize("api", ["messages", "chat"])
def test_texts_of_a_program_after_results_arent_the_users_task(api: str, tmp_path: Path) -> None:
    task = "CURRENT TASK: build this page like the mockup. " + words(400, "task")
    image = {
        "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
        "chat": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
    }[api]
    units = [*filler(api, 3), {"role": "user", "content": [image, {"type": "text", "text": task}]}]
    for n in range(40):
        environment = ENVIRONMENT.format(words(20, n))
        if api == "messages":
            call = {"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}}
            result = {"type": "tool_result", "tool_use_id": f"t{n}", "content": words(150, n)}
            content = [result, {"type": "text", "text": environment}]
            units += [{"role": "assistant", "content": [call]}, {"role": "user", "content": content}]
        else:
            call = {"id": f"t{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            units += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            units += [{"role": "tool", "tool_call_id": f"t{n}", "content": words(150, n)}]
            units += [{"role": "user", "content": environment}]
    with sending(api, tmp_path) as send:
        prompt, headers, _ = send(units)
    assert headers["x-compaction"] == "compacted"
    sent = json.dumps(prompt)
    assert task in sent
    assert PICTURE in sent


def test_a_text_beside_loaded_tools_isnt_the_users_task(tmp_path: Path) -> None:
    task = "CURRENT TASK: " + words(400, "task")
    units = [*filler("messages", 3), {"role": "user", "content": task}]
    for n in range(30):
        call = {"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}}
        loads = n == 1
        result = {"type": "tool_result", "tool_use_id": f"t{n}", "content": [REFERENCE] if loads else words(300, n)}
        beside = [{"type": "text", "text": "Tool loaded."}] if loads else []
        units += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result, *beside]}]
    with sending("messages", tmp_path) as send:
        prompt, headers, _ = send(units)
    assert headers["x-compaction"] == "compacted"
    assert task in json.dumps(prompt)


def test_tools_beyond_their_share_are_named(tmp_path: Path) -> None:
    units: list[Any] = [{"role": "user", "content": "start"}]
    for number in range(30):
        tool = {**LOADED, "name": f"tool_{number}", "description": words(60, number)}
        units += [{**SEARCH, "call_id": f"t{number}"}, {**FOUND, "call_id": f"t{number}", "tools": [tool]}]
        units.append({"role": "user", "content": words(60, number)})
    with sending("responses", tmp_path, 6_000) as send:
        prompt, headers, _ = send([*units, *filler("responses", 30), {"role": "user", "content": "go"}])
    assert int(headers["x-compaction-tokens-after"]) <= 6_000
    sent = json.dumps(prompt)
    assert '"name": "tool_29"' in sent
    assert '"name": "tool_0"' not in sent
    assert "Load a tool again" in sent
    assert halves(prompt) == set()


def counted(api: str, folder: Path, units: list[Any], **fields: Any) -> int:
    with sending(api, folder, 200_000) as send:  # smaller requests aren't counted
        _, headers, _ = send([{"role": "user", "content": words(30_000, "long")}, *units], **fields)
    return int(headers["x-compaction-tokens-before"])


SEALED = {
    "encrypted": {"reasoning_details": [{"type": "reasoning.encrypted", "data": "@", "id": "r"}]},
    "signed": {"reasoning_details": [{"type": "reasoning.text", "text": "hm", "signature": "@"}]},
    "thinking blocks": {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "@"}]},
}


@pytest.mark.parametrize("name", SEALED)
def test_sealed_reasoning_of_a_chat_counts_by_its_length(name: str, tmp_path: Path) -> None:
    sealed = base64.b64encode(random.Random(1).randbytes(6_000)).decode()
    fields = json.loads(json.dumps(SEALED[name]).replace("@", sealed))
    bare = counted("chat", tmp_path, [said("chat", "ok")])
    assert counted("chat", tmp_path, [{**said("chat", "ok"), **fields}]) - bare == pytest.approx(1_500, rel=0.1)


def deferred(api: str, count: int = 50) -> list[Any]:
    schema = {"type": "object", "properties": {"id": {"type": "string", "description": words(40, "p")}}}
    kind = {"input_schema": schema} if api == "messages" else {"type": "function", "parameters": schema}
    names = ["ticket_get", *(f"tool_{number}" for number in range(count))]
    return [{"name": name, "description": words(60, name), "defer_loading": True, **kind} for name in names]


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_deferred_tools_count_once_they_are_found(api: str, tmp_path: Path) -> None:
    tools = deferred(api)
    present = [{name: value for name, value in tools[0].items() if name != "defer_loading"}]
    search = [SEARCH, {**FOUND, "tools": present}] if api == "responses" else called([REFERENCE])
    other = [{"type": "tool_search"}] if api == "responses" else [{"name": "x", "input_schema": {"type": "object"}}]
    none = counted(api, tmp_path, [], tools=other)
    one = counted(api, tmp_path, [], tools=[*other, *present]) - none
    assert counted(api, tmp_path, [], tools=[*other, *tools]) - none < 20
    assert counted(api, tmp_path, search, tools=[*other, *tools]) - none == pytest.approx(one, abs=60)
