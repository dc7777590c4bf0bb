"""Asking a model for a summary, by way of the same lanes as every other request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from proxy.compaction.message import TextCounter
from proxy.dialects.chat.request import OUTPUT_FIELDS
from proxy.errors import UpstreamError, UpstreamUnreachable
from proxy.http.headers import Credential
from proxy.overflow import Overflow, recognise
from proxy.summary.budget import Budget
from proxy.summary.chunking import SummaryFailed, SummaryTooLong
from proxy.summary.quality import Written
from proxy.upstream.transport import Outgoing, Transport

# Families that think before they write, by what their names hold: their thinking counts towards the output. Those that
# think only when told to (Claude, hybrid models) have it in their names where a gateway tells them to.
_REASONING = re.compile(
    r"(?<![a-z0-9])(?:gpt-[5-9]|o[1-9](?![a-z0-9.])|gpt-oss|codex-mini|deepseek[-.]?r\d|r1(?![a-z0-9.])|qwq|qvq|qwen-?3"
    r"|gemini-(?:2\.5|[3-9])|gemini-(?:flash|pro)-(?:lite-)?latest|grok-(?:3-mini|[4-9]|code)|magistral|minimax-m[1-9]"
    r"|glm-(?:4\.[5-9]|[5-9]|z1)|kimi-k2\.[5-9]|nemotron|seed-oss|ernie-x|hunyuan-(?:t1|a13b)|exaone-deep|mimo|phi-4-mini-flash)"
    r"|reason|think"
)
_NOT_REASONING = re.compile(r"non-?(?:reason|think)|no-?think|qwen-?3[^/]{0,40}instruct|chat-latest")
REASONING_TOKENS = 8_000

# OpenAI's own families refuse `max_tokens`; other servers may not know any other field.
_COMPLETION_FIELD = re.compile(r"(?:gpt-[5-9]|o[1-9](?![a-z0-9.])|codex-mini)")

# A model told to write at most so many words may go a little over; what is over the cap is cut by whole lines.
OUTPUT_MARGIN = 1.5

_ANSWER_LIMIT = 4_000_000

_WRONG = frozenset({400, 422})
"""Statuses that say that a request is wrong."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_TEXT_TYPES = ("text", "output_text", None)


class UpstreamSummaryModel:
    """A summary model at an upstream.

    ``name`` tells it from other models and from those of other upstreams. ``room`` is what its input may take in
    tokens, ``max_output`` what it may write at most, ``credential`` the caller's key where the upstream has none of its
    own, ``timeout`` in seconds for one call. ``told`` hears of refusals as too long: what they say, and the tokens of
    the request as counted here, input and output. ``budget`` is what the calls of the caller's team may cost.
    """

    def __init__(
        self,
        lane: Transport,
        model: str,
        *,
        upstream: str,
        room: int | None,
        max_output: int | None,
        count: TextCounter,
        credential: Credential | None,
        timeout: float,
        told: Callable[[Overflow, int, int], None] | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.name = f"{upstream} {model}"
        self.room = room
        self.count = count
        self._lane = lane
        self._max_output = max_output
        self._model = model
        self._credential = credential
        self._timeout = timeout
        self._told = told
        self._budget = budget

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """See ``SummaryModel``."""
        limit = self._limit(max_tokens)
        asked = {"model": self._model, "messages": messages, "stream": False}
        status, body = await self._paid({**asked, **limit}, sum(limit.values()))
        overflow = recognise(status, body)
        if overflow is None and status in _WRONG and any(name.encode() in body for name in OUTPUT_FIELDS):
            # The model writes less than it was asked for, or the field has another name there: it writes what it can.
            status, body = await self._paid(asked, sum(limit.values()))
            overflow = recognise(status, body)
        if overflow is not None:
            if self._told is not None:
                size = self.count("\n".join(str(message["content"]) for message in messages))
                self._told(overflow, size, sum(limit.values()))
            raise SummaryTooLong("the summary model refused the transcript as too long")
        return _read(status, body)

    async def _paid(self, body: Mapping[str, Any], most: int) -> tuple[int, bytes]:
        """An answer, of ``most`` tokens at most, on the account of the team. Raises ``SummaryFailed``."""
        if self._budget is None:
            return await self._answer(body)
        # Counting a whole transcript takes a while.
        prompt = await asyncio.to_thread(lambda: sum(self.count(message["content"]) for message in body["messages"]))
        with self._budget.call(prompt + most) as call:
            try:
                status, answer = await self._answer(body)
            except SummaryFailed as failure:
                if isinstance(failure.__cause__, UpstreamUnreachable):
                    call.cost = 0
                raise
            call.cost = await self._cost(prompt, answer) if status == 200 else 0
        return status, answer

    async def _cost(self, prompt: int, answer: bytes) -> int:
        """What a call has cost in tokens, as the answer reports it, or as counted here where it does not."""
        try:
            usage = msgspec.json.decode(answer, type=_Answer).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
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
            model=self._model,
            stream=False,
            headers=[("content-type", "application/json")],
            credential=self._credential,
            timeout=self._timeout,
        )
        try:
            answer = await self._lane.send(request)
            try:
                chunks = []
                size = 0
                async for chunk in answer.body:
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > _ANSWER_LIMIT:
                        raise SummaryFailed("the answer is too long")
            finally:
                await answer.close()
        except UpstreamError as error:
            raise SummaryFailed(error.code) from error
        return answer.status, b"".join(chunks)

    def _limit(self, max_tokens: int) -> dict[str, int]:
        own = self._model.lower().rsplit("/", 1)[-1]
        name = "max_completion_tokens" if _COMPLETION_FIELD.match(own) else "max_tokens"
        return {name: output_limit(self._model, max_tokens, self._max_output)}


def output_limit(model: str, max_tokens: int, max_output: int | None) -> int:
    """The output that a model is asked for where a summary of ``max_tokens`` is wanted, its thinking included."""
    limit = int(max_tokens * OUTPUT_MARGIN) + (REASONING_TOKENS if reasons(model) else 0)
    return min(limit, max_output or limit)


def reasons(model: str) -> bool:
    """Whether a model is known to think before it writes, whatever stands before or after its name."""
    name = model.lower()
    return _REASONING.search(name) is not None and _NOT_REASONING.search(name) is None


def _read(status: int, body: bytes) -> Written:
    if status != 200:
        raise SummaryFailed(f"the summary model answered with status {status}")
    try:
        answer = msgspec.json.decode(body)
        choice = answer["choices"][0]
        message = choice["message"]
        failed = answer.get("error") or choice.get("error")
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as error:
        raise SummaryFailed("the answer is no chat completion") from error
    if not isinstance(message, Mapping):
        raise SummaryFailed("the answer is no chat completion")
    if failed:
        raise SummaryFailed("the answer says that it failed")
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    # Thoughts and pictures among the parts are no summary.
    texts = [part["text"] for part in parts if part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str)]
    return Written(
        content if isinstance(content, str) else "\n".join(texts),
        choice.get("finish_reason"),
        refused=bool(message.get("refusal")) or any(part.get("refusal") for part in parts),
    )
