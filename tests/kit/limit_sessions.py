"""Long conversations that are judged turn by turn: many upstreams behind one proxy, each with a limit of its own."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import yaml
from starlette.applications import Starlette
from starlette.routing import Mount

from proxy.config import load
from proxy.limits.learned import LearnedLimits
from proxy.pipeline.runtime import Runtime
from proxy.server.app import create_app
from proxy.server.loopback import serve
from tests.kit.overflow_wordings import WORDINGS, Worded
from tests.kit.scripted import client, words
from tests.kit.upstream import Reply, StandIn, ToolCall, gather

BELIEVED = 8_000
"""Tokens. The window of every model in the proxy's configuration."""

LATE_KEY = "sk-late"
"""The key of the team that compacts only if a budget is full."""

CALL_EVERY = 5
"""The model calls a tool before it answers one in this number of questions."""

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a shelf.",
        "parameters": {"type": "object", "properties": {"shelf": {"type": "integer"}}},
    },
}


@dataclass(slots=True)
class Fleet:
    """A proxy, and the upstreams behind it by the name of their model; ``now`` is by which what was learned ages."""

    url: str
    service: Runtime
    upstreams: dict[str, StandIn]
    now: list[float]


@contextlib.contextmanager
def fleet(upstreams: dict[str, StandIn], folder: Path, wordings: dict[str, str] | None = None) -> Iterator[Fleet]:
    """A proxy before these upstreams, which refuse in the wordings of those names, or else in OpenAI's."""
    worded = {name: (wordings or {}).get(name, "openai") for name in upstreams}
    mounts = [
        Mount(f"/{number}", app=Worded(upstream.app, WORDINGS[worded[name]]))
        for number, (name, upstream) in enumerate(upstreams.items())
    ]
    with serve(Starlette(routes=mounts)) as url:
        profile = {"context_window": BELIEVED, "max_output_tokens": BELIEVED // 8, "tokenizer": "o200k_base"}
        settings = {
            "store": {"url": f"sqlite:///{folder}/store.db"},
            "upstreams": {f"u{n}": {"base_url": f"{url}/{n}/v1"} for n in range(len(upstreams))},
            "models": [{"match": name, "upstream": f"u{n}", "profile": profile} for n, name in enumerate(upstreams)],
            "policies": {
                # There is nothing here for the cheap stages, and without them a turn costs a tenth less.
                "default": {"duplicates": None, "truncate_args": None, "evict_results": None, "media": None},
                "late": {"extends": "default", "trigger": {"fraction": 1.0}, "reserve_output": {"tokens": 64}},
            },
            "teams": {"late": {"keys": ["sha256:" + hashlib.sha256(LATE_KEY.encode()).hexdigest()], "policy": "late"}},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(settings))
        app = create_app(load(file, {}))
        now = [1_000_000.0]
        app.service.limits.learned = LearnedLimits(app.service.stores.store, lambda: now[0])
        with serve(app) as entrance:
            yield Fleet(entrance, app.service, upstreams, now)


def said(number: int, size: int) -> str:
    """The words of a turn, ``size`` tokens and a few more."""
    return f"Number {number} is about " + words(size, "the garden behind the house was planted in autumn ")


def answers(body: dict[str, Any]) -> Reply:
    """The model's part: it repeats the first words of what it was asked, or looks at the shelf before."""
    last = body["messages"][-1]
    number = int(last["content"].split()[1])
    if last["role"] == "user" and number % CALL_EVERY == 0:
        return Reply(tool_calls=(ToolCall(f"call_{number}", "look", f'{{"shelf": {number}}}'),))
    return Reply(content=f"To {number}: all is well.")


def summarises(body: dict[str, Any]) -> Reply:
    """Return a summary that fits small windows."""
    return Reply(content="The shelves were looked at one by one, and all of them are well.")


@dataclass(slots=True)
class Conversation:
    """One caller's conversation with a model, which goes on until something is wrong with an answer.

    ``refused`` counts what the upstream refused, summary requests included; ``summaries`` those that it answered.
    ``largest`` is the largest prompt that it answered, in its own tokens, since that was last set to 0.
    """

    caller: openai.OpenAI
    model: str
    upstream: StandIn
    streams: Sequence[bool] = (False, True)
    """Which turns are streamed; again from the beginning after the last one."""
    messages: list[Any] = field(default_factory=list)
    turns: int = 0
    refused: int = 0
    retries: int = 0
    summaries: int = 0
    largest: int = 0

    def go_on(self, turns: int, size: int = 80) -> None:
        """Send turns with about ``size`` tokens of new text in each. Fails on an unexpected response.

        Raises ``openai.APIError`` for an error that the client receives.
        """
        for _ in range(turns):
            self._turn(size)

    def grows_beyond(self, limit: int, turns: int, size: int) -> bool:
        """Return whether the upstream accepts a prompt of more than ``limit`` tokens within this number of turns."""
        self.largest = 0
        for _ in range(turns):
            self.go_on(1, size)
            if self.largest > limit:
                return True
        return False

    def _turn(self, size: int) -> None:
        number = self.turns
        calls = self.messages[-1].get("tool_calls", ()) if self.messages else ()
        text = said(number, size)
        if calls:
            self.messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text})
        else:
            self.messages.append({"role": "user", "content": text})
        message = self.ask(self.messages, stream=self.streams[number % len(self.streams)])
        self.turns += 1
        if not calls and number % CALL_EVERY == 0:
            assert message["tool_calls"][0]["id"] == f"call_{number}"
        else:
            assert message["content"].startswith(f"To {number}:"), "it was this turn that was answered"
        self.messages.append(message)

    def ask(self, messages: list[Any], *, stream: bool = False) -> dict[str, Any]:
        """The answer to these messages, once it was seen what the upstream was sent for it."""
        # The client transforms ``messages``, which takes time. It sends ``extra_body`` unchanged.
        extra = {"messages": messages, "tools": [TOOL]}
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        create = self.caller.chat.completions.with_raw_response.create
        raw: Any = create(model=self.model, messages=[], extra_body=extra, **options)
        parsed = raw.parse()
        message = gather(parsed) if stream else parsed.choices[0].message.model_dump(exclude_none=True)
        self._judge(messages, int(raw.headers["x-compaction-retries"]))
        return message

    def _judge(self, messages: list[Any], retries: int) -> None:
        """Check the upstream's requests for one request of the client, and clear them."""
        upstream = self.upstream
        # A summary that is made in the background may not be answered yet: that one is looked at next time.
        arrived = [received for received in upstream.requests if received.status]
        upstream.requests[:] = [received for received in upstream.requests if not received.status]
        asked = next(message["content"] for message in reversed(messages) if message["role"] == "user").encode()
        newest = messages[-1]["content"].encode()
        sent = [received for received in arrived if not received.summary]
        assert [received.status for received in sent] == [400] * retries + [200]
        for received in arrived:
            assert received.faults == []
            if received.status != 200:
                self.refused += 1
                continue
            assert received.tokens <= upstream.window
            self.summaries += received.summary
            self.largest = max(self.largest, received.tokens)
        assert asked in sent[-1].raw, "the user's last words arrive as they are"
        assert newest in sent[-1].raw
        self.retries += retries


@contextlib.contextmanager
def conversation(
    fleet: Fleet, model: str, key: str = "sk-client", streams: Sequence[bool] = (False, True)
) -> Iterator[Conversation]:
    with client(fleet.url, key) as caller:
        yield Conversation(caller, model, fleet.upstreams[model], streams)
