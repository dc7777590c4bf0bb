"""Request summaries from a model, through the same transports as every other request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.compaction.format import TextCounter
from proxy.dialects.chat.request import OUTPUT_FIELDS
from proxy.errors import UpstreamError, UpstreamUnreachable
from proxy.http.headers import Credential
from proxy.overflow import Overflow, recognise
from proxy.summary.budget import Budget
from proxy.summary.chunking import SummaryFailed, SummaryTooLong
from proxy.summary.quality import Written
from proxy.upstream.transport import Outgoing, Transport

# Names of reasoning families, whose reasoning counts toward the output. Models that reason only on request (Claude,
# hybrid models) match if a gateway marks that in the name.
_REASONING = re.compile(
    r"(?<![a-z0-9])(?:gpt-[5-9]|o[1-9](?![a-z0-9.])|gpt-oss|codex-mini|deepseek[-.]?r\d|r1(?![a-z0-9.])|qwq|qvq|qwen-?3"
    r"|gemini-(?:2\.5|[3-9])|gemini-(?:flash|pro)-(?:lite-)?latest|grok-(?:3-mini|[4-9]|code)|magistral|minimax-m[1-9]"
    r"|glm-(?:4\.[5-9]|[5-9]|z1)|kimi-k2\.[5-9]|nemotron|seed-oss|ernie-x|hunyuan-(?:t1|a13b)|exaone-deep|mimo|phi-4-mini-flash)"
    r"|reason|think"
)
_NOT_REASONING = re.compile(r"non-?(?:reason|think)|no-?think|qwen-?3[^/]{0,40}instruct|chat-latest")
REASONING_TOKENS = 8_000

# OpenAI's own families reject `max_tokens`; other servers may support no other field.
_COMPLETION_FIELD = re.compile(r"(?:gpt-[5-9]|o[1-9](?![a-z0-9.])|codex-mini)")

# A model may slightly exceed the word limit in the prompt. The proxy cuts the excess by whole lines.
OUTPUT_MARGIN = 1.5

_ANSWER_LIMIT = 4_000_000

_INVALID_REQUEST = frozenset({400, 422})

_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_TEXT_TYPES = ("text", "output_text", None)


@dataclass(slots=True, eq=False, repr=False)
class UpstreamSummaryModel:
    """A summary model at an upstream.

    ``input_limit`` and ``max_output`` are in tokens, and ``timeout`` in seconds per call. ``credential`` is the
    caller's key if the upstream has none of its own. After an overflow, ``on_overflow`` gets the overflow and the
    request's input and output tokens as counted here. ``budget`` limits the cost of calls for the caller's team.
    """

    transport: Transport
    model: str
    upstream: str
    count: TextCounter
    timeout: float
    input_limit: int | None = None
    max_output: int | None = None
    credential: Credential | None = None
    on_overflow: Callable[[Overflow, int, int], None] | None = None
    budget: Budget | None = None

    @property
    def name(self) -> str:
        """The upstream and the model."""
        return f"{self.upstream} {self.model}"

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """Send a summary request. Raises ``SummaryFailed``, or ``SummaryTooLong`` if the input overflows."""
        limit = self._limit(max_tokens)
        fields = {"model": self.model, "messages": messages, "stream": False}
        status, body = await self._paid({**fields, **limit}, sum(limit.values()))
        overflow = recognise(status, body)
        if overflow is None and status in _INVALID_REQUEST and any(name.encode() in body for name in OUTPUT_FIELDS):
            # The limit is too high for the model, or the server names the field differently. Try without a limit.
            status, body = await self._paid(fields, sum(limit.values()))
            overflow = recognise(status, body)
        if overflow is not None:
            if self.on_overflow is not None:
                size = self.count("\n".join(str(message["content"]) for message in messages))
                self.on_overflow(overflow, size, sum(limit.values()))
            raise SummaryTooLong("the summary model rejected the transcript as too long")
        return _read(status, body)

    async def _paid(self, body: Mapping[str, Any], most: int) -> tuple[int, bytes]:
        """Send a call that writes up to ``most`` tokens, charged to the team. Raises ``SummaryFailed``."""
        if self.budget is None:
            return await self._answer(body)
        # Counting a long transcript would block the event loop.
        prompt = await asyncio.to_thread(lambda: sum(self.count(message["content"]) for message in body["messages"]))
        with self.budget.call(prompt + most) as call:
            try:
                status, answer = await self._answer(body)
            except SummaryFailed as failure:
                if isinstance(failure.__cause__, UpstreamUnreachable):
                    call.cost = 0
                raise
            call.cost = await self._cost(prompt, answer) if status == 200 else 0
        return status, answer

    async def _cost(self, prompt: int, answer: bytes) -> int:
        """Return the cost of a call in tokens, as the response reports it, or as counted here."""
        try:
            usage = msgspec.json.decode(answer, type=_Answer).usage
        except _UNDECODABLE:
            usage = None
        if usage is not None and usage.prompt_tokens:
            return usage.prompt_tokens + usage.completion_tokens
        try:
            written = _read(200, answer).text
        except SummaryFailed:
            return prompt
        return prompt + await asyncio.to_thread(self.count, written)

    async def _answer(self, body: Mapping[str, Any]) -> tuple[int, bytes]:
        request = Outgoing(
            body=msgspec.json.encode(body),
            model=self.model,
            stream=False,
            headers=[("content-type", "application/json")],
            credential=self.credential,
            timeout=self.timeout,
        )
        try:
            answer = await self.transport.send(request)
            try:
                chunks = []
                size = 0
                async for chunk in answer.body:
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > _ANSWER_LIMIT:
                        raise SummaryFailed("the response is too long")
            finally:
                await answer.close()
        except UpstreamError as error:
            raise SummaryFailed(error.code) from error
        return answer.status, b"".join(chunks)

    def _limit(self, max_tokens: int) -> dict[str, int]:
        own = self.model.lower().rsplit("/", 1)[-1]
        name = "max_completion_tokens" if _COMPLETION_FIELD.match(own) else "max_tokens"
        return {name: output_limit(self.model, max_tokens, self.max_output)}


def output_limit(model: str, max_tokens: int, max_output: int | None) -> int:
    """Return the output limit to request for a summary of ``max_tokens``, including the model's reasoning."""
    limit = int(max_tokens * OUTPUT_MARGIN) + (REASONING_TOKENS if reasons(model) else 0)
    return min(limit, max_output or limit)


def reasons(model: str) -> bool:
    """Return whether a model's name, with any prefix or suffix, belongs to a reasoning family."""
    name = model.lower()
    return _REASONING.search(name) is not None and _NOT_REASONING.search(name) is None


def _read(status: int, body: bytes) -> Written:
    if status != 200:
        raise SummaryFailed(f"the summary model returned status {status}")
    try:
        answer = msgspec.json.decode(body)
        choice = answer["choices"][0]
        message = choice["message"]
        failed = answer.get("error") or choice.get("error")
    except (*_UNDECODABLE, KeyError, IndexError, TypeError, AttributeError) as error:
        raise SummaryFailed("the response isn't a chat completion") from error
    if not isinstance(message, Mapping):
        raise SummaryFailed("the response isn't a chat completion")
    if failed:
        raise SummaryFailed("the response contains an error")
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    # Skip reasoning and image parts.
    texts = [part["text"] for part in parts if part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str)]
    return Written(
        content if isinstance(content, str) else "\n".join(texts),
        choice.get("finish_reason"),
        refused=bool(message.get("refusal")) or any(part.get("refusal") for part in parts),
    )
