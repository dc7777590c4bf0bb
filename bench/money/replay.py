"""Replay a conversation through the proxy, and without it."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.money.upstream import COUNTER, CachingUpstream, Call
from bench.quality.conversations import Conversation, Message
from bench.quality.outcome import Outcome, Prompts
from proxy.config import load
from proxy.server.app import create_app
from proxy.server.loopback import serve

TURN_SECONDS = 15.0
"""Time that a model and its tools take for a turn."""

PAUSES = {"none": (0.0,), "working": (20.0, 40.0, 60.0, 120.0, 900.0), "casual": (60.0, 400.0, 1_800.0)}
"""Seconds that a person takes before a message, by habit. Each value is equally frequent."""

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Call this to {name.replace('_', ' ')}. " + "It returns text, and an error as text. " * 20,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for name in ("read", "write", "edit", "bash", "grep", "find", "list_files", "fetch_page")
]
TOOLS = json.dumps(_TOOLS).encode()


@dataclass(frozen=True)
class Replayed:
    """The requests that the upstream got, and the prompts of the conversation."""

    calls: Sequence[Call]
    outcome: Outcome

    def of(self, *kinds: str) -> list[Call]:
        """Return the calls of these kinds."""
        return [call for call in self.calls if call.kind in kinds]


def repeated(conversation: Conversation, times: int) -> Conversation:
    """Return a conversation that goes on with more rounds of its messages. Each round's texts differ."""
    messages = [
        message if not number else _marked(message, number)
        for number in range(times)
        for message in conversation.messages
        if not number or message["role"] != "system"
    ]
    return Conversation(f"{conversation.name} × {times}", messages, conversation.facts)


def _marked(message: Message, number: int) -> Message:
    made: Message = json.loads(json.dumps(message))
    if isinstance(made.get("content"), str):
        made["content"] = f"[round {number + 1}] {made['content']}"
    for call in made.get("tool_calls") or ():
        call["id"] = f"{call['id']}_{number}"
    if "tool_call_id" in made:
        made["tool_call_id"] = f"{made['tool_call_id']}_{number}"
    return made


def tokens_of(conversation: Conversation) -> int:
    """Return the tokens of all messages."""
    return sum(map(COUNTER.message, conversation.messages))


def _turns(conversation: Conversation, habit: str, upstream: CachingUpstream) -> Iterator[list[bytes]]:
    """Yield the messages of each request. Move the clock before it, and set the size of its answer."""
    randomly = random.Random(conversation.name)
    raws = [json.dumps(message).encode() for message in conversation.messages]
    for end in conversation.requests():
        pause = randomly.choice(PAUSES[habit]) if conversation.messages[end - 1]["role"] == "user" else 0.0
        upstream.now += TURN_SECONDS + pause
        following = conversation.messages[end : end + 1]
        upstream.output = COUNTER.message(following[0]) if following else 0
        yield raws[:end]


def bare(conversation: Conversation, habit: str) -> Replayed:
    """Return the requests without the proxy."""
    upstream = CachingUpstream()
    for messages in _turns(conversation, habit, upstream):
        upstream.answer(TOOLS, messages)
    return Replayed(upstream.calls, Outcome())


def through_proxy(conversation: Conversation, window: int, policy: Mapping[str, Any], habit: str) -> Replayed:
    """Return the requests with the proxy. Summaries in the background finish before the next request."""
    upstream, prompts = CachingUpstream(), Prompts()
    with _proxy(upstream, window, policy) as (url, app), httpx.Client(trust_env=False, timeout=120) as client:
        for messages in _turns(conversation, habit, upstream):
            body = b'{"model":"m","tools":' + TOOLS + b',"messages":[' + b",".join(messages) + b"]}"
            headers = {"content-type": "application/json"}
            client.post(f"{url}/v1/chat/completions", content=body, headers=headers).raise_for_status()
            prompts.add(upstream.prompts.pop())
            upstream.prompts.clear()
            summaries = app.service.stores.summaries
            while summaries._background or summaries._flights.tasks:
                time.sleep(0.001)
    return Replayed(upstream.calls, prompts.outcome)


@contextmanager
def _proxy(upstream: CachingUpstream, window: int, policy: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    profile = {"context_window": window, "max_output_tokens": min(32_000, window // 4), "tokenizer": "o200k_base"}
    with tempfile.TemporaryDirectory(prefix="money-") as folder, serve(upstream.app) as url:
        file = Path(folder, "config.yaml")
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "none"}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
            "policies": {"default": dict(policy)},
        }
        file.write_text(yaml.safe_dump(settings))
        app = create_app(load(file, {}))
        with serve(app) as entrance:
            yield entrance, app
