"""Sessions whose user changes the model again and again, between providers that are strict about their own rules."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.scripted import proxied
from tests.kit.strict_providers import MODELS, Providers
from tests.kit.three_apis import PATHS

REQUESTS = 60
SCHEMA = {"type": "object", "properties": {"call": {"type": "string"}}}
PROFILE = {"context_window": 200_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
SPEAKS = {"openai": ["chat", "responses"]}

ORDERS = {
    "native": {
        "chat": ("kimi", "openai", "mistral", "gemini", "kimi", "openai"),
        "responses": ("openai", "kimi", "openai", "gemini", "openai", "mistral"),
        "messages": ("claude", "kimi", "claude", "gemini", "claude", "mistral"),
    },
    "translated": {
        "responses": ("kimi", "gemini", "router", "mistral", "kimi", "gemini"),
        "messages": ("kimi", "openai", "gemini", "router", "mistral", "kimi"),
    },
}


class Client:
    """Sends back all that it gets. ``history`` has its messages or items."""

    def __init__(self, caller: httpx.Client, api: str) -> None:
        self._caller = caller
        self._api = api
        self._tasks = 0
        self._works = False
        self.history: list[Any] = []

    def go_on(self, model: str, *, stream: bool) -> None:
        """Send the next request, and add the answer and the results of its calls."""
        if not self._works:
            self._tasks += 1
            self.history.append({"role": "user", "content": f"Do part {self._tasks}."})
        responses = self._api == "responses"
        fields = {"input" if responses else "messages": self.history}
        fields["max_output_tokens" if responses else "max_tokens"] = 500
        body = {"model": model, "stream": stream, "tools": [self._tool()], **fields}
        answer = self._caller.post(PATHS[self._api], json=body)
        assert answer.status_code == 200, (len(self.history), answer.text)
        made = _joined(self._api, answer.text) if stream else answer.json()
        parts = made["output"] if responses else made["content"] if self._api == "messages" else made["choices"]
        self._works = self._add(parts)

    def _tool(self) -> dict[str, Any]:
        if self._api == "messages":
            return {"name": "run", "input_schema": SCHEMA}
        function = {"name": "run", "parameters": SCHEMA}
        return {"type": "function", "function": function} if self._api == "chat" else {"type": "function", **function}

    def _add(self, parts: list[Any]) -> bool:
        """Add an answer and its results. Return whether it has calls."""
        if self._api == "chat":
            message = parts[0]["message"]
            self.history.append(message)
            results = [{"role": "tool", "tool_call_id": one["id"]} for one in message.get("tool_calls") or ()]
        elif self._api == "responses":
            self.history += parts
            calls = [one for one in parts if one["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": one["call_id"]} for one in calls]
        else:
            self.history.append({"role": "assistant", "content": parts})
            uses = [one for one in parts if one["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": one["id"]} for one in uses]
        results = [{**one, "output" if self._api == "responses" else "content": "1"} for one in results]
        self.history += [{"role": "user", "content": results}] if self._api == "messages" and results else results
        return bool(results)


def _joined(api: str, text: str) -> dict[str, Any]:
    """Return the answer that the events of a stream make."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if api == "responses":
        response: dict[str, Any] = events[-1]["response"]
        return response
    if api == "chat":
        message: dict[str, Any] = {}
        for delta in (one["choices"][0]["delta"] for one in events if one["choices"]):
            message |= delta
        return {"choices": [{"message": message}]}
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    blocks: list[dict[str, Any]] = []
    for one in events:
        if one["type"] == "content_block_start":
            blocks.append(one["content_block"])
        for name, value in one.get("delta", {}).items() if one["type"] == "content_block_delta" else ():
            field = "input" if name == "partial_json" else name
            if field != "type":
                blocks[-1][field] = (blocks[-1][field] or "") + value
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return {"content": blocks}


@contextmanager
def entrance(providers: Providers, folder: Path) -> Iterator[httpx.Client]:
    """Return a client of a proxy in front of all providers."""
    with serve(providers.app) as behind:
        upstreams: dict[str, Any] = {
            name: {"base_url": f"{behind}/{name}/v1", "api_key": "k", "speaks": SPEAKS.get(name, ["chat"])}
            for name in MODELS
        }
        upstreams["mistral"]["provider"] = "mistral"
        upstreams["claude"] = {"base_url": f"{behind}/claude/v1", "api_key": "k", "provider": "anthropic"}
        models = [{"match": model, "upstream": name, "profile": PROFILE} for name, model in MODELS.items()]
        headers = {"authorization": "Bearer k"}
        with (
            proxied({"upstreams": upstreams, "models": models}, folder) as url,
            httpx.Client(base_url=url, trust_env=False, timeout=60, headers=headers) as caller,
        ):
            yield caller


OFTEN = [("native", "chat"), ("native", "messages"), ("translated", "responses")]
"""Each lane and each API. The others run with ``--full``."""
EVERY = [(lane, api) for lane, orders in ORDERS.items() for api in orders]


@pytest.mark.parametrize(
    ("lane", "api"), [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full) for case in EVERY]
)
def test_no_request_is_refused_and_each_server_gets_back_what_it_attached(lane: str, api: str, tmp_path: Path) -> None:
    providers = Providers(lenient=api == "chat")
    with entrance(providers, tmp_path) as caller:
        client, order = Client(caller, api), ORDERS[lane][api]
        for number in range(REQUESTS):
            client.go_on(MODELS[order[number * len(order) // REQUESTS]], stream=number % 2 == 1)
    learned = [(name, re.sub(r"\d+", "", words)) for name, words in providers.refused]
    assert len(learned) == len({*learned}), "a server's rule is learned once"
    assert all(providers.returned[name] > 10 for name in order), providers.returned


@pytest.mark.parametrize("stream", [False, True])
def test_references_to_translated_items_reach_openai_as_items(stream: bool, tmp_path: Path) -> None:
    providers = Providers(lenient=False)
    with entrance(providers, tmp_path) as caller:
        client = Client(caller, "responses")
        own = []
        for number in range(6):
            client.go_on(MODELS["kimi" if number < 3 else "openai"], stream=stream)
            own += [one for one in client.history if "_proxy" in str(one.get("id")) and "item" not in one["type"]]
            client.history = [
                {"type": "item_reference", "id": one["id"]} if one in own else one for one in client.history
            ]
        assert {one["type"] for one in own} == {"reasoning", "function_call", "message"}
    assert providers.refused == []
    assert providers.returned["openai"] == 3
