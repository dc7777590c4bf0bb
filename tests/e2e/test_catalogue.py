"""Real refusals, answered to real requests: what is an overflow is never seen, anything else arrives byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from e2e_harness import chat, client, proxied
from refusing import ANSWER, First, Refusing

from bench.overflow.lines import CATALOGUE, Line, lines
from proxy.demo.agent import gather
from proxy.demo.serving import serve

WINDOW = 4_000_000
"""What the proxy believes. Every limit of the catalogue is news to it."""

MOST = 30_000
"""Tokens of the largest request. Where a limit is beyond that, the upstream counts quite unlike the proxy."""

UNSAID = 6_000
"""Tokens of a request that is refused without a size."""

TURN = 300
MOST_RETRIES = 2

HERE = [line for line in lines(CATALOGUE) if not line.silent] if CATALOGUE.exists() else []
BEGUN = frozenset({"pos-llamacpp_server-07"})
"""Refused in the middle of an answer: the client has its first words."""

OVERFLOWS = [line for line in HERE if line.overflow and line.id not in BEGUN]
OTHERS = [line for line in HERE if not line.overflow]

pytestmark = pytest.mark.skipif(not HERE, reason="the catalogue of real errors is not here")


@pytest.fixture(scope="module")
def upstream() -> Refusing:
    return Refusing()


@pytest.fixture(scope="module")
def caller(upstream: Refusing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a proxy in front of all upstreams of the catalogue; each line is a model of its own."""
    with serve(upstream) as url:
        profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "models": [{"match": "*", "upstream": "main", "profile": profile}],
        }
        with proxied(settings, tmp_path_factory.mktemp("catalogue")) as entrance, client(entrance) as asking:
            yield asking


def first(line: Line) -> First:
    events = line.body.startswith((b"data:", b"event:", b"error:", b":"))
    page = line.body.startswith(b"<")
    kind = "text/event-stream" if events else "text/html" if page else "application/json"
    return First(line.status, [line.body], (("content-type", kind), *line.headers))


def request(line: Line, model: str) -> dict[str, Any]:
    """A conversation of the size that was refused, as far as that is known and not too large for a test."""
    size = min(line.counted or int((line.limit or UNSAID) * 1.2), MOST)
    body: dict[str, Any] = {"model": model, "messages": chat(max(size // (2 * TURN), 2), min(TURN, size // 4))}
    return body | ({"max_tokens": line.output} if line.output else {})


def named(line: Line) -> str:
    return line.id


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("line", OVERFLOWS, ids=named)
def test_an_overflow_is_never_seen(line: Line, stream: bool, upstream: Refusing, caller: openai.OpenAI) -> None:
    model = f"{line.id} {stream}"
    upstream.firsts[model] = first(line)
    body = request(line, model)
    answer: Any = caller.chat.completions.with_raw_response.create(**body, stream=stream)
    said = gather(answer.parse())["content"] if stream else answer.parse().choices[0].message.content
    assert (answer.status_code, said) == (200, ANSWER)
    assert 1 <= int(answer.headers["x-compaction-retries"]) <= MOST_RETRIES
    refused, *_, taken = upstream.asked[model]
    fewer = len(str(taken["messages"])) < len(str(refused["messages"]))
    assert fewer or taken["max_tokens"] < refused["max_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("line", [*OTHERS, *(line for line in HERE if line.id in BEGUN)], ids=named)
def test_anything_else_arrives_as_it_came(line: Line, stream: bool, upstream: Refusing, caller: openai.OpenAI) -> None:
    model = f"{line.id} {stream}"
    upstream.firsts[model] = first(line)
    body = request(line, model) | {"stream": stream}
    with httpx.Client(trust_env=False, timeout=30) as http:
        answer = http.post(f"{caller.base_url}chat/completions", json=body, headers={"authorization": "Bearer k"})
    assert (answer.status_code, answer.content) == (line.status, line.body)
    assert len(upstream.asked[model]) == 1
    for name, value in line.headers:
        assert answer.headers[name] == value
