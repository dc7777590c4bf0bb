"""A real coding session, turn by turn: each answer is the recorded one, and shadow mode predicts its figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from proxy.recall.tool import NAME
from proxy.records.model import LedgerSums
from tests.kit.message_checks import size_of as size_of_messages
from tests.kit.recorded import SESSION, as_blocks, as_items, recorded_messages
from tests.kit.records import ledger_in, records_in
from tests.kit.response_items import size_of as size_of_items
from tests.kit.scripted import behind, common_prefix, protected
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_responses import StrictResponses
from tests.kit.upstream import Reply, StandIn, ToolCall

pytestmark = [pytest.mark.long, pytest.mark.skipif(not SESSION.exists(), reason="the recorded session is not at hand")]

MOST_SUMMARIES = {32_768: 10, 65_536: 5, 131_072: 4}
LEAST_SHARED = 0.97
"""Of the prompts' tokens, this share must be a common prefix with the prompt before, over the session."""


def recorded_reply(message: dict[str, Any]) -> Reply:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return Reply(content=message.get("content"), tool_calls=calls)


@pytest.mark.parametrize("window", [32_768, *(pytest.param(w, marks=pytest.mark.full) for w in (65_536, 131_072))])
def test_every_turn_fits_and_most_of_each_prompt_is_the_one_before(window: int, tmp_path: Path) -> None:
    """Replay the session at the smallest window, and at all three with ``--full``."""
    messages = recorded_messages()
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    answers = iter(recorded_reply(messages[i]) for i in turns)
    upstream = StandIn(window=window, max_output=window // 4, responder=lambda body: next(answers))
    with protected(upstream, tmp_path, window) as client:
        url = f"{client.base_url}chat/completions"
        with httpx.Client(trust_env=False, timeout=120) as http:
            for i in turns:
                answer = http.post(
                    url, json={"model": "m", "messages": messages[:i]}, headers={"authorization": "Bearer k"}
                )
                assert answer.status_code == 200, answer.text[:500]
    assert len(upstream.conversations) == len(turns)
    assert all(request.tokens <= window for request in upstream.requests)
    assert upstream.faults == []
    assert len(upstream.summaries) <= MOST_SUMMARIES[window]
    share = cacheable(upstream)
    print(f"\n{window}: {len(upstream.summaries)} summaries, {share:.2%} of the prompt a common prefix")
    assert share >= LEAST_SHARED


RECALLS = 50
"""Every few turns, the model reads archived messages."""


@pytest.mark.full
@pytest.mark.parametrize("window", [32_768, 65_536])
def test_recall_keeps_the_common_prefix(window: int, tmp_path: Path) -> None:
    """Replay the session with the tool and without it. Runs with ``--full`` only."""
    shares = []
    for setting in ("off", "auto"):
        upstream, recalls = recalling(window, setting, tmp_path / setting)
        assert upstream.faults == []
        assert all(request.tokens <= window for request in upstream.requests)
        assert bool(recalls) is (setting == "auto")
        shares.append(cacheable(upstream))
        print(f"\n{window}, recall {setting}: {recalls} reads, {shares[-1]:.2%} of the prompt a common prefix")
    assert shares[1] >= shares[0] - 0.005


def recalling(window: int, setting: str, folder: Path) -> tuple[StandIn, int]:
    """Replay the session by a client that keeps the answers it gets. Return the upstream and the number of reads."""
    folder.mkdir()
    recorded = recorded_messages()
    names = {call["function"]["name"] for message in recorded for call in message.get("tool_calls", ())}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in sorted(names)
    ]
    turns = [i for i, message in enumerate(recorded) if message["role"] == "assistant" and i]
    reads = number = 0
    answer = Reply()

    def reply(body: dict[str, Any]) -> Reply:
        nonlocal reads
        offered = body["tools"][-1]["function"]["name"] == NAME
        if not offered or number % RECALLS or body["messages"][-1].get("tool_call_id", "").startswith("read_"):
            return answer
        reads += 1
        arguments = json.dumps({"query": answer.content or "error", "id": None, "offset": None})
        return Reply(tool_calls=(ToolCall(f"read_{reads}", NAME, arguments),))

    upstream = StandIn(window=window, max_output=window // 4, responder=reply)
    with (
        protected(upstream, folder, window, {"recall": {"tool": setting}}) as client,
        httpx.Client(trust_env=False, timeout=120) as http,
    ):
        for turn, i in enumerate(turns):
            answer, number = recorded_reply(recorded[i]), turn
            body = {"model": "m", "messages": recorded[:i], "tools": tools}
            got = http.post(f"{client.base_url}chat/completions", json=body, headers={"authorization": "Bearer k"})
            assert got.status_code == 200, got.text[:500]
    return upstream, reads


SHARED_ON_CHAT = {32_768: 0.9732, 65_536: 0.9870, 131_072: 0.9938}
"""The share of the prompts that is a common prefix with the one before, as measured by the test above."""
ON_CHAT = {32_768: 7, 65_536: 3, 131_072: 1}
"""The summaries that the test above counts."""
BEGINNING = 520
"""Messages of the session that are replayed over ``/v1/messages`` without ``--full``."""
BEGINNING_ON_CHAT = 0.969, 4
"""The share and the summaries of these messages over ``/v1/chat/completions`` at the smallest window."""
REPLAYS = [
    pytest.param(32_768, BEGINNING, *BEGINNING_ON_CHAT, id="the beginning"),
    *(
        pytest.param(window, None, share, ON_CHAT[window], marks=pytest.mark.full, id=str(window))
        for window, share in SHARED_ON_CHAT.items()
    ),
]


def profile(window: int) -> dict[str, Any]:
    limits = {"context_window": window, "max_input_tokens": window, "max_output_tokens": window // 4}
    return {**limits, "tokenizer": "o200k_base"}


@pytest.mark.full
@pytest.mark.parametrize("window", SHARED_ON_CHAT)
def test_items_fare_as_messages_do(window: int, tmp_path: Path) -> None:
    """The session over ``/v1/responses``. Runs with ``--full`` only."""
    messages = recorded_messages()
    items = list(as_items(messages))
    upstream = StrictResponses(window)
    with (
        behind(upstream.app, tmp_path, profile=profile(window)) as url,
        httpx.Client(trust_env=False, timeout=120) as http,
    ):
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and messages[i - 1]["role"] in ("user", "tool"):
                body = {"model": "m", "input": [item for group in items[:i] for item in group]}
                answer = http.post(f"{url}/v1/responses", json=body, headers={"authorization": "Bearer k"})
                assert answer.status_code == 200, answer.text[:500]
    assert upstream.faults == []
    assert upstream.refused == []
    prompts = [received.body["input"] for received in upstream.conversations]
    share = common_share(prompts, lambda item: size_of_items({}, [item]))
    summaries = sum(received.status == 200 for received in upstream.chat.summaries)
    print(f"\nitems, {window}: {summaries} summaries, {share:.2%} of the prompt a common prefix")
    assert abs(summaries - ON_CHAT[window]) <= 1
    assert share >= SHARED_ON_CHAT[window] - 0.01


@pytest.mark.parametrize(("window", "count", "on_chat", "summaries_on_chat"), REPLAYS)
def test_blocks_fare_as_messages_do(
    window: int, count: int | None, on_chat: float, summaries_on_chat: int, tmp_path: Path
) -> None:
    """Replay the session over ``/v1/messages``. ``--full`` replays all of it, at three windows."""
    messages = as_blocks(recorded_messages()[:count])
    upstream = StrictMessages(window)
    with (
        behind(upstream.app, tmp_path, profile=profile(window)) as url,
        httpx.Client(trust_env=False, timeout=120) as http,
    ):
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and i:
                body = {"model": "m", "max_tokens": 1_000, "messages": messages[:i]}
                answer = http.post(
                    f"{url}/v1/messages", json=body, headers={"x-api-key": "k", "anthropic-version": "2023-06-01"}
                )
                assert answer.status_code == 200, answer.text[:500]
    assert upstream.faults == []
    assert upstream.refused == []
    prompts = [received.body["messages"] for received in upstream.conversations]
    share = common_share(prompts, lambda message: size_of_messages({"messages": [message]}))
    summaries = sum(received.status == 200 for received in upstream.chat.summaries)
    print(f"\nblocks, {window}: {summaries} summaries, {share:.2%} of the prompt a common prefix")
    assert abs(summaries - summaries_on_chat) <= 1
    assert share >= on_chat - 0.01


def common_share(prompts: list[list[Any]], size: Callable[[Any], int]) -> float:
    """Return the share of all prompts' tokens, without the first one's, that is a common prefix with the one before."""
    shared = total = 0
    previous: list[bytes] = []
    sizes: dict[bytes, int] = {}
    for prompt in prompts:
        current = [msgspec.json.encode(part) for part in prompt]
        sizes |= {raw: size(part) for raw, part in zip(current, prompt, strict=True) if raw not in sizes}
        if previous:
            shared += common_prefix(previous, current, sizes)
            total += sum(sizes[raw] for raw in current)
        previous = current
    return shared / total


def cacheable(upstream: StandIn) -> float:
    """The share of all prompts' tokens that is a common prefix with the prompt before. Other tools share nothing."""
    shared = total = 0
    previous: list[bytes] = []
    tools = None
    for request in upstream.conversations:
        current = [msgspec.json.encode(message) for message in request.body["messages"]]
        tokens = {
            raw: upstream.counter.message(message)
            for raw, message in zip(current, request.body["messages"], strict=True)
        }
        if previous:
            # The tools come first in a prompt.
            fixed = request.tokens - sum(tokens[raw] for raw in current)
            shared += common_prefix(previous, current, tokens) + fixed if request.body.get("tools") == tools else 0
            total += request.tokens
        previous, tools = current, request.body.get("tools")
    return shared / total


HUGE = 1_000_000
PRICES = {
    "m": {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.00001, "cache_read_input_token_cost": 1e-7}
}


def replayed(mode: str, window: int, folder: Path) -> tuple[LedgerSums, int]:
    """Return the ledger of the session in a mode, and the number of checkpoints that it passed."""
    messages = recorded_messages()
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    answers = iter(recorded_reply(messages[i]) for i in turns)
    upstream = StandIn(window=HUGE, max_output=window // 4, responder=lambda body: next(answers))
    limits = {"context_window": window, "max_input_tokens": window, "max_output_tokens": window // 4}
    store = folder / mode / "compaction.db"
    with (
        behind(
            upstream,
            folder,
            profile={**limits, "tokenizer": "o200k_base"},
            policy={"mode": mode},
            store={"url": f"sqlite:///{store}"},
            prices=PRICES,
            records={"max": 10_000},
        ) as url,
        httpx.Client(trust_env=False, timeout=120) as http,
    ):
        for i in turns:
            body = {"model": "m", "messages": messages[:i]}
            answer = http.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
            assert answer.status_code == 200, answer.text[:500]
    total = LedgerSums()
    for _, sums in ledger_in(store):
        total.add(sums)
    return total, max(one.checkpoints for one in records_in(store))


@pytest.mark.full
@pytest.mark.parametrize("window", [65_536, 131_072])
def test_shadow_mode_predicts_compactions_tokens_and_refusals(window: int, tmp_path: Path) -> None:
    shadow, predicted = replayed("shadow", window, tmp_path)
    enforced, passed = replayed("enforce", window, tmp_path)
    print(f"\n{window}: predicted {shadow}\nenforced {enforced}\ncheckpoints {predicted}, {passed}")
    assert (shadow.would_compact, predicted) == (enforced.compacted, passed)
    assert shadow.would_avoid == 0, "the upstream answered all"
    assert (shadow.compacted, shadow.avoided, enforced.would_compact) == (0, 0, 0)
    assert abs(shadow.forecast - enforced.sent) <= 0.05 * enforced.sent
    assert shadow.received == shadow.sent == enforced.received
