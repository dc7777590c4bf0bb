"""The upstream's script: the answers of a case, then completions, and summaries for the summary model."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence

from bench.compare.setup import SUMMARIZER
from bench.compare.traffic import Case
from bench.upstream import completion
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, streamed

FAILS = 25
"""About one in this many summary requests gets an error. Three in a row, which are rare, open the circuit breaker."""

READS = 20
"""Iterations of the event loop that read everything the proxy has sent, new connections included."""

_SUMMARIZER = json.dumps(SUMMARIZER).encode()
_SUMMARY = """\
- The task is to keep the service fast.
- Files were read one by one; nothing was changed so far.
- The next step is a measurement under load.
- This is note {}."""


class Answers:
    """Answers depend on the case and on the request's bytes alone."""

    def __init__(self) -> None:
        self._left: list[Sequence[Step]] = []

    def begin(self, case: Case) -> None:
        """Use the answers of this case from now on."""
        self._left = list(case.answers)

    def __call__(self, arrived: Arrived) -> Sequence[Step]:
        """See ``tests.kit.raw_upstream.Script``."""
        digest = hashlib.sha256(arrived.body)
        tokens = len(arrived.body) // 4
        if is_summary(arrived):
            if digest.digest()[0] % FAILS == 0:
                return [answer(b'{"error": {"message": "out of order"}}', "500 Internal Server Error")]
            return [_completion(_SUMMARY.format(digest.hexdigest()[:12]), tokens)]
        if self._left:
            return self._left.pop(0)
        text = f"Answer {digest.hexdigest()[:12]}."
        return _stream(text) if b'"stream": true' in arrived.body[-200:] else [_completion(text, tokens)]


class Upstream(RawUpstream):
    """Records requests, and can catch up with the proxy on a busy machine."""

    def catch_up(self) -> None:
        """Read and answer everything that the proxy has sent so far."""
        asyncio.run_coroutine_threadsafe(_iterate(), self._loop).result()


async def _iterate() -> None:
    for _ in range(READS):
        await asyncio.sleep(0)


def is_summary(arrived: Arrived) -> bool:
    """Return whether the proxy asks for a summary."""
    return _SUMMARIZER in arrived.body[:200] or _SUMMARIZER in arrived.body[-200:]


def _completion(text: str, tokens: int) -> bytes:
    return answer(completion(text, tokens))


def _stream(text: str) -> list[Step]:
    parts = [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"index": 0, "delta": {"content": text}, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": "stop"},
    ]
    head = {"id": "chatcmpl-compare", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "compare"}
    events = [b"data: " + json.dumps({**head, "choices": [part]}).encode() + b"\n\n" for part in parts]
    return streamed([*events, b"data: [DONE]\n\n"])
