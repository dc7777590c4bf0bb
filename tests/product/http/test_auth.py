"""The keys that callers may use, and the models of each key."""

import hashlib
import json
from collections.abc import Callable, Iterator

import pytest

from tests.kit.client import CHAT, JSON, StartProxy, ask, chat
from tests.kit.combinations import combined
from tests.kit.raw_upstream import RawUpstream, answer

KEY = "sk-team-search-0123456789"
OTHER = "sk-team-search-0123456780"
"""Differs from the key in its last character."""


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


TEAMS = {
    "search": {"keys": [hashed(KEY)], "models": ["gpt-4o*", "bot"], "policy": "careful"},
    "ops": {"keys": [hashed("sk-ops")]},
}
POLICIES = {"careful": {"keep": {"messages": 40}}}
MODELS = [
    {"match": "gpt-4o*", "upstream": "main"},
    {"match": "bot", "upstream": "main", "model": "gpt-4o-mini"},
    {"match": "o3", "upstream": "main"},
]
KEYS = {
    "auth": {"mode": "keys"},
    "upstreams": {"main": {"api_key": "sk-operators"}},
    "teams": TEAMS,
    "policies": POLICIES,
    "models": MODELS,
}
LISTED = {"object": "list", "data": [{"id": name, "x": 1} for name in ("gpt-4o", "gpt-4o-mini", "o3", "gpt-3.5-turbo")]}


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with RawUpstream(
        lambda arrived: [answer(json.dumps(LISTED).encode() if arrived.method == "GET" else b"{}")]
    ) as running:
        yield running


@pytest.fixture(scope="module")
def keys(start_module_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_module_proxy(upstream.url, KEYS)


@pytest.fixture(scope="module")
def open_to_all(start_module_proxy: StartProxy, upstream: RawUpstream) -> str:
    return start_module_proxy(upstream.url, {"teams": TEAMS, "policies": POLICIES, "models": MODELS})


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (("Authorization", f"Bearer {KEY}"), 200),
        (("authorization", f"bearer   {KEY}"), 200),
        (("api-key", KEY), 200),
        (("Api-Key", f" {KEY} "), 200),
        (("Authorization", f"Bearer {OTHER}"), 401),
        (("Authorization", f"Bearer {KEY}x"), 401),
        (("Authorization", f"Bearer {KEY[:-1]}"), 401),
        (("Authorization", f"Bearer {hashed(KEY)}"), 401),
        (("Authorization", KEY), 401),
        (("Authorization", f"Basic {KEY}"), 401),
        (("Authorization", "Bearer "), 401),
        (("Authorization", "Bearer \xe9\xff"), 401),
        (("x-api-key", KEY), 200),
        (("x-api-key", OTHER), 401),
        (("x-team", "search"), 401),
        (("cookie", f"key={KEY}"), 401),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/models/gpt-4o", "/v1/files"])
def test_a_key_of_a_team_is_needed_everywhere(
    keys: str, upstream: RawUpstream, header: tuple[str, str], status: int, path: str
) -> None:
    before = len(upstream.arrived)
    got = ask(keys, path, chat() if path == CHAT else None, headers=[JSON, header])
    if path == "/v1/files" and status == 200:
        assert (got.status, got.error["code"]) == (403, "path_not_allowed")
        return
    assert got.status == status
    if status == 401:
        assert (got.error["type"], got.error["code"]) == ("authentication_error", "invalid_api_key")
        assert len(upstream.arrived) == before
        assert KEY.encode() not in got.body
        assert OTHER.encode() not in got.body
        return
    assert upstream.last.header("authorization") == "Bearer sk-operators"
    assert KEY.encode() not in upstream.last.head + upstream.last.body
    assert upstream.last.header("x-api-key") is None


def test_no_key_at_all(keys: str) -> None:
    got = ask(keys, body=chat())
    assert (got.status, got.error["code"]) == (401, "invalid_api_key")
    assert "Authorization: Bearer" in got.error["message"]


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("gpt-4o", 200, None),
        ("gpt-4o-2024-08-06", 200, None),
        ("bot", 200, None),
        ("o3", 403, "model_not_allowed"),
        ("GPT-4o", 404, "model_not_found"),
        ("gpt-9", 404, "model_not_found"),
        ("", 404, "model_not_found"),
    ],
)
def test_models_of_a_team(keys: str, upstream: RawUpstream, model: str, status: int, code: str | None) -> None:
    before = len(upstream.arrived)
    got = ask(keys, body=chat(model=model), headers=[JSON, ("api-key", KEY)])
    assert got.status == status
    assert len(upstream.arrived) == before + (status == 200)
    if code is not None:
        assert (got.error["code"], got.error["param"]) == (code, "model")
        return
    assert got.header("x-compaction-policy") == "careful"
    named = json.loads(upstream.last.body)["model"]
    assert named == ("gpt-4o-mini" if model == "bot" else model)


ADVISOR = {"type": "advisor_20260301", "name": "advisor", "model": "o3"}
GATEWAY = {"type": "openrouter:advisor", "parameters": {"model": "o3"}}
TWICE = '{"type": "advisor_20260301", "name": "advisor", "model": "gpt-4o", "model": "o3"}'
DEFINED: dict[str, Callable[[str], str]] = {
    "an addition": lambda tool: f'{{"type": "tool_addition", "tool": {tool}}}',
    "an addition by value": lambda tool: (
        f'{{"type": "tool_addition", "tool": {{"type": "tool_definition", "definition": {tool}}}}}'
    ),
    "changes": lambda tool: f'{{"type": "compaction", "tool_changes": [{{"type": "tool_addition", "tool": {tool}}}]}}',
    "a list": lambda tool: f'{{"type": "additional_tools", "tools": [{tool}]}}',
    "another spelling": lambda tool: f'{{"type": "x", "More-Tools": {{"a": [{tool}]}}}}',
}
PLACED: dict[str, Callable[[str], str]] = {
    "a message": lambda part: f'[{{"role": "system", "content": [{part}]}}]',
    "an item": lambda part: f"[{part}]",
    "a result": lambda part: (
        f'[{{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": "t", "content": [{part}]}}]}}]'
    ),
    "deep inside": lambda part: f'[{{"role": "user", "content": [{{"type": "x", "y": {{"z": [[{part}]]}}}}]}}]',
    "no list": lambda part: part,
}
LIMITED = {"/v1/messages": "messages", "/v1/responses": "input", CHAT: "messages"}


@pytest.mark.parametrize(("form", "place", "path"), combined(3, DEFINED, PLACED, LIMITED))
def test_models_of_a_team_hold_for_tools_in_the_conversation(
    keys: str, upstream: RawUpstream, form: str, place: str, path: str
) -> None:
    headers = [JSON, ("authorization", f"Bearer {KEY}")]
    for tool in (json.dumps(ADVISOR), json.dumps(GATEWAY), TWICE, json.dumps(ADVISOR).replace("model", "mod\\u0065l")):
        units = PLACED[place](DEFINED[form](tool))
        before = len(upstream.arrived)
        refused = ask(keys, path, f'{{"model": "gpt-4o", "{LIMITED[path]}": {units}}}'.encode(), headers)
        assert (refused.status, len(upstream.arrived)) == (403, before), tool
        assert "'o3'" in refused.body.decode()
        allowed = units.replace("o3", "gpt-4o-mini")
        assert ask(keys, path, f'{{"model": "gpt-4o", "{LIMITED[path]}": {allowed}}}'.encode(), headers).status == 200


@pytest.mark.parametrize("path", LIMITED)
def test_a_conversation_may_name_models_that_it_does_not_choose(keys: str, path: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "agent", "input": {"type": "x", "model": "o3", "tools": [ADVISOR]}}
    function = {"name": "agent", "arguments": {"model": "o3", "tools": [{"type": "x", "model": "o3"}]}}
    units = [
        {
            "role": "assistant",
            "type": "message",
            "model": "o3-2026",
            "content": [{"type": "text", "text": "model: o3"}],
        },
        {"role": "assistant", "content": [call], "tool_calls": [{"type": "function", "function": function}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": '{"model": "o3"}'}]},
    ]
    body = json.dumps({"model": "gpt-4o", LIMITED[path]: units}).encode()
    assert ask(keys, path, body, [JSON, ("authorization", f"Bearer {KEY}")]).status == 200


def test_another_name_for_a_model_changes_nothing_else(keys: str, upstream: RawUpstream) -> None:
    body = b'{"x" : 1.10,"model":"bot", "messages" :[ {"role":"user","content":"\\u00e9\\/"} ],"y":[1e400, 2 ]}'
    assert ask(keys, body=body, headers=[JSON, ("api-key", KEY)]).status == 200
    arrived = upstream.last.body
    assert json.loads(arrived) == {**json.loads(body), "model": "gpt-4o-mini"}
    for kept in (b"1.10", b'{"role":"user","content":"\\u00e9\\/"}', b"[1e400, 2 ]"):
        assert kept in arrived


def test_a_team_without_a_list_may_use_every_routed_model(keys: str) -> None:
    for model, status in (("o3", 200), ("gpt-4o", 200), ("gpt-9", 404)):
        assert ask(keys, body=chat(model=model), headers=[JSON, ("api-key", "sk-ops")]).status == status


def test_open_mode_takes_everybody_with_their_own_key(open_to_all: str, upstream: RawUpstream) -> None:
    got = ask(open_to_all, body=chat(model="o3"), headers=[JSON, ("authorization", "Bearer sk-anybody")])
    assert (got.status, got.header("x-compaction-policy")) == (200, "default")
    assert upstream.last.header("authorization") == "Bearer sk-anybody"
    assert ask(open_to_all, body=chat(model="o3")).status == 200
    assert upstream.last.header("authorization") is None


def test_open_mode_knows_teams_too(open_to_all: str, upstream: RawUpstream) -> None:
    headers = [JSON, ("authorization", f"Bearer {KEY}")]
    got = ask(open_to_all, body=chat(model="gpt-4o"), headers=headers)
    assert (got.status, got.header("x-compaction-policy")) == (200, "careful")
    assert upstream.last.header("authorization") == f"Bearer {KEY}"
    assert ask(open_to_all, body=chat(model="o3"), headers=headers).status == 403
