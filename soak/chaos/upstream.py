"""An upstream that responds, pauses, or closes the connection at any byte, as a request's header selects.

A response contains a digest of the last message, so that the client detects a wrong or incomplete one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.raw_upstream import Arrived, End, RawUpstream, Step, answer, chunk, stream_head
from tests.kit.three_apis import Answer, event
from tests.kit.upstream import faults

FAULT = "x-soak-fault"
"""The header that selects a failure of the response."""

BYTES_A_TOKEN = 6
WINDOWS = {"wide": 16_000, "tight": 9_000}
"""Input tokens of each model, at ``BYTES_A_TOKEN`` each. The proxy's configuration has the largest for both."""

SUMMARY = "Goal: go on as agreed. Done so far: what was asked for. Next: the rest."
SUMMARY_FAILS = 0.1
PIECE = 4
"""Characters of text in a chunk of a stream."""


def digest_of(content: str) -> str:
    """Return the response's text for a last message."""
    return "answer-" + hashlib.blake2b(content.encode(), digest_size=40).hexdigest()


@dataclass
class Tally:
    """The number of requests by kind, of conversations by ``x-compaction``, and the lost, wrong, or malformed ones."""

    done: Counter[str] = field(default_factory=Counter)
    compacted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Upstream(RawUpstream):
    """The upstream server."""

    def __init__(self, seed: int) -> None:
        super().__init__(self._steps)
        self.seen = Tally()
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def _steps(self, arrived: Arrived) -> Sequence[Step]:
        """Return the answer to a request."""
        self.arrived.clear()
        if arrived.target != "/v1/chat/completions":
            self.seen.done["other"] += 1
            return [_plain(200, {"digest": hashlib.blake2b(arrived.body, digest_size=20).hexdigest()})]
        body = json.loads(arrived.body)
        fault = arrived.header(FAULT) or ""
        last = str(body["messages"][-1].get("content") or "")
        if not fault and not last.startswith("turn "):
            return self._summary()
        self.seen.wrong += map(str, faults(body)[:1])
        size = sum(len(str(m.get("content") or "")) + len(str(m.get("tool_calls") or "")) for m in body["messages"])
        tokens, window = size // BYTES_A_TOKEN, WINDOWS[body["model"]]
        if tokens > window:
            self.seen.done["refused as too long"] += 1
            text = f"maximum context length is {window} tokens. However, your messages resulted in {tokens} tokens."
            error = {"message": f"This model's {text}", "type": "invalid_request_error"}
            return [_plain(400, {"error": {**error, "code": "context_length_exceeded"}})]
        self.seen.done[fault.partition(":")[0] or "answered"] += 1
        return _answered(fault, Answer(digest_of(last), prompt=tokens), stream=bool(body.get("stream")))

    def _summary(self) -> Sequence[Step]:
        self.seen.done["summary"] += 1
        failed = self._random.random() < SUMMARY_FAILS
        error = {"error": {"message": "No summary today.", "type": "server_error"}}
        made = _plain(500, error) if failed else answer(Answer(SUMMARY, prompt=500).parts("chat", stream=False)[1])
        return [self._random.uniform(0.01, 0.4), made]


def _answered(fault: str, made: Answer, *, stream: bool) -> Sequence[Step]:
    name, _, argument = fault.partition(":")
    if name == "reset before":
        return [End.RESET]
    if name == "status":
        return [_plain(int(argument), {"error": {"message": f"Status {argument}.", "type": "soak"}})]
    silence: list[Step] = [float(argument)] if name == "silent" else []
    whole = answer(made.parts("chat", stream=False)[1])
    parts = [*map(chunk, _events(made)), chunk(b"")] if stream else [whole]
    pause = 0.2 if name == "slow" else 0.002
    steps: list[Step] = [step for part in parts for step in (part, pause)] if stream else [*parts]
    if name == "reset":
        sent = b"".join(parts)
        steps = [sent[: int(argument) % len(sent)], End.RESET]
    return [*silence, *([stream_head()] if stream else []), *steps]


def _plain(status: int, value: Any) -> bytes:
    return answer(json.dumps(value).encode(), f"{status} X")


def _events(made: Answer) -> Iterator[bytes]:
    """Yield the events of a stream with many small pieces of text."""
    pieces = [made.text[start : start + PIECE] for start in range(0, len(made.text), PIECE)]
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    usage = {"prompt_tokens": made.prompt, "completion_tokens": 40, "total_tokens": made.prompt + 40}
    for delta in ({"role": "assistant", "content": ""}, *({"content": piece} for piece in pieces)):
        yield event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    yield b"data: [DONE]\n\n"
