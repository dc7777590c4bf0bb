"""The upstream's script: the replies of a case, then completions, and summaries for requests that ask for one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.compare.case import Case, Reply
from bench.compare.setup import SUMMARIZER
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer
from tests.kit.three_apis import PATHS, Answer

FAILS = 25
"""About one in this many summary requests gets an error. Three in a row, which are rare, open the circuit breaker."""

READS = 20
"""Iterations of the event loop that read everything the proxy has sent, new connections included."""

_SUMMARIZER = json.dumps(SUMMARIZER).encode()[:-1]
_NOTES = b"</write_notes>"
_SUMMARY = """\
- The task is to keep the service fast.
- Files were read one by one; nothing was changed so far.
- The next step is a measurement under load.
- This is note {}."""


@dataclass
class Answers:
    """Answers depend on the case and on the request's bytes alone. ``waiting`` has events that answers wait for."""

    left: list[Reply] = field(default_factory=list)
    summary: Sequence[Step] | None = None
    asked: int = 0
    waiting: list[threading.Event] = field(default_factory=list)

    def begin(self, case: Case) -> None:
        """Use the replies of this case from now on."""
        self.left = list(case.replies)
        self.summary = case.summary
        self.asked = 0

    def __call__(self, arrived: Arrived) -> Sequence[Step]:
        """See ``tests.kit.raw_upstream.Script``."""
        if is_summary(arrived):
            return self.summary or _summary(arrived)
        self.asked += 1
        if self.asked == 1:
            return self._steps(arrived)
        # After an overflow, the proxy summarizes in the background. A later attempt finds that summary done.
        event = threading.Event()
        self.waiting.append(event)
        return [event, *self._steps(arrived)]

    def _steps(self, arrived: Arrived) -> Sequence[Step]:
        if self.left and self.left[0].when(arrived):
            return self.left.pop(0).steps
        stream = decoded(arrived).get("stream") is True
        made = Answer(f"Answer {_digest(arrived)}.", prompt=len(arrived.body) // 4, id=_digest(arrived))
        return made.steps(api_of(arrived), stream=stream)


class Upstream(RawUpstream):
    """Records requests, and can catch up with the proxy on a busy machine."""

    def catch_up(self) -> None:
        """Read and answer everything that the proxy has sent so far."""
        asyncio.run_coroutine_threadsafe(_iterate(), self._loop).result()


def is_summary(arrived: Arrived) -> bool:
    """Return whether the proxy asks for a summary."""
    body = arrived.body
    return _SUMMARIZER in body[:200] or _SUMMARIZER in body[-200:] or _NOTES in body


def api_of(arrived: Arrived) -> str:
    """Return the API of a request's path."""
    target = arrived.target.partition("?")[0]
    return next((api for api, path in PATHS.items() if target.startswith(path)), "chat")


def decoded(arrived: Arrived) -> dict[str, Any]:
    """Return the fields of a request, none if its body isn't valid."""
    try:
        value = json.loads(arrived.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def _iterate() -> None:
    for _ in range(READS):
        await asyncio.sleep(0)


def _summary(arrived: Arrived) -> Sequence[Step]:
    digest = hashlib.sha256(arrived.body).digest()
    text, tokens, api = _SUMMARY.format(_digest(arrived)), len(arrived.body) // 4, api_of(arrived)
    if digest[0] % FAILS == 0:
        return [answer(b'{"error": {"message": "out of order"}}', "500 Internal Server Error")]
    notes = f"<notes>\n{text}\n</notes>" if _NOTES in arrived.body else text
    return Answer(notes, prompt=tokens).steps(api, stream=decoded(arrived).get("stream") is True)


def _digest(arrived: Arrived) -> str:
    return hashlib.sha256(arrived.body).hexdigest()[:12]
