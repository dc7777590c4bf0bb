"""Replay real errors in answer to real requests: overflows are never seen, and other errors arrive byte for byte.

Limits on tokens per minute that one request exceeds are errors of both kinds: the policy decides.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest

from bench.overflow.lines import CATALOGUE, Line, lines
from tests.kit.refusing import ANSWER, First, Refusing
from tests.kit.scripted import behind, chat, client, key_hash
from tests.kit.upstream import gather

WINDOW = 4_000_000
"""The window that the proxy assumes. Every limit of the catalogue is news to it."""

MOST = 30_000
"""Tokens of the largest request. If a limit is larger, the upstream counts quite unlike the proxy."""

UNSAID = 6_000
"""Tokens of a request that is refused without a size."""

TURN = 300
MOST_RETRIES = 2

HERE = [line for line in lines(CATALOGUE) if not line.silent] if CATALOGUE.exists() else []
BEGUN = frozenset({"pos-llamacpp_server-07"})
"""Refused in the middle of an answer: the client has its first words."""

OVERFLOWS = [line for line in HERE if line.overflow and line.id not in BEGUN]
OTHERS = [line for line in HERE if not line.overflow]

KEY = "sk-passes-rate-limits-on"
"""The key of a team whose policy has ``rate_limit_as_limit: false``."""

TOO_LARGE_A_MINUTE = re.compile(rb"\(TPM\): Limit (?P<limit>\d+), Requested (?P<requested>\d+)")
"""The words of such a limit. If they also state the tokens used so far, waiting helps."""

TOO_LARGE = {
    line: int(found["limit"])
    for line in OTHERS
    if (found := TOO_LARGE_A_MINUTE.search(line.body)) and int(found["requested"]) > int(found["limit"])
}
"""The limit in each line that one request exceeds, in tokens per minute."""

pytestmark = pytest.mark.skipif(not HERE, reason="the catalogue of real errors is not here")


@pytest.fixture(scope="module")
def upstream() -> Refusing:
    return Refusing()


@pytest.fixture(scope="module")
def caller(upstream: Refusing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a proxy in front of all upstreams of the catalogue; each line is a model of its own."""
    profile = {"context_window": WINDOW, "tokenizer": "o200k_base"}
    policies = {"default": {}, "strict": {"extends": "default", "rate_limit_as_limit": False}}
    teams = {"strict": {"keys": [key_hash(KEY)], "policy": "strict"}}
    folder = tmp_path_factory.mktemp("catalogue")
    with behind(upstream, folder, profile=profile, policies=policies, teams=teams) as url, client(url) as asking:
        yield asking


def first(line: Line) -> First:
    events = line.body.startswith((b"data:", b"event:", b"error:", b":"))
    page = line.body.startswith(b"<")
    kind = "text/event-stream" if events else "text/html" if page else "application/json"
    return First(line.status, [line.body], (("content-type", kind), *line.headers))


def request(line: Line, model: str) -> dict[str, Any]:
    """Return a conversation of the refused size, if that is known and not too large for a test."""
    size = min(line.counted or int((line.limit or UNSAID) * 1.2), MOST)
    body: dict[str, Any] = {"model": model, "messages": chat(max(size // (2 * TURN), 2), min(TURN, size // 4))}
    return body | ({"max_tokens": line.output} if line.output else {})


def named(line: Line) -> str:
    return line.id


def cases(lines: Sequence[Line]) -> list[Any]:
    """Return each line streamed or not, in turn. ``--full`` runs both."""
    return [
        pytest.param(
            line,
            stream,
            id=f"{line.id}-{'streamed' if stream else 'whole'}",
            marks=[] if number % 2 == stream else pytest.mark.full,
        )
        for number, line in enumerate(lines)
        for stream in (False, True)
    ]


@pytest.mark.parametrize(("line", "stream"), cases(OVERFLOWS))
def test_an_overflow_is_never_seen(line: Line, stream: bool, upstream: Refusing, caller: openai.OpenAI) -> None:
    """Half of the lines answer streamed requests, the others plain ones. ``--full`` sends both to all lines."""
    model = f"{line.id} {stream}"
    upstream.firsts[model] = first(line)
    body = request(line, model)
    # The client transforms ``messages``, which takes time. It sends ``extra_body`` unchanged.
    answer: Any = caller.chat.completions.with_raw_response.create(
        model=model, messages=[], extra_body=body, stream=stream
    )
    said = gather(answer.parse())["content"] if stream else answer.parse().choices[0].message.content
    assert (answer.status_code, said) == (200, ANSWER)
    assert 1 <= int(answer.headers["x-compaction-retries"]) <= MOST_RETRIES
    refused, *_, taken = upstream.asked[model]
    fewer = len(str(taken["messages"])) < len(str(refused["messages"]))
    # An upstream may have added an output of its own to a request without one. Then the proxy states a smaller one.
    assert fewer or taken["max_tokens"] < refused.get("max_tokens", math.inf)


@pytest.mark.parametrize(("line", "stream"), cases([*OTHERS, *(line for line in HERE if line.id in BEGUN)]))
def test_anything_else_arrives_as_it_came(line: Line, stream: bool, upstream: Refusing, caller: openai.OpenAI) -> None:
    """See ``test_an_overflow_is_never_seen`` for ``--full``."""
    model = f"{line.id} {stream}"
    upstream.firsts[model] = first(line)
    body = request(line, model) | {"stream": stream}
    key = KEY if line in TOO_LARGE else "k"
    with httpx.Client(trust_env=False, timeout=30) as http:
        answer = http.post(f"{caller.base_url}chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.content) == (line.status, line.body)
    assert len(upstream.asked[model]) == 1
    for name, value in line.headers:
        assert answer.headers[name] == value


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("line", TOO_LARGE, ids=named)
def test_a_rate_limit_that_one_request_exceeds_is_never_seen(
    line: Line, stream: bool, upstream: Refusing, caller: openai.OpenAI
) -> None:
    model = f"{line.id} {stream} by default"
    upstream.firsts[model] = first(line)
    messages = chat(TOO_LARGE[line] * 6 // (5 * 2 * TURN), TURN)
    answer: Any = caller.chat.completions.with_raw_response.create(model=model, messages=messages, stream=stream)
    said = gather(answer.parse())["content"] if stream else answer.parse().choices[0].message.content
    assert (answer.status_code, said) == (200, ANSWER)
    assert answer.headers["x-compaction-retries"] == "1"
    assert int(answer.headers["x-compaction-tokens-after"]) <= TOO_LARGE[line]
    refused, taken = upstream.asked[model]
    assert len(str(taken["messages"])) < len(str(refused["messages"]))
