"""Test prices of cache lifetimes, tiers, searches, and compactions, and a policy that compacts before a price rises."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.server.loopback import serve
from tests.kit.combinations import combined
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import PROFILE, behind, chat, client, proxied
from tests.kit.upstream import StandIn

PICO = 10**12
CLAUDE, GPT = "claude-sonnet-4-5", "gpt-5"
TOOLS = [{"type": "function", "name": f"tool_{number}", "description": "word " * 100} for number in range(40)]
"""More than the proxy keeps of a response."""


class Answering:
    """Answers every request with an object, or as a stream of two events that end with it."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = json.loads(await Request(scope, receive).body())
        if not body.get("stream"):
            await JSONResponse(self.answer)(scope, receive, send)
            return
        events = [("response.created", {**self.answer, "service_tier": "auto", "output": [], "usage": None})]
        for number, item in enumerate(self.answer["output"]):
            if item["type"] == "web_search_call":
                events.append(("response.web_search_call.completed", {"output_index": number, "item_id": item["id"]}))
        events.append(("response.completed", self.answer))
        lines = [
            f"event: {name}\ndata: {json.dumps({'type': name, **({'response': one} if 'usage' in one else one)})}\n\n"
            for name, one in events
        ]
        await StreamingResponse(iter(lines), media_type="text/event-stream")(scope, receive, send)


@contextlib.contextmanager
def proxy(
    answer: dict[str, Any], folder: Path, *, speaks: Sequence[str] = ("chat", "responses"), **sections: Any
) -> Iterator[httpx.Client]:
    with serve(Answering(answer)) as upstream:
        upstreams = {
            "anthropic": {"provider": "anthropic", "base_url": upstream, "api_key": "sk"},
            "openai": {
                "provider": "openai",
                "base_url": f"{upstream}/v1",
                "api_key": "sk",
                "ask_limits": False,
                "speaks": list(speaks),
            },
        }
        models = [{"match": "claude*", "upstream": "anthropic"}, {"match": "*", "upstream": "openai"}]
        store = {"url": f"sqlite:///{folder}/compaction.db"}
        settings = {"upstreams": upstreams, "models": models, "store": store, **sections}
        with proxied(settings, folder) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            yield client


def price(answer: dict[str, Any], folder: Path, path: str, body: dict[str, Any], **sections: Any) -> float:
    """Return the price of one request in the ledger, which is that of its record, in US dollars."""
    with proxy(answer, folder, **sections) as client:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
    ((_, sums),) = ledger_in(folder / "compaction.db")
    (record,) = records_in(folder / "compaction.db")
    assert record.cost is not None
    assert record.cost.sent == record.cost.as_received == sums.cost
    return sums.cost / PICO


def writing(**lifetimes: int) -> dict[str, Any]:
    counts = {"input_tokens": 10, "output_tokens": 10, "cache_read_input_tokens": 0}
    return {**counts, "cache_creation_input_tokens": 100_000, "cache_creation": lifetimes}


COMPACTED = {
    "input_tokens": 23_000,
    "output_tokens": 1_000,
    "iterations": [
        {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500},
        {"type": "message", "input_tokens": 23_000, "output_tokens": 1_000},
    ],
}
SEARCHED = {"input_tokens": 10, "output_tokens": 10, "server_tool_use": {"web_search_requests": 100}}


@pytest.mark.parametrize(
    ("usage", "usd"),
    [
        pytest.param(writing(ephemeral_5m_input_tokens=100_000), 0.37518, id="five minutes"),
        pytest.param(writing(ephemeral_1h_input_tokens=100_000), 0.60018, id="an hour"),
        pytest.param(writing(ephemeral_5m_input_tokens=50_000, ephemeral_1h_input_tokens=50_000), 0.48768, id="both"),
        pytest.param(SEARCHED, 1.00018, id="searches"),
        pytest.param(COMPACTED, 0.6765, id="the client's compaction"),
    ],
)
def test_what_anthropic_bills(tmp_path: Path, usage: dict[str, Any], usd: float) -> None:
    answer = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": CLAUDE,
        "content": [{"type": "text", "text": "Yes."}],
        "stop_reason": "end_turn",
        "usage": usage,
    }
    body = {"model": CLAUDE, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    assert price(answer, tmp_path, "/v1/messages", body) == pytest.approx(usd)


def response(tier: str | None, tools: list[Any], searches: int = 0, **fields: Any) -> dict[str, Any]:
    """Return an answer with its fields in the order of OpenAI's."""
    search = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}}
    text = {"type": "output_text", "text": "Yes.", "annotations": []}
    said = {"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [text]}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": GPT,
        "output": [*({"id": f"ws_{number}", **search} for number in range(searches)), said],
        **({} if tier is None else {"service_tier": tier}),
        "tools": tools,
        "usage": {"input_tokens": 100_000, "output_tokens": 1_000, "total_tokens": 101_000},
        **fields,
    }


IMAGE = {"input_cost_per_token": 5e-06, "input_cost_per_image_token": 1e-05, "output_cost_per_image_token": 4e-05}
TEXT = {"output_cost_per_token": 1e-05}
HEARD = {"input_cost_per_token": 2e-06, "input_cost_per_audio_token": 6e-06, "output_cost_per_token": 1e-05}
DRAWN = {"input_tokens": 50, "output_tokens": 4_160, "input_tokens_details": {"text_tokens": 50, "image_tokens": 0}}
TRANSCRIBED = {"type": "tokens", "input_tokens": 100, "output_tokens": 30}


@pytest.mark.parametrize(
    ("path", "prices", "usage", "usd"),
    [
        pytest.param("/v1/images/generations", IMAGE, DRAWN, 0.16665, id="images only"),
        pytest.param("/v1/images/edits", IMAGE | TEXT, DRAWN, 0.16665, id="images and text"),
        pytest.param(
            "/v1/audio/transcriptions",
            HEARD,
            TRANSCRIBED | {"input_token_details": {"audio_tokens": 90, "text_tokens": 10}},
            0.00086,
            id="audio",
        ),
    ],
)
def test_images_and_audio_have_the_prices_of_their_tokens(
    tmp_path: Path, path: str, prices: dict[str, Any], usage: dict[str, Any], usd: float
) -> None:
    answer = {"created": 1, "usage": usage}
    assert price(answer, tmp_path, path, {"model": "own", "prompt": "x"}, prices={"own": prices}) == pytest.approx(usd)


BILLS = [
    (None, 0, 0.135),
    ("default", 0, 0.135),
    ("flex", 0, 0.0675),
    ("priority", 0, 0.27),
    ("auto", 0, 0.135),
    ("default", 3, 0.165),
]
"""Tiers, searches, and prices in USD."""


@pytest.mark.parametrize(("bill", "tools", "stream"), combined(3, BILLS, [[], TOOLS], [False, True]))
def test_what_openai_bills(
    tmp_path: Path, bill: tuple[str | None, int, float], tools: list[Any], *, stream: bool
) -> None:
    tier, searches, usd = bill
    body = {"model": GPT, "input": "hi", "service_tier": "auto", "stream": stream}
    answer = response(tier, tools, searches, metadata={} if tier is None else {"service_tier": "flex"})
    assert price(answer, tmp_path, "/v1/responses", body) == pytest.approx(usd)


def test_the_tier_of_the_answer_counts_and_not_that_of_the_request(tmp_path: Path) -> None:
    body = {"model": GPT, "messages": [{"role": "user", "content": "Hi"}], "service_tier": "priority"}
    choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100_000, "completion_tokens": 1_000, "total_tokens": 101_000}
    answer = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage, "service_tier": "flex"}
    assert price(answer, tmp_path, "/v1/chat/completions", body) == pytest.approx(0.0675)


CHAT_ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": GPT,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {
        "prompt_tokens": 100_000,
        "completion_tokens": 1_000,
        "total_tokens": 101_000,
        "prompt_tokens_details": {"cached_tokens": 40_000},
    },
    "service_tier": "flex",
}
CHAT_BODY = {"model": GPT, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("speaks", "answer", "path", "body", "usd"),
    [
        ("chat", CHAT_ANSWER, "/v1/responses", {"model": GPT, "input": "hi"}, 0.045),
        ("responses", response("flex", []), "/v1/chat/completions", CHAT_BODY, 0.0675),
    ],
)
def test_a_translated_answer_has_its_tier(
    tmp_path: Path, speaks: str, answer: dict[str, Any], path: str, body: dict[str, Any], usd: float
) -> None:
    assert price(answer, tmp_path, path, body, speaks=[speaks]) == pytest.approx(usd)


def test_a_translated_stream_has_its_tier(tmp_path: Path) -> None:
    body = {**CHAT_BODY, "stream": True, "stream_options": {"include_usage": True}}
    answer = response("priority", [])
    assert price(answer, tmp_path, "/v1/chat/completions", body, speaks=["responses"]) == pytest.approx(0.27)


def test_an_operator_states_prices_in_all_fields_of_the_table(tmp_path: Path) -> None:
    prices = {
        "input_cost_per_token": 0.000001,
        "input_cost_per_token_flex": 0.0000002,
        "output_cost_per_token_flex": 0.000003,
        "cache_creation_input_token_cost_above_1hr": 0.000002,
        "search_context_cost_per_query": {"search_context_size_medium": 0.5},
    }
    body = {"model": GPT, "input": "hi"}
    found = price(response("flex", [], 2), tmp_path, "/v1/responses", body, prices={"gpt-*": prices})
    assert found == pytest.approx(0.02 + 0.003 + 1)
    assert records_in(tmp_path / "compaction.db")[0].usage is not None


def test_a_record_shows_what_its_price_depends_on(tmp_path: Path) -> None:
    usage = {**COMPACTED, **writing(ephemeral_1h_input_tokens=100_000), "service_tier": "standard"}
    answer = {"type": "message", "content": [{"type": "text", "text": "Yes."}], "usage": usage}
    body = {"model": CLAUDE, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with proxy(answer, tmp_path) as client:
        id = client.post("/v1/messages", json=body).headers["x-compaction-id"]
        found: dict[str, Any] = {}
        while "usage" not in found:
            found = client.get(f"/compaction/requests/{id}").json()
    assert found["usage"] == {
        "input": 280_010,
        "output": 3_510,
        "cache_read": 0,
        "cache_write": 100_000,
        "cache_write_1h": 100_000,
        "compaction_input": 180_000,
        "compaction_output": 3_500,
        "estimated": False,
    }


PRICES = {"gpt-5": {"input_cost_per_token": 0.000001, "input_cost_per_token_above_10k_tokens": 0.000002}}
PROFILED = {**PROFILE, "context_window": 64_000}


def test_a_conversation_stays_below_the_step_of_its_models_price(tmp_path: Path) -> None:
    upstream = StandIn(window=64_000)
    policy = {"trigger": [{"price_step": True}, {"fraction": 0.85}]}
    with behind(upstream, tmp_path, profile=PROFILED, policy=policy, prices=PRICES) as url, client(url) as caller:
        for model in ("gpt-5", "another"):
            for count in (4, 5):
                caller.chat.completions.create(model=model, messages=chat(count, 1_000))
    sizes = [request.tokens for request in upstream.conversations]
    assert sizes[0] < 9_000 < sizes[0] + 2_000
    assert sizes[1] < 6_000
    assert sizes[3] > 10_000, "a model without a step isn't compacted"
    reasons = [record.reason.trigger for record in records_in(tmp_path / "store.db") if record.reason is not None]
    assert reasons == ["price_step"]
