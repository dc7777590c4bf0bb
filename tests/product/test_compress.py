"""``/v1/compress`` and ``/v1/retrieve`` of a running proxy, as gateways call them."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve

RESULT = "\n".join(f"src/module_{n}.py:{n}: value = compute({n})" for n in range(120))


def chat(turns: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent."}]
    rows.append({"role": "user", "content": "Find where values are computed."})
    for n in range(turns):
        call = {"id": f"call_{n}", "type": "function", "function": {"name": "grep", "arguments": f'{{"n":{n}}}'}}
        rows.append({"role": "assistant", "content": None, "tool_calls": [call]})
        rows.append({"role": "tool", "tool_call_id": f"call_{n}", "content": f"run {n}\n{RESULT}"})
    return rows


def blocks(turns: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"role": "user", "content": "Find where values are computed."}]
    for n in range(turns):
        use = {"type": "tool_use", "id": f"toolu_{n}", "name": "grep", "input": {"n": n}}
        answer = {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"run {n}\n{RESULT}"}
        rows += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
    return rows


def items(turns: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "Find where values are computed."}]
    for n in range(turns):
        call = {"type": "function_call", "call_id": f"call_{n}", "name": "grep", "arguments": f'{{"n":{n}}}'}
        answer = {"type": "function_call_output", "call_id": f"call_{n}", "output": f"run {n}\n{RESULT}"}
        rows += [call, answer]
    return rows


APIS = {"chat": chat, "messages": blocks, "responses": items}


class Gateway:
    """A client of the paths, with the key of a team."""

    def __init__(self, url: str, key: str = "sk-a") -> None:
        self.url, self.headers = url, {"authorization": f"Bearer {key}"}

    def compress(self, **body: Any) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=30) as http:
            return http.post(f"{self.url}/v1/compress", json=body, headers=self.headers)

    def retrieve(self, hash: str, query: str = "", method: str = "GET") -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=30) as http:
            address = f"{self.url}/v1/retrieve/{hash}"
            if method == "POST":
                return http.post(address, json={"query": query}, headers=self.headers)
            return http.get(address, params={"query": query} if query else {}, headers=self.headers)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("compress")
    keys = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in {"a": "sk-a", "b": "sk-b"}.items()}
    configuration = {
        "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-upstream"}},
        "models": [
            {"match": "small", "upstream": "main", "profile": {"context_window": 32_000}},
            {"match": "*", "upstream": "main"},
        ],
        "auth": {"mode": "keys"},
        "teams": {
            "a": {"keys": [f"sha256:{keys['a']}"]},
            "b": {"keys": [f"sha256:{keys['b']}"], "policy": "early"},
        },
        "policies": {"default": {}, "early": {"trigger": {"tokens": 20_000}}},
        "server": {"prefixes": ["/gateway/*"]},
        "store": {"url": f"sqlite:///{folder / 'store.db'}"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(configuration))
    with serve(Proxy(load(path, {}))) as address:
        yield address


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("mode", ["rows", "ccr", "lossy_inline"])
def test_number_order_and_roles_stay(url: str, api: str, mode: str) -> None:
    sent = APIS[api](24)
    first, again = (Gateway(url).compress(model="small", messages=sent, config={"mode": mode}) for _ in range(2))
    result = first.json()
    assert first.status_code == 200, result
    assert again.content == first.content
    assert result["tokens_after"] < 32_000 < result["tokens_before"]
    assert result["tokens_saved"] == result["tokens_before"] - result["tokens_after"]
    assert result["transforms_applied"]
    made = result["messages"]
    assert [(row.get("role"), row.get("type")) for row in made] == [(row.get("role"), row.get("type")) for row in sent]
    assert made[-1] == sent[-1]
    assert first.headers["x-compaction"] == "compacted"
    assert bool(result["ccr_hashes"]) == (mode == "ccr")
    for hash in result["ccr_hashes"]:
        assert hash in str(made)
        original = Gateway(url).retrieve(hash).json()
        assert original["hash"] == hash
        assert RESULT in original["original_content"]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("model", ["small", "alias"])
@pytest.mark.parametrize("task", [True, False])
def test_results_without_their_calls_are_shortened(url: str, api: str, model: str, *, task: bool) -> None:
    """LiteLLM withholds the assistant's messages. The window of its aliases is unknown."""
    rows = APIS[api](24)
    called = [row.get("role") == "assistant" or row.get("type") == "function_call" for row in rows]
    sent = [row for row, call in zip(rows, called, strict=True) if not call]
    sent = sent if task else sent[-24:]
    result = Gateway(url, "sk-b").compress(model=model, messages=sent, api=api).json()
    assert [dict(row, content="", output="") for row in result["messages"]] == [
        dict(row, content="", output="") for row in sent
    ]
    assert result["messages"][-1] == sent[-1]
    assert result["tokens_after"] < 20_000 < result["tokens_before"]


def test_small_conversations_stay(url: str) -> None:
    sent = chat(1)
    result = Gateway(url).compress(model="small", messages=sent).json()
    assert result["messages"] == sent
    assert result["tokens_before"] == result["tokens_after"] > 1000
    assert (result["transforms_applied"], result["ccr_hashes"], result["compression_ratio"]) == ([], [], 1.0)


def test_frozen_messages_stay(url: str) -> None:
    sent = chat(24)
    result = Gateway(url).compress(model="small", messages=sent, config={"frozen_message_count": 10}).json()
    assert result["messages"][:10] == sent[:10]
    assert result["messages"] != sent
    assert all(hash in str(result["messages"]) for hash in result["ccr_hashes"])


def test_full_puts_a_digest_in_the_place_of_messages(url: str) -> None:
    """The upstream can't be reached, so a digest takes the summary's place."""
    sent = chat(40)
    result = Gateway(url).compress(model="small", messages=sent, config={"mode": "full"}).json()
    assert len(result["messages"]) < len(sent)
    assert "summary" in result["transforms_applied"]
    assert result["tokens_after"] < 32_000
    [entry, *_] = result["ccr_hashes"]
    assert "run 0" in Gateway(url).retrieve(entry).json()["original_content"]


def test_a_query_selects_passages(url: str) -> None:
    sent = chat(24)
    [hash, *_] = Gateway(url).compress(model="small", messages=sent).json()["ccr_hashes"]
    for method in ("GET", "POST"):
        found = Gateway(url).retrieve(hash, "module_110.py", method).json()["original_content"]
        assert "module_110.py" in found
        assert len(found) < len(RESULT)


def test_the_hash_may_be_in_the_body(url: str) -> None:
    [hash, *_] = Gateway(url).compress(model="small", messages=chat(24)).json()["ccr_hashes"]
    with httpx.Client(trust_env=False, timeout=30, headers={"authorization": "Bearer sk-a"}) as http:
        assert RESULT in http.post(f"{url}/v1/retrieve", json={"hash": hash}).json()["original_content"]
        wrong = http.post(f"{url}/v1/retrieve", json={})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "hash")


def test_another_team_gets_404(url: str) -> None:
    sent = [row | {"content": f"only of {row['content']}"} for row in chat(24)]
    [hash, *_] = Gateway(url).compress(model="small", messages=sent).json()["ccr_hashes"]
    assert Gateway(url, "sk-b").retrieve(hash).status_code == 404
    assert Gateway(url).retrieve("f" * 20).status_code == 404
    assert Gateway(url, "sk-c").retrieve(hash).status_code == 401


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"model": "small"}),
        ("messages", {"model": "small", "messages": "text"}),
        ("messages", {"model": "small", "messages": [1]}),
        ("model", {"messages": []}),
        ("model", {"messages": [], "model": 1}),
        ("api", {"messages": [], "model": "small", "api": "soap"}),
        ("system", {"messages": [], "model": "small", "api": "chat", "system": "Be brief."}),
        ("config", {"messages": [], "model": "small", "config": []}),
        ("config.mode", {"messages": [], "model": "small", "config": {"mode": "zip"}}),
        ("config.frozen_message_count", {"messages": [], "model": "small", "config": {"frozen_message_count": -1}}),
        (
            "config.frozen_message_count",
            {"messages": [], "model": "small", "config": {"mode": "full", "frozen_message_count": 1}},
        ),
    ],
)
def test_a_wrong_field_is_named(url: str, field: str, body: dict[str, Any]) -> None:
    answer = Gateway(url).compress(**body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_body_of_too_many_values_is_refused_before_it_takes_memory(url: str) -> None:
    answer = Gateway(url).compress(model="small", messages=[{"role": "user", "content": [0] * 400_000}])
    assert answer.status_code == 400
    assert "values" in answer.json()["error"]["message"]


def test_other_methods_are_refused(url: str) -> None:
    headers = {"authorization": "Bearer sk-a"}
    with httpx.Client(trust_env=False, timeout=30) as http:
        assert http.get(f"{url}/v1/compress", headers=headers).status_code == 405
        assert http.delete(f"{url}/v1/retrieve/{'f' * 20}", headers=headers).status_code == 405
        assert http.post(f"{url}/v1/compress", content=b"[", headers=headers).status_code == 400


def test_a_record_tells_of_the_compaction(url: str) -> None:
    answer = Gateway(url).compress(model="small", messages=chat(24))
    address = f"{url}/compaction/requests/{answer.headers['x-compaction-id']}"
    with httpx.Client(trust_env=False, timeout=30, headers={"authorization": "Bearer sk-a"}) as http:
        for _ in range(100):
            record = http.get(address).json()
            if "verdict" in record:
                break
            time.sleep(0.05)
    assert record["verdict"] == "compacted"
    assert record["tokens"]["before"] == answer.json()["tokens_before"]
    assert record["model"] == "small"


@pytest.mark.parametrize("prefix", ["", "/gateway/team-a", "/gateway/b%2Fc"])
def test_prefixes_lead_to_the_same_endpoints(url: str, prefix: str) -> None:
    answer = Gateway(f"{url}{prefix}").compress(model="small", messages=chat(24))
    assert answer.status_code == 200
    hash = answer.json()["ccr_hashes"][0]
    assert Gateway(f"{url}{prefix}").retrieve(hash).json()["hash"] == hash


def test_other_prefixes_lead_nowhere(url: str) -> None:
    assert Gateway(f"{url}/elsewhere/team-a").compress(model="small", messages=[]).status_code == 404
    assert Gateway(f"{url}/gateway").compress(model="small", messages=[]).status_code == 404


def test_the_list_of_models_states_their_limits(url: str) -> None:
    with httpx.Client(trust_env=False, timeout=30, headers={"authorization": "Bearer sk-a"}) as http:
        [entry] = http.get(f"{url}/v1/models").json()["data"]
    assert entry["id"] == "small"
    sizes = {name: entry[name] for name in ("context_window", "context_length", "max_model_len", "max_input_tokens")}
    assert set(sizes.values()) == {32_000}
