"""Summary models that take or write less than is known of them: the summary is had all the same."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.server.loopback import serve
from tests.kit.scripted import chat, client, proxied
from tests.kit.upstream import StandIn

WINDOW = 32_000
PROFILE = {"context_window": WINDOW, "tokenizer": "o200k_base"}


def settings_for(main: str, second: str) -> dict[str, Any]:
    route = {"profile": PROFILE, "match": "*", "upstream": "main"}
    return {
        "upstreams": {"main": {"base_url": f"{main}/v1"}, "second": {"base_url": f"{second}/v1", "api_key": "k"}},
        "models": [{**route, "match": "small", "upstream": "second"}, route],
        "policies": {"default": {"summary": {"model": "small"}}},
    }


def refused(upstream: StandIn) -> int:
    return sum(request.status != 200 for request in upstream.requests)


def grown(seed: str) -> list[Any]:
    messages = chat(30, 480)
    messages[1]["content"] = f"{seed}: {messages[1]['content']}"
    return messages


@contextlib.contextmanager
def summarising(upstream: StandIn, second: StandIn, folder: Path) -> Iterator[openai.OpenAI]:
    with (
        serve(upstream.app) as main,
        serve(second.app) as other,
        proxied(settings_for(main, other), folder) as url,
        client(url) as caller,
    ):
        yield caller


@pytest.mark.parametrize(("window", "output"), [(8_000, 8_000), (WINDOW, 400)])
def test_the_summary_is_made(window: int, output: int, tmp_path: Path) -> None:
    upstream, second = StandIn(window=WINDOW), StandIn(window=window, max_output=output)
    with summarising(upstream, second, tmp_path) as caller:
        for seed in ("one", "two"):
            answer = caller.chat.completions.with_raw_response.create(model="m", messages=grown(seed))
            assert answer.headers["x-compaction-summary"] == "made"
    assert all(request.status == 200 for request in upstream.requests)
    assert refused(second) >= 1
