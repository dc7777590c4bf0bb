"""Test that the ledger's money equals sums computed by hand, through the proxy and over restarts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from proxy.records.model import SUMS
from tests.kit.messages import assistant, user, words
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import behind, chat
from tests.kit.upstream import is_summary_request, summarise

PRICES = {
    "gpt-5": {
        "input_cost_per_token": 0.000001,
        "output_cost_per_token": 0.00001,
        "cache_read_input_token_cost": 0.0000001,
        "cache_creation_input_token_cost": 0.00000125,
        "input_cost_per_token_above_10k_tokens": 0.000002,
        "output_cost_per_token_above_10k_tokens": 0.00002,
    }
}
EARLY = {"trigger": {"tokens": 6_000}, "keep": {"messages": 6}}
"""The policy compacts long before the window is full."""
SUMMARY_TOKENS = {"prompt_tokens": 7_001, "completion_tokens": 333}


class Priced:
    """Answers with the usages in a list: prompt, output, cache read, and cache write. Summaries have their own."""

    def __init__(self, usages: list[tuple[int, int, int, int]]) -> None:
        self.usages: Iterator[tuple[int, int, int, int]] = iter(usages)
        self.summaries = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await Request(scope, receive).body())
        usage: dict[str, Any]
        if is_summary_request(body):
            self.summaries += 1
            text, usage = summarise(body).content or "", SUMMARY_TOKENS
        else:
            prompt, output, read, written = next(self.usages)
            details = {"cached_tokens": read, "cache_write_tokens": written}
            text, usage = (
                "fine",
                {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details},
            )
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        answer = {"id": "c", "object": "chat.completion", "model": "gpt-5", "choices": [choice], "usage": usage}
        await JSONResponse(answer)(scope, receive, send)


def picodollars(prompt: int, output: int, read: int = 0, written: int = 0) -> int:
    """The price by hand: 1, 10, 0.1, and 1.25 dollars per million, twice the first two over 10,000 tokens."""
    factor = 2 if prompt > 10_000 else 1
    fresh = (prompt - read - written) * factor * 1_000_000
    return fresh + read * 100_000 + written * 1_250_000 + output * factor * 10_000_000


@pytest.fixture
def turns() -> list[list[Any]]:
    messages = chat(12, 400)
    grown = [*messages[:-1], user("Go on."), assistant(words(50, "x")), user("And now?")]
    return [messages[:3] + messages[-1:], messages, grown]


def test_the_ledger_equals_the_sums_by_hand_over_restarts(tmp_path: Path, turns: list[list[Any]]) -> None:
    usages = [(1_000, 20, 0, 0), (6_000, 30, 0, 500), (6_100, 40, 5_900, 0), (12_000, 5, 1_000, 0)]
    upstream = Priced(usages)
    store = tmp_path / "compaction.db"
    sections = {"store": {"url": f"sqlite:///{store}"}, "prices": PRICES, "policy": EARLY}
    for batch in (turns, turns[:1]):
        with behind(upstream, tmp_path, **sections) as url, httpx.Client(base_url=url, trust_env=False) as client:
            for messages in batch:
                answer = client.post("/v1/chat/completions", json={"model": "gpt-5", "messages": messages}, timeout=60)
                assert answer.status_code == 200
    records = records_in(store)
    rows = ledger_in(store)
    assert upstream.summaries >= 1
    total = {name: sum(getattr(sums, name) for _, sums in rows) for name in SUMS}
    assert total["requests"] == 4
    assert total["cost"] == sum(picodollars(*usage) for usage in usages)
    assert total["summary_cost"] == upstream.summaries * picodollars(7_001, 333)
    assert (total["input"], total["cache_read"], total["cache_write"]) == (25_100, 6_900, 500)
    assert (total["unpriced"], total["estimated"]) == (0, 0)
    assert total["as_received"] == sum(one.cost.as_received for one in records if one.kind == "request" and one.cost)
    compacted = next(one for one in reversed(records) if one.verdict == "compacted")
    assert compacted.cost is not None
    assert compacted.cost.sent == picodollars(6_000, 30, 0, 500)


def test_a_session_in_which_compaction_did_not_pay_shows_a_negative_saving(tmp_path: Path) -> None:
    store = tmp_path / "compaction.db"
    cached = {"input_cost_per_token": 0.000001, "cache_read_input_token_cost": 0.00000001}
    sections = {"store": {"url": f"sqlite:///{store}"}, "prices": {"gpt-*": cached}, "policy": EARLY}
    with behind(Priced([(6_000, 30, 100, 0)]), tmp_path, **sections) as url:
        body = {"model": "gpt-5", "messages": chat(12, 400)}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60).status_code == 200
    saved = sum(sums.as_received - sums.cost - sums.summary_cost for _, sums in ledger_in(store))
    assert saved < -5_000 * 1_000_000


def test_without_a_price_the_ledger_counts_tokens_only(tmp_path: Path, turns: list[list[Any]]) -> None:
    store = tmp_path / "compaction.db"
    sections = {"store": {"url": f"sqlite:///{store}"}}
    with behind(Priced([(1_000, 20, 0, 0)]), tmp_path, **sections) as url:
        body = {"model": "my-own-model", "messages": turns[0]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False).status_code == 200
    ((_, sums),) = ledger_in(store)
    assert (sums.input, sums.output, sums.cost, sums.unpriced) == (1_000, 20, 0, 1)
