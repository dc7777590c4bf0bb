"""A proxy between callers who write raw bytes and an upstream that keeps every byte it was sent."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.messages import Message, assistant, call, result, system, user, words
from tests.kit.upstream import Received, Reply, RequestCounter, Responder, StandIn

WINDOW = 8_000
RESERVE = 512
"""Tokens reserved for a response in that window if the request names no output."""
BUDGET = WINDOW - RESERVE
LEVEL = int(0.85 * BUDGET)
"""Tokens from which the default policy compacts."""
ROOM_TO_GROW = 0.65
"""A checkpoint brings a conversation to this part of the trigger's level or below."""

WIDE = "wide"
"""A model with a window of 200,000 tokens."""
UNLISTED = "nobody-lists-this-one"
"""A model whose window nobody knows."""

TAG = "<conversation_summary>"
SUMMARY = "Goal: SUMMARY-TEXT, the build is to be green again. State: the work goes on."
KEYS = 16
"""Callers for each policy, each with a tenant of its own."""

counter = RequestCounter()


@dataclass(frozen=True)
class Exchange:
    """A request of the client, the upstream's requests, and the response."""

    raw: bytes
    request: Received
    headers: Mapping[str, str]
    answer: bytes

    @property
    def verdict(self) -> str:
        return self.headers["x-compaction"]

    @property
    def input(self) -> list[bytes]:
        return messages_of(self.raw)

    @property
    def messages(self) -> list[bytes]:
        """The messages that reached the upstream, as they were spelled."""
        return messages_of(self.request.raw)

    @property
    def untouched(self) -> bool:
        return self.request.raw == self.raw

    @property
    def place(self) -> int:
        """The index of the summary message, of which there must be exactly one."""
        (place,) = [index for index, raw in enumerate(self.messages) if is_summary(raw)]
        return place

    @property
    def summary(self) -> str:
        content: str = json.loads(self.messages[self.place])["content"]
        return content

    @property
    def after(self) -> list[bytes]:
        return self.messages[self.place + 1 :]

    @property
    def tail(self) -> list[bytes]:
        """The longest end of the conversation that went out byte by byte, the summary message and before excluded."""
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(reversed(self.after), reversed(self.input), strict=False)
        )
        return [raw for raw, _ in same][::-1]

    @property
    def dropped(self) -> list[bytes]:
        """The messages between those before the summary message and the tail, as the caller sent them."""
        return self.input[self.place : len(self.input) - len(self.tail)]


class Caller:
    """A client with a key, and so with a tenant, of its own."""

    def __init__(self, front: Front, key: str, model: str) -> None:
        self._front = front
        self._key = key
        self._model = model

    def post(self, raw: bytes, **headers: str) -> Exchange:
        known = len(self.sent)
        answer = self._front.http.post(
            f"{self._front.url}/v1/chat/completions",
            content=raw,
            headers={
                "authorization": f"Bearer {self._key}",
                "content-type": "application/json",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            },
        )
        sent = self.sent
        assert len(sent) == known + 1, f"{len(sent) - known} requests reached the upstream: {answer.text[:500]}"
        return Exchange(raw, sent[-1], answer.headers, answer.content)

    def ask(self, messages: Sequence[Message | bytes], **fields: Any) -> Exchange:
        """Send a conversation that must be well answered; each message is spelled as Python or the test spells it."""
        exchange = self.post(body(messages, model=self._model, **fields))
        assert exchange.request.faults == []
        assert exchange.request.status == 200
        return exchange

    @property
    def sent(self) -> list[Received]:
        return [r for r in self._front.upstream.conversations if r.headers["authorization"] == f"Bearer {self._key}"]

    @property
    def asked(self) -> list[Received]:
        """The requests for a summary that were made for this caller."""
        return [r for r in self._front.upstream.summaries if r.headers["authorization"] == f"Bearer {self._key}"]


class Front:
    """A running proxy, its upstream, and callers for each of its policies."""

    def __init__(self, url: str, upstream: StandIn, http: httpx.Client) -> None:
        self.url = url
        self.upstream = upstream
        self.http = http
        self._handed_out: dict[str, int] = {}

    def caller(self, policy: str = "default", model: str = "m") -> Caller:
        number = self._handed_out.get(policy, 0)
        assert number < KEYS, "more callers than keys"
        self._handed_out[policy] = number + 1
        return Caller(self, key(policy, number), model)


def key(policy: str, number: int) -> str:
    return f"sk-{policy}-{number}"


@contextlib.contextmanager
def opened(
    folder: Path,
    policies: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    summariser: Responder | None = None,
    ratio: float = 1.0,
) -> Iterator[Front]:
    """A proxy with these policies and an empty store; summaries are always the same text unless a test says otherwise.

    The upstream takes anything: what the proxy makes of a window is to be seen, not what a refusal makes of it. It
    reports ``ratio`` times as many tokens as there are.
    """
    upstream = StandIn(window=2_000_000, ratio=ratio, summariser=summariser or (lambda _: Reply(content=SUMMARY)))
    named: dict[str, Any] = {"default": {}, **(policies or {})}
    with serve(upstream.app) as url:
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [
                {"match": WIDE, "upstream": "main", "profile": profile(200_000)},
                {"match": UNLISTED, "upstream": "main", "profile": {"tokenizer": "o200k_base"}},
                {"match": "*", "upstream": "main", "profile": profile(WINDOW)},
            ],
            "policies": {name: dict(policy) for name, policy in named.items()},
            "teams": {name: {"policy": name, "keys": [digest(key(name, n)) for n in range(KEYS)]} for name in named},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        with serve(Proxy(load(file, {}))) as entrance, httpx.Client(trust_env=False, timeout=60) as http:
            yield Front(entrance, upstream, http)


def profile(window: int) -> dict[str, Any]:
    return {"context_window": window, "max_output_tokens": 4_000, "tokenizer": "o200k_base", "images": "gpt-4o"}


def digest(secret: str) -> str:
    return f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"


def body(messages: Sequence[Message | bytes], **fields: Any) -> bytes:
    """A request's body. Fields that are bytes, and messages that are, are put in as they are spelled."""
    spelt = [raw if isinstance(raw, bytes) else json.dumps(raw).encode() for raw in messages]
    fields = {"model": "m", **fields, "messages": b"[ " + b" ,\n".join(spelt) + b" ]"}
    values = {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in fields.items()}
    return b"{ " + b" , ".join(b'"' + name.encode() + b'" :' + value for name, value in values.items()) + b"\n}"


def fields_of(raw: bytes) -> dict[str, bytes]:
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in fields.items()}


def messages_of(raw: bytes) -> list[bytes]:
    return [bytes(message) for message in msgspec.json.decode(fields_of(raw)["messages"], type=list[msgspec.Raw])]


def decoded(raws: Sequence[bytes]) -> list[Message]:
    return [json.loads(raw) for raw in raws]


def is_summary(raw: bytes) -> bool:
    content = json.loads(raw).get("content")
    return isinstance(content, str) and content.startswith(TAG)


def spelled(messages: Sequence[Message]) -> list[bytes]:
    """The messages, each in another one of the spellings that JSON allows."""
    return [_SPELLINGS[number % len(_SPELLINGS)](message) for number, message in enumerate(messages)]


_SPELLINGS = (
    lambda message: json.dumps(message, separators=(",", ":")).encode(),
    lambda message: json.dumps(message, ensure_ascii=False, indent=1).encode(),
    lambda message: json.dumps(dict(reversed(message.items()))).encode(),
    lambda message: json.dumps(message, separators=(" ,\t", "  : ")).encode().replace(b"/", b"\\/"),
    lambda message: json.dumps(message).encode().replace(b"word", b"\\u0077ord"),
)


def chat(pairs: int, size: int, *, seed: str = "") -> list[Message]:
    """A system message, then questions and answers of about ``size`` tokens each."""
    messages = [system()]
    for number in range(pairs):
        messages.append(user(f"Question {number}: " + words(size, f"q{seed}{number}x")))
        messages.append(assistant(f"Answer {number}: " + words(size, f"a{seed}{number}x")))
    return messages


def agent(turns: int, size: int = 120, *, fresh_ids: bool = True, seed: str = "") -> list[Message]:
    """Return an agent's conversation.

    An exchange has one to three calls, with results in any order. After every sixth come an answer and a new request.
    """
    messages = [system("You are a careful engineer. Use the tools."), user(f"Task 0{seed}: repair the build.")]
    for turn in range(1, turns + 1):
        ids = [f"call_{seed}{turn if fresh_ids else ''}_{n}" for n in range(1 + turn % 3)]
        calls = [call(name, path=f"src/turn_{turn}_{n}.py", turn=turn, place=n) for n, name in enumerate(ids)]
        messages.append(assistant(f"I look at part {turn}." if turn % 2 else None, *calls))
        results = [
            result(name, f"turn {turn} place {n}: " + words(size, f"r{turn}x{n}y")) for n, name in enumerate(ids)
        ]
        messages += results[:: -1 if turn % 2 else 1]
        if turn % 6 == 0:
            messages.append(assistant(f"Done with part {turn}. " + words(30, f"d{turn}x")))
            messages.append(user(f"Task {turn}{seed}: now the next part, ticket PART-{1000 + turn}."))
    return messages


def requests(messages: Sequence[Message]) -> list[int]:
    """Return the places at which an application sends the conversation: after user messages and last results."""
    ends = []
    for index, message in enumerate(messages):
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if message["role"] == "user" or (message["role"] == "tool" and following != "tool"):
            ends.append(index + 1)
    return ends


def tokens(messages: Sequence[Message]) -> int:
    """The size of a request with these messages and nothing else."""
    return counter.request({"messages": list(messages)}).total


def padded(messages: Sequence[Message], size: int) -> list[Message]:
    """The conversation and a last question, so long that the whole request is exactly ``size`` tokens."""
    wanted = size - tokens([*messages, user("")])
    assert wanted > 0, "the conversation is too long already"
    whole = [*messages, user(" a" * wanted)]
    assert tokens(whole) == size
    return whole


def parted(messages: Sequence[Message]) -> list[str]:
    """Every result that has no call right before it, and every call without a result right behind it."""
    found = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] in waiting:
                waiting.remove(message["tool_call_id"])
            else:
                found.append(f"result without a call: {message['tool_call_id']}")
            continue
        found += [f"call without a result: {name}" for name in waiting]
        waiting = [c["id"] for c in message.get("tool_calls") or []]
    return found + [f"call without a result: {name}" for name in waiting]
