"""Asking a model for a summary, by way of the same lanes as every other request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.compaction.message import TextCounter, replaceable_text
from proxy.errors import UpstreamError
from proxy.summary.quality import Written
from proxy.summary.writing import SummaryFailed, SummaryTooLong
from proxy.upstream.lane import Lane, Outgoing
from proxy.upstream.overflow import recognise

# Families that think before they write: `max_tokens` is refused or their thinking counts towards it.
_REASONING_PREFIXES = ("gpt-5", "o1", "o3", "o4")
REASONING_TOKENS = 8_000

# A model told to write at most so many words may go a little over; what is over the cap is cut by whole lines.
OUTPUT_MARGIN = 1.5

_ANSWER_LIMIT = 4_000_000


class LaneModel:
    """A summary model at an upstream.

    ``room`` is what its input may take in tokens, ``max_output`` what it may write at most, ``credential`` the
    caller's key where the upstream has none of its own, ``timeout`` in seconds for one call.
    """

    def __init__(
        self,
        lane: Lane,
        model: str,
        *,
        room: int | None,
        max_output: int | None,
        count: TextCounter,
        credential: str | None,
        timeout: float,
    ) -> None:
        self.room = room
        self.count = count
        self._lane = lane
        self._max_output = max_output
        self._model = model
        self._credential = credential
        self._timeout = timeout

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Written:
        """See ``SummaryModel``."""
        body = msgspec.json.encode(
            {"model": self._model, "messages": messages, "stream": False, **self._limit(max_tokens)}
        )
        request = Outgoing(
            body=body,
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
        return _read(answer.status, b"".join(chunks))

    def _limit(self, max_tokens: int) -> dict[str, int]:
        name = "max_completion_tokens" if _reasons(self._model) else "max_tokens"
        return {name: output_limit(self._model, max_tokens, self._max_output)}


def output_limit(model: str, max_tokens: int, max_output: int | None) -> int:
    """The output that a model is asked for where a summary of ``max_tokens`` is wanted, its thinking included."""
    limit = int(max_tokens * OUTPUT_MARGIN) + (REASONING_TOKENS if _reasons(model) else 0)
    return min(limit, max_output or limit)


def _reasons(model: str) -> bool:
    return model.rsplit("/", 1)[-1].startswith(_REASONING_PREFIXES)


def _read(status: int, body: bytes) -> Written:
    if recognise(status, body) is not None:
        raise SummaryTooLong("the summary model refused the transcript as too long")
    if status != 200:
        raise SummaryFailed(f"the summary model answered with status {status}")
    try:
        choice = msgspec.json.decode(body)["choices"][0]
        message = choice["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, IndexError, TypeError) as error:
        raise SummaryFailed("the answer is no chat completion") from error
    if not isinstance(message, Mapping):
        raise SummaryFailed("the answer is no chat completion")
    # Thoughts and pictures among the parts are no summary.
    return Written(replaceable_text(message) or "", choice.get("finish_reason"), refused=bool(message.get("refusal")))
