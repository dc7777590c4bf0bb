"""No request that fits is ever compacted because of something that was learned, and none is sent twice.

The proxy's own path runs in process, without HTTP. It parses the body, compacts it if necessary, and sends it to an
upstream that is a function. Its answer is judged as the one that a client is about to get, and learned from afterwards.
``FITTING_SESSIONS=10000`` runs as many sessions as that.
"""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.access.authenticator import Caller
from proxy.config import load
from proxy.config.policy import Policy
from proxy.dialects.apis import CHAT
from proxy.dialects.chat.request import parse
from proxy.limits.learned import CAUTION, LearnedLimit, LearnedLimits
from proxy.limits.profiles import Profile
from proxy.pipeline.answering import Answering
from proxy.pipeline.billing import Bill
from proxy.pipeline.exchange import Exchange, TimeLeft
from proxy.pipeline.runtime import Runtime
from proxy.server.app import Proxy
from proxy.telemetry.record import RequestRecord
from proxy.upstream.transport import Answer, Outgoing, Transport

WINDOWS = (8_000, 16_384, 32_000, 128_000)
PART = 0.6
"""Part of its window that a session fills at most, by the upstream's count and by ours: below every trigger."""

VOCABULARY = tuple(
    f"{first}{last}" for first in ("gar", "den", "hou", "se", "aut", "umn") for last in ("ing", "er", "ly")
)
REASONS = ("stop", "eos", "length", "max_tokens", "incomplete", "abort", "error", "end_turn", "unknown", None)
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgAGWjR9awAAAABJRU5ErkJggg=="
)


@dataclass(frozen=True, slots=True)
class Habits:
    """The habits of an upstream, and of the client that uses it."""

    window: int
    ratio: float
    """Its tokens for each word of four characters."""
    reasoning: str
    keeps_tools: bool
    usage: str
    block: int
    """Tokens of a cache block."""
    emptied: float
    """Share of the turns whose output hidden reasoning uses up."""
    odd: float
    """Share of the turns with an odd finish reason."""
    documents: bool
    images: bool
    replaces_last: bool
    stream: bool
    step: int
    """Words of a message."""
    even: bool
    """Whether all messages have this size."""


def habits(random: random.Random) -> Habits:
    pick = random.choice
    return Habits(
        window=pick(WINDOWS),
        ratio=random.uniform(0.75, 1.4),
        reasoning=pick(("none", "reasoning_content", "reasoning", "<think>")),
        keeps_tools=pick((True, True, False)),
        usage=pick(
            ("whole", "whole", "whole", "missing", "no output", "zeros", "uncached", "cached named", "cached beside")
        ),
        block=pick((1, 16, 128, 1024)),
        emptied=pick((0.0, 0.1, 0.5)),
        odd=pick((0.0, 0.1, 0.5)),
        documents=random.random() < 0.1,
        images=random.random() < 0.1,
        replaces_last=random.random() < 0.2,
        stream=random.random() < 0.5,
        step=pick((20, 60, 150, 400)),
        even=random.random() < 0.5,
    )


@dataclass(slots=True)
class Upstream:
    """An upstream that refuses nothing; ``calls`` counts its requests."""

    habits: Habits
    random: random.Random
    calls: int = 0
    cached: int = 0

    def words(self, message: dict[str, Any]) -> int:
        role, content = message["role"], message.get("content") or ""
        if role == "tool" and not self.habits.keeps_tools:
            return 0
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        return len(content.rsplit("</think>", maxsplit=1)[-1].split()) + 4

    def size(self, body: dict[str, Any]) -> int:
        words = sum(map(self.words, body["messages"]))
        return int(words * self.habits.ratio) + 200 * len(body.get("documents", ()))

    def answer(self, body: dict[str, Any]) -> tuple[bytes, str]:
        self.calls += 1
        habits, pick = self.habits, self.random
        prompt = self.size(body)
        empty = pick.random() < habits.emptied
        asked = body.get("max_completion_tokens")
        reason = pick.choice(REASONS) if pick.random() < habits.odd else "length" if empty else "stop"
        output = (asked or pick.randrange(20, 5_000)) if empty else 7
        usage = self._usage(prompt, output)
        content = "" if empty else "All is well."
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
            whole = {"id": "c", "object": "chat.completion", "choices": [choice], **({"usage": usage} if usage else {})}
            return json.dumps(whole).encode(), "application/json"
        deltas: list[tuple[dict[str, str], str | None]] = [
            ({"role": "assistant"}, None),
            ({"content": content}, None),
            ({}, reason),
        ]
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": d, "finish_reason": why}]} for d, why in deltas
        ]
        if usage:
            events.append({"choices": [], "usage": usage})
        lines = [*(json.dumps(event) for event in events), "[DONE]"]
        return "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream"

    def _usage(self, prompt: int, output: int) -> dict[str, Any] | None:
        cached = min(self.cached, prompt) // self.habits.block * self.habits.block
        self.cached = prompt
        match self.habits.usage:
            case "missing":
                return None
            case "zeros":
                return {"prompt_tokens": 0, "completion_tokens": 0}
            case "no output":
                return {"prompt_tokens": prompt, "completion_tokens": 0}
            case "uncached":
                return {"prompt_tokens": prompt - cached, "completion_tokens": output}
            case "cached beside":
                details = {"prompt_tokens_details": {"cached_tokens": cached}}
                return {"prompt_tokens": prompt - cached, "completion_tokens": output, **details}
            case "cached named":
                details = {"prompt_tokens_details": {"cached_tokens": cached}}
                return {"prompt_tokens": prompt, "completion_tokens": output, **details}
        return {"prompt_tokens": prompt, "completion_tokens": output}


@dataclass(slots=True)
class Scripted:
    """The transport to an upstream."""

    upstream: Upstream

    async def send(self, request: Outgoing) -> Answer:
        return _answer(*self.upstream.answer(json.loads(request.body)))


@dataclass(slots=True)
class Figures:
    """The figures of many sessions: the failures, which must be none, and the number of tries."""

    sessions: int = 0
    requests: int = 0
    compacted: int = 0
    learned: int = 0
    extra_calls: int = 0
    faults: list[str] = field(default_factory=list)


class Sessions:
    """Runs sessions, one after another."""

    def __init__(self, service: Runtime) -> None:
        """``service`` is that of an app whose only route takes every model."""
        self._service = service
        self._answering = Answering(service)
        self.figures = Figures()

    async def run(self, seed: int) -> None:
        chosen = random.Random(seed)
        known = habits(chosen)
        upstream = Upstream(known, chosen)
        before = self.figures.compacted, self.figures.learned, self.figures.extra_calls
        messages: list[dict[str, Any]] = []
        model, sent = f"{known.window}-{seed}", 0
        for turn in range(chosen.randrange(6, 16)):
            messages += self._new(upstream, turn)
            last = [{"role": "user", "content": f"Go on with {turn}."}] if known.replaces_last else []
            body: dict[str, Any] = {"model": model, "messages": [*messages, *last], "stream": known.stream}
            if chosen.random() < 0.5:
                body["max_completion_tokens"] = chosen.choice((32, 200, 1_000))
            if known.documents:
                body["documents"] = ["some facts"] * chosen.randrange(1, 8)
            if not await self._request(body, upstream, known):
                break
            sent += 1
        self.figures.sessions += 1
        self.figures.extra_calls += upstream.calls - sent
        if before != (self.figures.compacted, self.figures.learned, self.figures.extra_calls):
            self.figures.faults.append(f"{seed}: {known}")

    def _new(self, upstream: Upstream, turn: int) -> list[dict[str, Any]]:
        chosen, known = upstream.random, upstream.habits

        def text() -> str:
            size = known.step if known.even else chosen.randrange(1, 2 * known.step)
            return " ".join(chosen.choices(VOCABULARY, k=size))

        asked: Any = text()
        if known.images and chosen.random() < 0.5:
            asked = [{"type": "text", "text": asked}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        added: list[dict[str, Any]] = []
        if turn:
            thoughts, said = text() + text() + text(), text()
            answer = {"role": "assistant", "content": said}
            if known.reasoning == "<think>":
                answer["content"] = f"<think>{thoughts}</think>{said}"
            elif known.reasoning != "none":
                answer[known.reasoning] = thoughts
            added.append(answer)
        if turn and chosen.random() < 0.4:
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            added[-1] |= {"tool_calls": [call]}
            return [*added, {"role": "tool", "tool_call_id": f"c{turn}", "content": text()}]
        return [*added, {"role": "user", "content": asked}]

    async def _request(self, body: dict[str, Any], upstream: Upstream, known: Habits) -> bool:
        """Send a request, unless it is too large for these sessions."""
        figures, raw = self.figures, json.dumps(body).encode()
        exchange = self._exchange(raw, known)
        counter = exchange.counter
        assert counter is not None
        size = await self._service.compactor.size(exchange.body, counter, exchange.caller.tenant)
        if max(size, upstream.size(body)) > PART * known.window:
            return False
        figures.requests += 1
        reply = await self._answering.through(cast("Transport", Scripted(upstream)), exchange)
        figures.compacted += reply.sent.outcome.messages is not None
        watch = self._answering.watch(exchange, reply)
        async for _ in reply.start.answer.body:
            pass
        watch.ended()
        await watch.learn()
        figures.learned += self._service.limits.learned.get(*exchange.place) is not None
        return True

    def _exchange(self, raw: bytes, known: Habits) -> Exchange:
        body, service = parse(raw), self._service
        configuration = service.configuration
        route = configuration.settings.route(body.model or "")
        assert route is not None
        profile = Profile("m", context_window=known.window, tokenizer="o200k_base")
        caller = Caller("key:t", None, Policy.build("default", {}), None, None)
        scope, counter = (
            {"type": "http", "headers": [], "query_string": b""},
            service.limits.measures.counter(profile, CHAT),
        )
        return Exchange(
            record=RequestRecord("", 0.0),
            memory=service.access.bodies.lease(),
            dialect=CHAT,
            configuration=configuration,
            scope=scope,
            via="",
            caller=caller,
            bill=Bill(),
            body=body,
            original=body,
            route=route,
            profile=profile,
            counter=counter,
            time=TimeLeft(1e12),
        )


def _answer(data: bytes, kind: str) -> Answer:
    async def body() -> AsyncIterator[bytes]:
        yield data

    async def close() -> None:
        return None

    return Answer(200, [("content-type", kind), ("content-length", str(len(data)))], body(), close)


SESSIONS = int(os.environ.get("FITTING_SESSIONS", "150"))


def test_requests_that_fit_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    profile = {"context_window": 8_000, "tokenizer": "o200k_base"}
    configured = {
        "store": {"url": "sqlite://"},
        "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1"}},
        "models": [{"match": "*", "upstream": "main", "profile": profile}],
    }
    file.write_text(yaml.safe_dump(configured))

    async def run() -> Figures:
        service = Proxy(load(file, {})).service
        sessions = Sessions(service)
        for seed in range(SESSIONS):
            await sessions.run(seed)
        await service.aclose()
        return sessions.figures

    figures = asyncio.run(run())
    print(figures)
    assert figures.faults == []
    assert (figures.compacted, figures.learned, figures.extra_calls) == (0, 0, 0)
    assert figures.requests > 3 * SESSIONS


UNSTATED = st.builds(
    LearnedLimit,
    st.none() | st.integers(256, 200_000),
    st.none() | st.integers(256, 200_000),
    source=st.sampled_from(("guess", "usage")),
)


@given(st.lists(st.integers(1, 200_000) | UNSTATED, max_size=20))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_limit_that_nobody_stated_is_never_below_what_was_answered_lately(events: list[int | LearnedLimit]) -> None:
    """Numbers are the sizes of requests that were answered."""
    known, largest = LearnedLimits(clock=lambda: 0.0), 0
    for event in events:
        if isinstance(event, int):
            largest = max(largest, event)
            known.answered("u", "m", "t", event)
            known.confirm("u", "m", "t", event, event, 1.0)
        else:
            known.learn("u", "m", "t", event)
        limit = known.get("u", "m", "t")
        for figure in (limit.input, limit.total) if limit is not None else ():
            assert figure is None or figure >= largest


@pytest.mark.parametrize("answered", [0, 2_000, 5_000])
def test_a_named_limit_is_contradicted_by_a_much_larger_answer(answered: int) -> None:
    known = LearnedLimits(clock=lambda: 0.0)
    known.answered("u", "m", "t", answered)
    told = LearnedLimit(total=int(2_000 * CAUTION), named=2_000)
    assert known.contradicts("u", "m", "t", told, 6_000) is (answered == 5_000)
    assert not known.contradicts("u", "m", "another tenant", told, 6_000)
