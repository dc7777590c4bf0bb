"""Providers with formats of their own behind the translate lane, driven by the official client."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.responses import Response

from tests.kit.anthropic_server import AnthropicServer, LocalServer, Received, Script
from tests.kit.gemini_server import GeminiServer
from tests.kit.scripted import client, proxied
from tests.kit.upstream import gather

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
]
SUMMARY = "1. Goal: the user wants ten parts looked at. 4. State: the parts so far were looked at, none was broken."


class Limited(LocalServer):
    """Both stand-ins with a window, and a model that calls a tool on each question.

    ``window`` is in bytes of the request's JSON divided by four, near enough to tokens.
    """

    key: str
    script: Script
    window = 1_000_000
    steps = 0

    def size(self, received: Received) -> int:
        return len(json.dumps(received.body)) // 4

    def text_of_last(self, received: Received) -> str:
        messages = received.body.get("messages") or received.body.get("contents")
        return json.dumps(messages[-1])

    def call(self) -> dict[str, Any]:
        raise NotImplementedError

    def said(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def decide(self, received: Received) -> list[dict[str, Any]]:
        last = self.text_of_last(received)
        if "<transcript>" in last:
            return [self.said(SUMMARY)]
        if "Question" in last:
            self.steps += 1
            return [self.said("I look."), self.call()]
        return [self.said("It is fine.")]


class LimitedAnthropic(Limited, AnthropicServer):
    async def answer(self, received: Received) -> Response:
        self.script.blocks = self.decide(received)
        self.script.error = None
        if (size := self.size(received)) > self.window:
            message = f"prompt is too long: {size} tokens > {self.window} maximum"
            self.script.error = (400, "invalid_request_error", message)
        return await super().answer(received)

    def call(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{self.steps}", "name": "look", "input": {"number": self.steps}}

    def said(self, text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}


class LimitedGemini(Limited, GeminiServer):
    async def answer(self, received: Received) -> Response:
        self.script.blocks = self.decide(received)
        self.script.error = None
        if (size := self.size(received)) > self.window:
            message = f"The input token count ({size}) exceeds the maximum number of tokens allowed ({self.window})."
            self.script.error = (400, "INVALID_ARGUMENT", message)
        return await super().answer(received)

    def call(self) -> dict[str, Any]:
        return {"functionCall": {"name": "look", "args": {"number": self.steps}}}

    def said(self, text: str) -> dict[str, Any]:
        return {"text": text}


LIMITED: dict[str, type[LimitedAnthropic | LimitedGemini]] = {"anthropic": LimitedAnthropic, "gemini": LimitedGemini}


@contextlib.contextmanager
def translated(
    provider: str,
    server: AnthropicServer | GeminiServer,
    folder: Path,
    profile: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Iterator[openai.OpenAI]:
    settings = {
        "upstreams": {"main": {"provider": provider, "base_url": server.url, "api_key": server.key}},
        "models": [{"match": "*", "upstream": "main", **({"profile": dict(profile)} if profile else {})}],
        "policies": {"default": dict(policy or {})},
    }
    with proxied(settings, folder) as url, client(url) as caller:
        yield caller


@pytest.fixture(params=sorted(LIMITED))
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def session(caller: openai.OpenAI, turns: int) -> list[Any]:
    """A tool session in which every second turn is streamed; the headers of its answers."""
    headers = []
    messages: list[Any] = [{"role": "system", "content": "Be careful."}]
    number = 0
    for index in range(turns):
        if messages[-1]["role"] != "tool":
            number += 1
            messages.append({"role": "user", "content": f"Question {number}: how is part {number}?"})
        raw: Any = caller.chat.completions.with_raw_response.create(
            model="m-1", messages=messages, tools=TOOLS, stream=index % 2 == 1
        )
        headers.append(raw.headers)
        answer = gather(raw.parse()) if index % 2 else message_of(raw.parse())
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            found = "\n".join(f"part {number}, line {line}: fine" for line in range(70))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return headers


def message_of(answer: Any) -> dict[str, Any]:
    message = answer.choices[0].message.model_dump(exclude_none=True)
    return {key: message[key] for key in ("role", "content", "tool_calls") if key in message}


def test_a_tool_session_is_compacted_on_the_way(provider: str, tmp_path: Path) -> None:
    profile = {"context_window": 8_000, "max_output_tokens": 1_000, "tokenizer": "o200k_base"}
    with LIMITED[provider]() as server, translated(provider, server, tmp_path, profile) as caller:
        headers = session(caller, 30)
    conversations = [r for r in server.requests if "<transcript>" not in json.dumps(r.body)]
    summaries = [r for r in server.requests if "<transcript>" in json.dumps(r.body)]
    assert len(conversations) == 30
    assert 1 <= len(summaries) <= 10
    assert {h["x-compaction-retries"] for h in headers} == {"0"}
    assert {h.get("x-compaction-summary", "stored") for h in headers} <= {"made", "stored"}
    assert sum(h["x-compaction"] == "compacted" for h in headers) >= 10
    assert SUMMARY in json.dumps(conversations[-1].body)
    assert "tools" not in summaries[0].body


def test_the_providers_own_refusal_is_learned_from(provider: str, tmp_path: Path) -> None:
    with LIMITED[provider]() as server, translated(provider, server, tmp_path) as caller:
        server.window = 6_000
        headers = session(caller, 30)
    assert sum(int(h["x-compaction-retries"]) for h in headers) <= 2
    assert max(server.size(r) for r in server.requests[-5:]) <= 6_000
    assert headers[-1]["x-compaction"] == "compacted"


def test_what_cannot_fit_is_said_in_the_providers_words(provider: str, tmp_path: Path) -> None:
    with LIMITED[provider]() as server, translated(provider, server, tmp_path) as caller:
        server.window = 4_000
        messages: list[Any] = [
            {"role": "system", "content": "word " * 12_000},
            {"role": "user", "content": "Hello there"},
        ]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as refused:
                caller.chat.completions.create(model="m-1", messages=messages, stream=stream)
            assert refused.value.code == "context_length_exceeded"
            assert "4000" in refused.value.message
            assert "Shorten the system messages" in refused.value.message
        assert len(server.requests) <= 6
