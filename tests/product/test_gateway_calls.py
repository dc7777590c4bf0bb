"""Calls of gateways to ``/v1/compress``, written down after their sources, and the answer as these sources read it.

LiteLLM 1.108.7: ``litellm/proxy/guardrails/guardrail_hooks/headroom/headroom.py``.
agentgateway: ``crates/agentgateway/src/llm/policy/webhook.rs`` of its pull request #3119 (commit c29a4dab). Release
1.4.1 lacks it. It replaced the policy ``contextCompression`` of #2472, which also compared ids of calls and results.
Portkey: ``integrations/guardrails/headroom.mdx`` of Portkey-AI/docs-core (commit 175196f6). Its code isn't public.
Kong: ``app/_how-tos/operator/operator-konnect-ai-gateway-headroom.md`` and
``app/_ai_gateway_policies/ai-prompt-compressor/index.md`` of Kong/developer.konghq.com (commits 80461ed0 and 049128de).
Its code isn't public.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve

KEY, PLAIN = "sk-gateway", "sk-plain"
MODEL = "gpt-4o"
WINDOW = 32_000
LINES = "\n".join(f"src/módulo_{n}.py:{n}: value = compute({n})" for n in range(120))

Rows = list[dict[str, Any]]


def chat(turns: int) -> Rows:
    rows: Rows = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Find the values."}]
    for n in range(turns):
        call = {"id": f"call_{n}", "type": "function", "function": {"name": "grep", "arguments": f'{{"n":{n}}}'}}
        rows.append({"role": "assistant", "content": None, "tool_calls": [call]})
        rows.append({"role": "tool", "tool_call_id": f"call_{n}", "content": f"run {n}\n{LINES}"})
    return rows


def blocks(turns: int) -> Rows:
    marked = {"type": "text", "text": "Find the values.", "cache_control": {"type": "ephemeral"}}
    rows: Rows = [{"role": "user", "content": [marked]}]
    for n in range(turns):
        use = {"type": "tool_use", "id": f"toolu_{n}", "name": "grep", "input": {"n": n}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"run {n}\n{LINES}"}
        rows += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return rows


APIS = {"chat": chat, "messages": blocks}


def litellm_rows(rows: Rows) -> Rows:
    """``_protected_indices`` withholds rows of the system and the assistant, the last user's, and the last exchange."""
    asked = max(index for index, row in enumerate(rows) if row["role"] == "user")
    held = {index for index, row in enumerate(rows) if row["role"] in ("system", "assistant")} | {asked, len(rows) - 1}
    return [row for index, row in enumerate(rows) if index not in held]


def agentgateway_rows(rows: Rows) -> Rows:
    """``RequestMessage`` omits fields that are null, and writes the named ones first."""
    names = ("role", "name", "content", "tool_call_id", "tool_calls")
    return [
        {name: row[name] for name in sorted(row, key=lambda name: (*names, name).index(name)) if row[name] is not None}
        for row in rows
    ]


def by_litellm(sent: Rows, answer: httpx.Response) -> Rows:
    """``_call_compress``, ``_restore_content_shapes``, and ``_read_ccr_hashes``; roles must fit to restore contents."""
    assert answer.status_code == 200
    body = answer.json()
    made: Rows = [row for row in body["messages"] if isinstance(row, dict)]
    assert len(made) == len(sent)
    assert [row["role"] for row in made] == [row["role"] for row in sent]
    assert [row.get("tool_call_id") for row in made] == [row.get("tool_call_id") for row in sent]
    assert all(isinstance(row["content"], str) for row in made)
    assert all(re.fullmatch("[a-f0-9]{12,24}", hash.lower()) for hash in body["ccr_hashes"])
    numbers = [body[name] for name in ("tokens_before", "tokens_after", "tokens_saved", "compression_ratio")]
    assert all(isinstance(number, int | float) for number in numbers)
    return made


def ids(rows: Rows) -> Counter[tuple[str, str]]:
    """The ids of calls and of results, like ``pairing_violations`` finds them."""
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        found.update(("call", call["id"]) for call in row.get("tool_calls", ()))
        found.update(("result", row[name]) for name in ("tool_call_id",) if name in row)
        for part in row["content"] if isinstance(row.get("content"), list) else ():
            if part["type"] in ("tool_use", "tool_result"):
                found["call" if part["type"] == "tool_use" else "result", part.get("id") or part["tool_use_id"]] += 1
    return found


def by_agentgateway(sent: Rows, answer: httpx.Response) -> Rows:
    """``RawMessagesResponse`` ignores the status and takes a body without messages as "no change"; then
    ``validate_replacement``, and ``set_raw_messages``, which parses each row again."""
    made = answer.json().get("messages")
    if made is None:
        return sent
    assert made
    for row in made:
        assert isinstance(row, dict)
        assert isinstance(row["role"], str)
        content = row.get("content")
        assert content is None or isinstance(content, str) or all(isinstance(part["type"], str) for part in content)
        assert isinstance(row.get("tool_calls", []), list)
    assert ids(made) == ids(sent)
    return list(made)


def by_portkey(sent: Rows, answer: httpx.Response) -> Rows:
    """The check shows these fields in ``hook_results``. The ratio is that of the tokens that remain."""
    assert answer.status_code == 200
    body = answer.json()
    assert body["tokens_saved"] == body["tokens_before"] - body["tokens_after"]
    assert body["compression_ratio"] == pytest.approx(body["tokens_after"] / body["tokens_before"], abs=1e-4)
    assert all(isinstance(step, str) for step in body["transforms_applied"])
    return list(body["messages"])


def by_kong(sent: Rows, answer: httpx.Response) -> Rows:
    """The policy replaces the messages, and records the hashes. Each other status than 200 is a failure."""
    assert answer.status_code == 200
    assert isinstance(answer.json()["ccr_hashes"], list)
    return list(answer.json()["messages"])


class Call(NamedTuple):
    """A gateway's request: its headers, its body besides the rows and the model, and the reader of its answer."""

    headers: dict[str, str]
    body: dict[str, Any]
    rows: Callable[[Rows], Rows]
    read: Callable[[Rows, httpx.Response], Rows]


BEARER = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
# ``forwardHeaderMatches`` chooses headers of the client.
CACHE = {"anthropic-version": "2023-06-01", "anthropic-beta": "prompt-caching-2024-07-31", "cache-control": "no-cache"}
OPTIONS = {
    "compress_user_messages": False,
    "compress_system_messages": False,
    "target_ratio": 0.5,
    "protect_recent": 4,
    "protect_analysis_context": True,
}
CALLS = {
    "litellm": Call(BEARER, {}, litellm_rows, by_litellm),
    "agentgateway": Call(BEARER | CACHE, {}, agentgateway_rows, by_agentgateway),
    "portkey": Call(BEARER, {"config": OPTIONS, "token_budget": WINDOW}, list, by_portkey),
    "kong": Call(BEARER | {"x-headroom-proxy-token": KEY}, {"config": {"session_id": "s-1"}}, list, by_kong),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("gateways")
    configuration = {
        "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-upstream"}},
        "models": [{"match": MODEL, "upstream": "main", "profile": {"context_window": WINDOW}}],
        "auth": {"mode": "keys"},
        "policies": {"plain": {"archive": None}},
        "teams": {
            "a": {"keys": [f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]},
            "b": {"keys": [f"sha256:{hashlib.sha256(PLAIN.encode()).hexdigest()}"], "policy": "plain"},
        },
        "store": {"url": f"sqlite:///{folder / 'store.db'}"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(configuration))
    with serve(Proxy(load(path, {}))) as address:
        yield address


def compress(url: str, call: Call, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as http:
        return http.post(f"{url}/v1/compress", json=body, headers=call.headers)


CASES = [(name, api) for name in CALLS for api in APIS if (name, api) != ("litellm", "messages")]
"""LiteLLM translates conversations of ``/v1/messages`` to chat completions before its guardrail runs."""


@pytest.mark.parametrize(("name", "api"), CASES)
def test_a_gateway_takes_the_answer(url: str, name: str, api: str) -> None:
    call = CALLS[name]
    rows = call.rows(APIS[api](30))
    answer = compress(url, call, {"messages": rows, "model": MODEL, **call.body})
    made = call.read(rows, answer)
    assert made != rows
    assert [row["role"] for row in made] == [row["role"] for row in rows]
    assert ids(made) == ids(rows)
    assert [set(row) for row in made] == [set(row) for row in rows]
    changed = [index for index, (old, new) in enumerate(zip(rows, made, strict=True)) if old != new]
    assert all("run" in str(rows[index]["content"]) for index in changed)
    assert answer.json()["tokens_after"] < WINDOW < answer.json()["tokens_before"]


@pytest.mark.parametrize(("name", "api"), CASES)
def test_a_gateway_takes_an_answer_without_changes(url: str, name: str, api: str) -> None:
    call = CALLS[name]
    rows = call.rows(APIS[api](2))
    assert call.read(rows, compress(url, call, {"messages": rows, "model": MODEL, **call.body})) == rows


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fault", ["key", "model"])
def test_a_gateway_does_not_take_an_error_as_messages(url: str, name: str, fault: str) -> None:
    """agentgateway omits an unknown model, and reads an error's body like an answer's."""
    call = CALLS[name]
    rows = call.rows(chat(30))
    body = {"messages": rows, **call.body}
    if fault == "key":
        call = call._replace(headers=call.headers | {"authorization": "Bearer sk-wrong"})
        body["model"] = MODEL
    answer = compress(url, call, body)
    assert answer.status_code == (401 if fault == "key" else 400)
    assert "messages" not in answer.json()
    assert by_agentgateway(rows, answer) == rows


def test_calls_of_a_session_keep_the_sent_beginning(url: str) -> None:
    """Kong sends the whole conversation each turn. A prompt begins the next one while that fits."""
    call, long = CALLS["kong"], chat(40)
    sent = [long[:end] for end in range(62, len(long) + 1, 2)]
    made = [call.read(rows, compress(url, call, {"messages": rows, "model": MODEL, **call.body})) for rows in sent]
    kept = [new[: len(old)] == old for old, new in itertools.pairwise(made)]
    assert len(kept) == 10
    assert kept.count(False) <= 1
