"""Errors that aren't about the prompt's length, even if they quote such an error, and rate limits that are."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kit.refusing import ANSWER, First, Refusing
from tests.kit.scripted import behind, key_hash

PHRASE = "maximum context length is 300 tokens"
URL = f"https://images.example/?{PHRASE}"
TPM = "on tokens per minute (TPM): Limit 2000, Requested {}. Visit https://console.example/limits for more."

ERRORS: list[tuple[str, int, dict[str, Any]]] = [
    ("image code", 400, {"message": f"Failed to load image: {URL}", "code": "invalid_image_url"}),
    ("image", 400, {"message": f"Failed to load image: {URL}"}),
    ("status", 400, {"message": f"404, message='Not Found', url='{URL}'"}),
    ("parameter", 400, {"message": f"Invalid parameter: 'tool_call_id' of '{PHRASE}' not found"}),
    ("json", 400, {"message": f"Failed to parse tool call arguments as JSON: {PHRASE}"}),
    ("quoted", 400, {"message": f"Refused by the guard. The text was: {PHRASE}"}),
    ("percent", 400, {"message": "Bad request: see prompt is too long and exceeds its window"}),
    (
        "param",
        400,
        {"message": "The maximum context length is 300 tokens", "param": "messages[0].content[1].image_url"},
    ),
    ("images", 400, {"message": "The number of images in the prompt exceeds the limit of 20."}),
    ("minutes", 400, {"message": "The input video is too long: 90 minutes, the limit is 60 minutes"}),
    ("a query", 400, {"message": "web_search: query too long. The tool input exceeds 400 characters."}),
    ("documents", 400, {"message": "Input exceeds the maximum of 10 documents"}),
    ("functions", 400, {"message": "The prompt has 300 functions, the limit is 128 functions"}),
    ("stop", 400, {"message": "Length of stop_seqs(16) exceeds the limit max_model_len(8). Please reduce the length."}),
    ("an id", 400, {"message": "The length of the conversation id exceeds 64"}),
    ("media", 400, {"message": "Too much media: 0 document pages + 107 images > 100"}),
    ("tools", 400, {"message": "You may not include more than 128 tools in your request."}),
    ("a range", 400, {"message": "Invalid max_tokens value, the valid range of max_tokens is [1, 4096]"}),
    ("waiting helps", 429, {"message": "Rate limit reached " + TPM.format(1_500), "code": "rate_limit_exceeded"}),
]


@pytest.fixture(scope="module")
def upstream() -> Refusing:
    return Refusing()


@pytest.fixture(scope="module")
def entrance(upstream: Refusing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    profile = {"context_window": 8_000, "tokenizer": "o200k_base"}
    policies = {
        "default": {"trigger": {"fraction": 1.0}},
        "strict": {"extends": "default", "rate_limit_as_limit": False},
    }
    teams = {"strict": {"keys": [key_hash("sk-strict-key")], "policy": "strict"}}
    with behind(
        upstream, tmp_path_factory.mktemp("matters"), profile=profile, policies=policies, teams=teams
    ) as entrance:
        yield entrance


def conversation() -> list[dict[str, Any]]:
    turns = [
        {"role": role, "content": f"{role} {turn}: " + "the garden behind the house was planted " * 15}
        for turn in range(12)
        for role in ("user", "assistant")
    ]
    quoting = {
        "role": "user",
        "content": f"Look at {URL}, at {PHRASE}, and at https://a.example/prompt%20is%20too%20long+and+exceeds+its+window",
    }
    return [*turns, quoting]


def ask(entrance: str, model: str, key: str = "k") -> httpx.Response:
    body = {"model": model, "messages": conversation()}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(trust_env=False, timeout=30) as http:
        return http.post(f"{entrance}/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(("name", "status", "error"), ERRORS, ids=[row[0] for row in ERRORS])
def test_the_error_arrives_unchanged_and_the_next_request_whole(
    name: str, status: int, error: dict[str, Any], upstream: Refusing, entrance: str
) -> None:
    body = json.dumps({"error": error}).encode()
    upstream.firsts[name] = First(status, [body], (("content-type", "application/json"),))
    refused = ask(entrance, name)
    assert (refused.status_code, refused.content) == (status, body)
    following = ask(entrance, name)
    assert following.headers["x-compaction"] == "none"
    assert [len(asked["messages"]) for asked in upstream.asked[name]] == [25, 25]


def test_an_older_error_in_the_conversation_hides_none(upstream: Refusing, entrance: str) -> None:
    """The figures are the upstream's own."""
    model = "quotes an error"
    message = "Sorry, maximum context length is 3000 tokens. However, your messages resulted in 3411 tokens."
    body = json.dumps({"error": {"message": message}}).encode()
    upstream.firsts[model] = First(400, [body], (("content-type", "application/json"),))
    assert ask(entrance, model).json()["choices"][0]["message"]["content"] == ANSWER
