"""Compare the prices of generated usages with those that LiteLLM computes from the same answers."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from unittest import mock

import pytest

from proxy import litellm_package
from proxy.constants import PICO
from proxy.dialects.apis import CHAT, MESSAGES, RESPONSES
from proxy.dialects.usage import usage_of
from proxy.limits import tables

# LiteLLM imports modules of providers, some of them with warnings, when it first computes their prices.
pytestmark = pytest.mark.filterwarnings("ignore")

USAGES = 500
SIZES = (3_000, 600_000)
EDGES = (100_000, 100_001, 128_000, 200_000, 200_001, 272_000, 272_001)
TIERS = (None, None, "default", "auto", "flex", "priority", "balanced", "ultrafast", "fast")
READERS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}

Answer = dict[str, Any]


class Case(NamedTuple):
    model: str
    api: str
    answer: Answer
    at: datetime = datetime(2026, 11, 24, 8, tzinfo=UTC)


@pytest.fixture(scope="module")
def litellm() -> Any:
    return asyncio.run(litellm_package.load())


TABLE: Mapping[str, Mapping[str, Any]] = json.loads(tables.table_path().read_bytes())
PRICED = {name: listing for name, listing in tables.load().items() if listing.price is not None}


def provider_of(model: str) -> str:
    """Return LiteLLM's name of a provider. Some names in the table have a suffix."""
    named: str = TABLE[model]["litellm_provider"]
    return "bedrock" if named == "bedrock_converse" else "vertex_ai" if named.startswith("vertex_ai") else named


def part(draw: random.Random, whole: int, chance: float) -> int:
    return draw.randint(0, whole) if draw.random() < chance else 0


def chat_answer(draw: random.Random) -> Answer:
    prompt, output = draw.choice((draw.randint(1, draw.choice(SIZES)), draw.choice(EDGES))), draw.randint(0, 20_000)
    read = part(draw, prompt, 0.7)
    written = part(draw, prompt - read, 0.3)
    audio = part(draw, prompt - read - written, 0.3)
    images = part(draw, prompt - read - written - audio, 0.2)
    reasoning = part(draw, output, 0.5)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": read,
            "cache_write_tokens": written,
            "audio_tokens": audio,
            "image_tokens": images,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "audio_tokens": part(draw, output - reasoning, 0.3),
        },
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": usage, "service_tier": draw.choice(TIERS)}


def responses_answer(draw: random.Random) -> Answer:
    usage = chat_answer(draw)["usage"]
    usage = {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    return {"output": [search] * draw.choice((0, 0, 1, 3)), "usage": usage, "service_tier": draw.choice(TIERS)}


def messages_answer(draw: random.Random) -> Answer:
    written, lasting = part(draw, 300_000, 0.7), part(draw, 300_000, 0.5)
    usage = {
        "input_tokens": draw.randint(1, draw.choice(SIZES)),
        "output_tokens": draw.randint(0, 20_000),
        "cache_read_input_tokens": part(draw, 300_000, 0.5),
        "cache_creation_input_tokens": written + lasting,
        "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": lasting},
        "server_tool_use": {"web_search_requests": draw.choice((0, 1, 100))},
        "service_tier": draw.choice(("standard", "priority")),
        "inference_geo": draw.choice(("global", "us", "not_available")),
    }
    if draw.random() < 0.2:
        usage["speed"] = "fast"
    return {"type": "message", "content": [{"type": "text", "text": "Yes."}], "usage": usage}


ANSWERS = {"chat": chat_answer, "responses": responses_answer, "messages": messages_answer}
RICH = ("anthropic", "openai", "azure", "bedrock_converse", "gemini", "dashscope")
APIS = {"anthropic": ("messages",), "openai": ("chat", "responses"), "azure": ("chat", "responses")}


def cases() -> list[Case]:
    """Return answers of all providers in turn, and more of those whose prices have the most parts."""
    draw = random.Random(14)
    models: dict[str, list[str]] = {}
    for model in PRICED:
        models.setdefault(TABLE[model]["litellm_provider"], []).append(model)
    providers = 3 * sorted(models)
    found = []
    for index in range(USAGES):
        provider = providers[index] if index < len(providers) else draw.choice(RICH)
        api = draw.choice(APIS.get(provider, ("chat",)))
        at = datetime(2026, 11, draw.randint(1, 30), draw.randint(0, 23), draw.randint(0, 59), tzinfo=UTC)
        found.append(Case(draw.choice(models[provider]), api, ANSWERS[api](draw), at))
    return found


def our_price(case: Case) -> float:
    price, tail = PRICED[case.model].price, READERS[case.api].answers.tail()
    tail.add(json.dumps(case.answer).encode())
    usage = usage_of(tail.finished())
    assert price is not None
    assert usage is not None
    return price.at(case.at.timestamp()).cost(usage) / PICO


def their_price(litellm: Any, case: Case) -> float:
    answer, provider = case.answer, provider_of(case.model)
    if case.api == "responses":
        fields = {"id": "resp_1", "created_at": 1, "model": case.model, **answer}
        made = litellm.ResponsesAPIResponse(**fields)
    else:
        made = litellm.ModelResponse(**{**answer, "choices": []}, model=case.model)
        if case.api == "messages":
            made.usage = litellm.AnthropicConfig().calculate_usage(answer["usage"], None)
        else:
            made.usage = litellm.Usage(**answer["usage"])
    with mock.patch("litellm.litellm_core_utils.llm_cost_calc.utils.current_billing_time", return_value=case.at):
        return float(litellm.completion_cost(made, model=case.model, custom_llm_provider=provider))


def is_same(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= 1e-9 + 1e-6 * theirs


def _details(case: Case) -> Mapping[str, int]:
    found: Mapping[str, int] = case.answer["usage"].get("prompt_tokens_details", {})
    return found


DIFFERENT: Mapping[str, Callable[[Case], object]] = {
    "a price of 0 for writing to a cache, which means that the provider has no such price": lambda case: (
        TABLE[case.model].get("cache_creation_input_token_cost") == 0 and _details(case).get("cache_write_tokens")
    ),
    "tiers of Fireworks, which LiteLLM's table has and its code ignores": lambda case: (
        provider_of(case.model) == "fireworks_ai" and case.answer["service_tier"] in ("flex", "priority", "fast")
    ),
    "cached tokens and tiers of Perplexity, which LiteLLM's code ignores": lambda case: (
        provider_of(case.model) == "perplexity"
    ),
    "sizes of Together AI, which LiteLLM takes for the names of models": lambda case: case.model.startswith(
        "together-ai-"
    ),
    "an entry whose name has a prefix elsewhere in the table, so LiteLLM reads the other entry": lambda case: (
        f"{provider_of(case.model)}/{case.model}" in TABLE
    ),
}
"""LiteLLM's errors and omissions, each with a function that returns whether a case is one."""


def why_different(case: Case) -> str | None:
    return next((reason for reason, concerns in DIFFERENT.items() if concerns(case)), None)


def test_generated_usages_cost_what_litellm_computes(litellm: Any) -> None:
    compared = [(case, our_price(case), their_price(litellm, case)) for case in cases() if why_different(case) is None]
    assert len(compared) > 0.9 * USAGES
    assert {provider_of(case.model) for case, _, _ in compared} >= {"openai", "anthropic", "bedrock", "gemini", "xai"}
    assert [found for found in compared if not is_same(*found[1:])] == []


def usage_case(model: str, tier: str | None = None, **details: int) -> Case:
    usage = {
        "prompt_tokens": 100_000,
        "completion_tokens": 0,
        "total_tokens": 100_000,
        "prompt_tokens_details": details,
    }
    return Case(model, "chat", {"choices": [], "usage": usage, "service_tier": tier})


def test_the_providers_own_compactions_are_prompts_of_their_own(litellm: Any) -> None:
    """LiteLLM adds all prompts, so two of 60,000 tokens get the price over 100,000. The provider charges each."""
    model = "claude-haiku-5-5"
    call = {"input_tokens": 60_000, "output_tokens": 1_000}
    once = Case(model, "messages", {"content": [], "usage": call})
    calls = [{"type": "compaction", **call}, {"type": "message", **call}]
    both = Case(model, "messages", {"content": [], "usage": {**call, "iterations": calls}})
    assert our_price(both) == pytest.approx(2 * their_price(litellm, once))
    assert their_price(litellm, both) > our_price(both)


@pytest.mark.parametrize("model", [name for name in PRICED if "off_peak_pricing" in TABLE[name]])
def test_prices_depend_on_the_time_of_the_week(litellm: Any, model: str) -> None:
    case = usage_case(model, cached_tokens=50_000)
    week = [case._replace(at=datetime(2026, 11, 23 + hour // 24, hour % 24, tzinfo=UTC)) for hour in range(7 * 24)]
    ours = [our_price(one) for one in week]
    assert len({round(price, 9) for price in ours}) == 2
    assert all(is_same(price, their_price(litellm, one)) for price, one in zip(ours, week, strict=True))
