"""Test requests to a summary model."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from proxy.summary.model import UpstreamSummaryModel, output_limit
from proxy.summary.quality import SummaryFailed, SummaryTooLong, Written
from proxy.upstream.transport import Answer, Outgoing
from tests.kit.summary_conversation import words

ASKED = [{"role": "user", "content": "Sum up."}]


class OneAnswer:
    """A transport that gives one answer to everything."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.requests: list[Outgoing] = []
        self.closed = 0
        self._body = body
        self._status = status

    async def send(self, request: Outgoing) -> Answer:
        self.requests.append(request)

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(self._body), 1 << 20):
                yield self._body[start : start + (1 << 20)]

        async def close() -> None:
            self.closed += 1

        return Answer(self._status, [], chunks(), close)

    async def aclose(self) -> None:
        pass


def completion(message: Any, reason: Any = "stop") -> bytes:
    return msgspec.json.encode({"choices": [{"index": 0, "message": message, "finish_reason": reason}]})


def ask(transport: Any, model: str = "small", most: int = 1000, max_output: int | None = None) -> Written:
    asked = UpstreamSummaryModel(transport, model, "main", words, 5.0, max_output=max_output, credential="key")
    return asyncio.run(asked.ask(ASKED, most))


@pytest.mark.parametrize(
    "model",
    ["gpt-5", "gpt-5.1-codex", "openrouter/openai/gpt-5-mini", "azure/o4-mini", "o1", "o3-2025-04-16",
     "openai/o1-preview",
     "gpt-oss-120b", "openai/gpt-oss-20b:free", "deepseek-r1", "deepseek-r1-distill-llama-70b", "deepseek-reasoner",
     "us.deepseek.r1-v1:0", "DeepSeek-R1:32b", "qwq-32b", "Qwen/Qwen3-32B", "qwen3:8b", "claude-3-7-sonnet:thinking",
     "anthropic/claude-3.7-sonnet-thinking", "gemini-2.5-flash", "google/gemini-3-pro-preview", "grok-4",
     "x-ai/grok-4-fast",
     "grok-3-mini", "magistral-medium-2506", "kimi-k2-thinking", "glm-4.6", "phi-4-reasoning", "sonar-reasoning-pro"],
)  # fmt: skip
def test_models_that_think(model: str) -> None:
    assert output_limit(model, 1000, None) == 9_500


@pytest.mark.parametrize(
    "model",
    ["gpt-4o", "gpt-4.1-mini", "claude-sonnet-4-5", "claude-3-5-haiku-latest", "gemini-2.0-flash", "gemini-1.5-pro",
     "llama-3.1-70b-instruct", "mistral-large", "qwen2.5-coder", "grok-3", "deepseek-chat", "gpt-5-chat-latest",
     "Qwen3-30B-A3B-Instruct-2507", "grok-4-fast-non-reasoning", "foo1", "pro1", "m", "command-r-plus", "command-r1.5"],
)  # fmt: skip
def test_models_that_do_not(model: str) -> None:
    assert output_limit(model, 1000, None) == 1_500


def test_a_refusal_is_known_by_its_field() -> None:
    assert ask(OneAnswer(completion({"content": None, "refusal": "No."}))).refused
    assert ask(OneAnswer(completion({"content": [{"type": "refusal", "refusal": "No."}]}))).refused
    assert not ask(OneAnswer(completion({"content": "Notes.", "refusal": None}))).refused


@pytest.mark.parametrize(
    "answer",
    [{"error": {"message": "SECRET"}}, {"error": {"message": "SECRET"}, "choices": [{"message": {"content": "x"}}]},
     {"choices": [{"message": {"content": "x"}, "error": {"code": 502}, "finish_reason": "error"}]}],
)  # fmt: skip
def test_an_error_beside_an_answer_is_a_failure(answer: Any) -> None:
    with pytest.raises(SummaryFailed):
        ask(OneAnswer(msgspec.json.encode(answer)))
    fine = {"error": None, "choices": [{"message": {"content": "x"}, "error": None}]}
    assert ask(OneAnswer(msgspec.json.encode(fine))).text == "x"


@pytest.mark.parametrize(
    "body",
    [b"", b"Bad Gateway", b"null", b"[]", b"{}", b'{"choices": []}', b'{"choices": [5]}', b'{"choices": ["x"]}',
     b'{"choices": [{"message": "text"}]}', completion({"content": "cut off"})[:-20],
     b'{"choices": [{"message": {"content": "\xff"}}]}', b"[" * 100_000,
     b'{"choices": [{"message": {"content": "' + b"x" * 4_100_000 + b'"}}]}'],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_what_is_no_completion_is_a_failure(body: bytes) -> None:
    transport = OneAnswer(body)
    with pytest.raises(SummaryFailed) as caught:
        ask(transport)
    assert not isinstance(caught.value, SummaryTooLong)
    assert transport.closed == 1


class Particular(OneAnswer):
    """A transport that answers to requests which name no limit of the output, and refuses all others."""

    async def send(self, request: Outgoing) -> Answer:
        named = b"max_tokens" in request.body or b"max_completion_tokens" in request.body
        self._status = 400 if named else 200
        self._body = REFUSED if named else completion({"role": "assistant", "content": "Notes."})
        return await super().send(request)


REFUSED = b'{"error": {"message": "max_tokens is too large: 1500. This model supports at most 1024.", "code": null}}'


def test_a_model_that_refuses_the_output_asked_for_writes_what_it_can() -> None:
    transport = Particular(b"")
    assert ask(transport).text == "Notes."
    assert [b'"max_tokens":1024' in sent.body for sent in transport.requests] == [False, True, False]
    assert len(transport.requests) == transport.closed == 3


def test_what_a_refusal_says_of_the_limit_is_passed_on() -> None:
    refusal = b'{"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 9000, "n_ctx": 8192}}'
    heard: list[tuple[int | None, int, int]] = []
    asked = UpstreamSummaryModel(
        OneAnswer(refusal, 400),
        "small",
        "main",
        words,
        5.0,
        on_overflow=lambda overflow, sent, output: heard.append((overflow.limit, sent, output)),
    )
    with pytest.raises(SummaryTooLong):
        asyncio.run(asked.ask(ASKED, 1000))
    assert heard == [(8192, words("Sum up."), 1500)]
