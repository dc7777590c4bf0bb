"""Test that the ledger agrees with the test's own sum to the last digit, on every lane, whenever the client leaves.

Gateways state caches and reasoning in other fields, prompts are longer than a price step, and answers come in gzip, or
in pieces that end anywhere.
"""

import asyncio
import random
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.endpoints import reply
from proxy.server.loopback import serve
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import key_hash, proxied
from tests.kit.three_apis import PATHS, Answer, Call, event, request, tools
from tests.kit.waiting import until

LANES = {
    **{f"{api} relayed": (api, api, api) for api in PATHS},
    "messages over chat": ("messages", "chat", "chat"),
    "responses over chat": ("responses", "chat", "chat"),
    "chat over responses": ("chat", "responses", "responses"),
    "messages over responses": ("messages", "responses", "responses"),
    "chat by LiteLLM": ("chat", "messages", "messages"),
    "responses by LiteLLM": ("responses", "messages", "messages"),
    "messages by LiteLLM": ("messages", "messages", "provider"),
}
"""The client's API, the upstream's, and the upstream's name."""

KEY = {"authorization": "Bearer cp-team", "anthropic-version": "2023-06-01"}
SPEND = {"usd": 1_000_000, "per": "month"}
PICO = 10**12

# In US dollars for a million tokens.
RATES: Mapping[str, Mapping[str, int]] = {
    "m": {"input": 4, "output": 20, "read": 1, "write": 5, "hour": 8, "reasoning": 24},
    "m flex": {"input": 2, "output": 10, "read": 1, "write": 5, "hour": 8, "reasoning": 10},
    "m priority": {"input": 8, "output": 40, "read": 2, "write": 5, "hour": 8, "reasoning": 40},
    "m above": {"input": 7, "output": 30, "read": 2, "write": 9, "hour": 12, "reasoning": 36},
    "big": {"input": 40, "output": 200, "read": 3, "write": 50, "hour": 80, "reasoning": 200},
}
SEARCH = 10**10
FORMS = {"LiteLLM": True, "Moonshot": False, "DeepSeek": False, "Gemini": True, "apart": True}
"""Forms of usage in chat completions besides OpenAI's, and whether they state what was written to a cache."""

END = {"chat": "[DONE]", "responses": "response.completed", "messages": "message_stop"}
FACTORS = {"us": 1.5, "fast": 6.0}
_FIELDS = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "read": "cache_read_input_token_cost",
    "write": "cache_creation_input_token_cost",
    "hour": "cache_creation_input_token_cost_above_1hr",
    "reasoning": "output_cost_per_reasoning_token",
}
STEP = 150_000


def prices() -> dict[str, dict[str, Any]]:
    """Return the prices as a configuration states them."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, rates in RATES.items():
        model, _, tier = name.partition(" ")
        step = tier == "above"
        for kind in rates:
            if step or kind not in ("write", "hour", "reasoning") or not tier:
                end = f"_above_{STEP // 1_000}k_tokens" if step else f"_{tier}" if tier else ""
                found[model][_FIELDS[kind] + end] = rates[kind] / 10**6
    found["m"] |= {"search_context_cost_per_query": {"search_context_size_medium": 0.01}}
    found["m"] |= {"provider_specific_entry": FACTORS}
    found["big"] |= {"provider_specific_entry": FACTORS}
    return dict(found)


@dataclass(frozen=True)
class Tokens:
    """One call of a model. The prompt has fresh tokens, and those that a cache had or gets."""

    fresh: int = 0
    read: int = 0
    write: int = 0
    hour: int = 0
    text: int = 0
    reasoning: int = 0

    def cost(self, rates: Mapping[str, int]) -> int:
        return 10**6 * (
            self.fresh * rates["input"]
            + self.read * rates["read"]
            + self.write * rates["write"]
            + self.hour * rates["hour"]
            + self.text * rates["output"]
            + self.reasoning * rates["reasoning"]
        )

    @property
    def prompt(self) -> int:
        return self.fresh + self.read + self.write + self.hour

    def openai(self, chat: bool, form: str = "OpenAI") -> dict[str, Any]:
        """Return the usage as OpenAI reports it, or another server of its API."""
        prompt, output = self.prompt, self.text + self.reasoning
        if form != "OpenAI":
            stated = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            written = {"cache_creation_tokens": self.write}
            details = {"prompt_tokens_details": {"cached_tokens": self.read, **written}}
            return stated | {
                "LiteLLM": details
                | {"cache_read_input_tokens": self.read, "cache_creation_input_tokens": self.write},
                "Moonshot": {"cached_tokens": self.read},
                "DeepSeek": {"prompt_cache_hit_tokens": self.read},
                "Gemini": details | {"completion_tokens": max(1, output // 3)},
                "apart": details | {"prompt_tokens": self.fresh},
            }[form]  # fmt: skip
        names = ("prompt", "completion") if chat else ("input", "output")
        return {
            f"{names[0]}_tokens": prompt,
            f"{names[0]}_tokens_details": {"cached_tokens": self.read},
            f"{names[1]}_tokens": output,
            f"{names[1]}_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": prompt + output,
        }

    def anthropic(self) -> dict[str, Any]:
        """Return the usage as Anthropic reports it."""
        return {
            "input_tokens": self.fresh,
            "cache_read_input_tokens": self.read,
            "cache_creation_input_tokens": self.write + self.hour,
            "cache_creation": {"ephemeral_5m_input_tokens": self.write, "ephemeral_1h_input_tokens": self.hour},
            "output_tokens": self.text,
        }


@dataclass(frozen=True)
class Case:
    """A request and its answer. The client leaves when it has read ``leaves``. ``others`` are calls of other models."""

    lane: str
    stream: bool
    tokens: Tokens
    tier: str | None = None
    region: str | None = None
    searches: int = 0
    others: tuple[tuple[str, str, Tokens], ...] = ()
    leaves: str | None = None
    calls: bool = False
    form: str = "OpenAI"
    words: int = 20
    packed: bool = False
    pieces: int = 0  # the bytes of each piece of the answer, if they aren't its events

    @property
    def cost(self) -> int:
        """Return the own sum, in parts of ``PICO``."""
        everywhere = FACTORS.get(self.region or "", 1)
        factors = FACTORS.get(self.tier or "", 1) * everywhere
        cost = round(self.tokens.cost(_rates("m", self.tier, self.tokens)) * factors)
        for _, model, tokens in self.others:
            cost += round(tokens.cost(_rates(model, None, tokens)) * (factors if model == "m" else everywhere))
        return cost + self.searches * SEARCH

    def answer(self) -> tuple[list[bytes], bytes]:
        """Return the events of the upstream's stream, or its body."""
        _, wire, _ = LANES[self.lane]
        call = (Call("own_1", "run", '{"path": "x"}'),) if self.calls else ()
        made = Answer(f"FIRST {'word ' * self.words}. {'more ' * self.words}LAST", call)
        usage = self.tokens.openai(wire == "chat", self.form)
        more: dict[str, Any] = {"usage": usage, "model": "m"}
        if wire == "messages":
            more["usage"] = self._anthropic()
        elif self.tier is not None:
            more["service_tier"] = self.tier
        searches = [
            {"type": "web_search_call", "id": f"ws_{one}", "status": "completed"} for one in range(self.searches)
        ]
        if wire == "responses":
            more["output"] = [*searches, *made.items()]
        events, whole = Answer(made.text, call, more=more).parts(wire, stream=self.stream)
        if self.stream and wire == "responses":
            done = [event({"type": "response.web_search_call.completed", "item_id": one["id"]}) for one in searches]
            events[1:1] = done
        if self.stream and wire == "chat" and self.tier is not None:
            events = [
                one.replace(b'data: {"id"', b'data: {"service_tier": "%b", "id"' % self.tier.encode()) for one in events
            ]
        return events, whole

    def _anthropic(self) -> dict[str, Any]:
        usage = self.tokens.anthropic()
        usage |= {"service_tier": "standard", "inference_geo": self.region or "global"}
        if self.tier == "fast":
            usage["speed"] = "fast"
        if self.searches:
            usage["server_tool_use"] = {"web_search_requests": self.searches}
        if self.others:
            usage["iterations"] = [{"type": "message", **self.tokens.anthropic()}]
        for kind, model, tokens in self.others:
            named = {} if model == "m" else {"model": model}
            usage["iterations"].append({"type": kind, **named, **tokens.anthropic()})
            if kind == "fallback_message":  # the outer figures include it
                for name, count in tokens.anthropic().items():
                    usage[name] = usage[name] + count if isinstance(count, int) else usage[name]
        return usage


def _rates(model: str, tier: str | None, tokens: Tokens) -> Mapping[str, int]:
    above = model == "m" and tokens.prompt > STEP
    return RATES.get(f"{model} {'above' if above else tier}", RATES[model])


def cases(count: int) -> Iterator[Case]:
    draw = random.Random(31)
    for number in range(count):
        lane = [*LANES][number % len(LANES)]
        api, wire, _ = LANES[lane]
        anthropic = wire == "messages"
        amount = lambda: draw.choice((0, 0, draw.randrange(1, 50_000)))  # noqa: E731
        form = draw.choice(("OpenAI", *FORMS)) if wire == "chat" else "OpenAI"
        tokens = Tokens(
            draw.choice((60_000, 60_000, 300_000)) - draw.randrange(60_000),
            amount(),
            amount() if anthropic or FORMS.get(form) else 0,
            amount() if anthropic else 0,
            draw.randrange(3_000, 12_000),
            0 if anthropic or form != "OpenAI" else amount(),
        )
        others = []
        if anthropic and draw.random() < 0.4:
            for _ in range(draw.randrange(1, 3)):
                kinds = [("compaction", "m"), ("advisor_message", "big"), ("fallback_message", "big")]
                # LiteLLM adds up all calls, as if the outer figures excluded the one that answers.
                kind, model = draw.choice(kinds[: 3 if not others and api == "messages" else 2])
                others.append(
                    (kind, model, Tokens(draw.randrange(1, 90_000), amount(), 0, 0, draw.randrange(1, 5_000)))
                )
        stream = draw.random() < 0.7
        yield Case(
            lane,
            stream,
            tokens,
            draw.choice((None, "fast") if anthropic else (None, "flex", "priority")),
            draw.choice((None, "us")) if anthropic else None,
            draw.choice((0, 0, 3)) if wire != "chat" else 0,
            tuple(others),
            draw.choice((None, "FIRST", "LAST", END[api]) if stream else (None, "LAST")),
            draw.random() < 0.3,
            form,
            draw.choice((20, 20, 20, 1_000)),
            draw.random() < 0.2,
            draw.choice((0, 0, 50, 1_000)),
        )


class Provider:
    """An upstream of three APIs, which sends the usage of a stream a while after its text."""

    def __init__(self, scripts: list[Case]) -> None:
        self.scripts = scripts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw = await Request(scope, receive).body()
        number = int(raw.split(b"case <")[1].split(b">")[0])
        case = self.scripts[number]
        events, whole = case.answer()
        headers = {"content-type": "text/event-stream" if events else "application/json"}
        packed = case.packed and b"gzip" in dict(scope["headers"]).get(b"accept-encoding", b"")
        if packed:
            headers["content-encoding"] = "gzip"
        body = self._paced([b"".join(events or [whole])] if case.pieces else events or [whole], case.pieces, packed)
        await StreamingResponse(body, headers=headers)(scope, receive, send)

    async def _paced(self, events: list[bytes], pieces: int, packed: bool) -> AsyncIterator[bytes]:
        """Yield an answer with pauses. Its last bytes come a while after the others."""
        packer = zlib.compressobj(wbits=31)
        for one in events:
            paused = 0
            for start in range(0, len(one), pieces or len(one)):
                piece = one[start : start + (pieces or len(one))]
                yield packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) if packed else piece
                seen = one[: start + len(piece)]
                if seen.count(b"FIRST") + seen.count(b"LAST") > paused:
                    paused = seen.count(b"FIRST") + seen.count(b"LAST")
                    await asyncio.sleep(0.1)
        if packed:
            yield packer.flush()
        await asyncio.sleep(0.05)


def send(client: httpx.Client, number: int, case: Case) -> str:
    """Send the request, and return the id of its record."""
    api, _, name = LANES[case.lane]
    listed = {"tools": tools(api)} if case.calls else {}
    messages = [{"role": "user", "content": f"case <{number}>"}]
    raw = request(api, name, messages, stream=case.stream, **listed)
    headers = {"content-type": "application/json"}
    with client.stream("POST", PATHS[api], content=raw, headers=headers) as response:
        read = ""
        for text in response.iter_text():
            read += text
            if case.leaves is not None and case.leaves in read:
                break
        assert response.status_code == 200, (case.lane, read)
        return response.headers["x-compaction-id"]


def settings(url: str, store: Path) -> dict[str, Any]:
    openai = {"provider": "openai", "base_url": f"{url}/v1", "api_key": "sk", "ask_limits": False}
    claude = {"provider": "anthropic", "base_url": url, "api_key": "sk"}
    upstreams = {
        "chat": openai | {"speaks": ["chat"]},
        "responses": openai | {"speaks": ["responses"]},
        "messages": claude,
        "provider": claude | {"lane": "translate"},
    }
    profile = {"context_window": 1_000_000, "tokenizer": "o200k_base"}
    return {
        "upstreams": upstreams,
        "models": [{"match": name, "upstream": name, "model": "m", "profile": profile} for name in upstreams],
        "prices": prices(),
        "auth": {"mode": "keys"},
        "teams": {"team": {"keys": [key_hash("cp-team")], "limits": {"spend": SPEND}}},
        "store": {"url": f"sqlite:///{store}"},
    }


def test_the_ledger_agrees_with_the_own_sum(tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "LINGER_SECONDS", 20.0)
    scripts = [*cases(600 if full else 40)]
    store = tmp_path / "compaction.db"
    with (
        serve(Provider(scripts)) as upstream,
        proxied(settings(upstream, store), tmp_path) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60, headers=KEY) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        ids = [*pool.map(send, [client] * len(scripts), range(len(scripts)), scripts)]
        assert until(lambda: len(records_in(store)) == len(scripts))
    records = {record.id: record for record in records_in(store)}
    wrong = [
        (number, case, record.cost and record.cost.sent / PICO, case.cost / PICO, record.usage)
        for number, (case, record) in enumerate(zip(scripts, map(records.__getitem__, ids), strict=True))
        if record.usage is None or record.usage.estimated or record.cost is None or record.cost.sent != case.cost
    ]
    assert not wrong, f"{len(wrong)} of {len(scripts)}: " + "\n".join(map(str, wrong[:12]))
    assert sum(sums.cost for _, sums in ledger_in(store)) == sum(case.cost for case in scripts)
