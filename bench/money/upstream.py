"""A stand-in upstream with a prompt cache and a clock that the benchmark moves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.money.cache import PrefixCache
from bench.quality.engine import MATERIAL
from bench.quality.summarizer import extract
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.units import arguments_of, text_of
from proxy.limits.profiles import Profile
from tests.kit.upstream import NOTES

COUNTER = ChatCounter(Profile("bench", tokenizer="o200k_base"))

NOTES_TOKENS = 1_000
"""Length of the notes that the stand-in writes."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, in tokens. ``kind`` is ``turn``, ``transcript``, or ``continue``."""

    kind: str
    prompt: int
    read: int
    output: int


class CachingUpstream:
    """The stand-in. ``now`` is the time in seconds, ``output`` the size of the next answer to a conversation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.output = 0
        self.calls: list[Call] = []
        self.prompts: list[list[bytes]] = []
        """The messages of each turn's prompt, as they arrived."""
        self._sizes: LRUCache[bytes, int] = LRUCache(20_000)
        self._cache = PrefixCache(self._size)
        self._ids = itertools.count(1)
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        fields = msgspec.json.decode(await request.body(), type=dict[str, msgspec.Raw])
        messages = [bytes(raw) for raw in msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])]
        return JSONResponse(self.answer(bytes(fields.get("tools", b"")), messages))

    def answer(self, tools: bytes, messages: list[bytes]) -> dict[str, Any]:
        """Return the response to a request, and record its cost."""
        last = text_of(msgspec.json.decode(messages[-1]))
        kind = "continue" if NOTES in last.splitlines() else "transcript" if MATERIAL.search(last) else "turn"
        parts = [tools, *messages] if tools else messages
        prompt, read = sum(map(self._size, parts)), self._cache.read(parts, self.now)
        text = "Done."
        if kind == "turn":
            self.prompts.append(messages)
        else:
            text = extract(
                _material(last) if kind == "transcript" else _texts(messages[:-1]), NOTES_TOKENS, COUNTER.text
            )
            if kind == "continue":
                text = f"<notes>\n{text}\n</notes>"
        output = self.output if kind == "turn" else COUNTER.text(text)
        self.calls.append(Call(kind, prompt, read, output))
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        identity = {"id": f"chatcmpl-{next(self._ids)}", "object": "chat.completion", "created": 0, "model": "m"}
        return {**identity, "choices": [choice], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": read}}}

    def _size(self, part: bytes) -> int:
        size = self._sizes.get(part)
        if size is None:
            value = msgspec.json.decode(part)
            size = COUNTER.message(value) if isinstance(value, dict) else COUNTER.text(part.decode())
            self._sizes[part] = size
        return size


def _material(request: str) -> str:
    found = MATERIAL.search(request)
    assert found is not None
    return "\n\n".join(filter(None, (found["previous"], found["transcript"])))


def _texts(messages: list[bytes]) -> str:
    """Return the texts of messages and the arguments of their calls, as a transcript has them."""
    texts = []
    for message in map(msgspec.json.decode, messages):
        if message["role"] != "system":
            texts += [text_of(message), *(text for _, text in arguments_of(message))]
    return "\n\n".join(texts)
