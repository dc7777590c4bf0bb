"""The writers of summaries by the method of a policy, and the tries that they make."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence

import structlog

from proxy.store.guarded import Change, CircuitBreaker
from proxy.summary.allowance import AllowanceSpent
from proxy.summary.notes import NotesAfterRefusal, NotesWriter
from proxy.summary.quality import SummaryRejected
from proxy.summary.single_flight import Progress
from proxy.summary.store import Cause
from proxy.summary.transcript import TranscriptWriter
from proxy.summary.writer import SummaryFailed, SummaryRefused, SummaryTry, SummaryUnasked, SummaryWriter
from proxy.telemetry.metrics import BREAKER, SUMMARIES

log = structlog.get_logger(__name__)

WRITERS: Mapping[str, Sequence[type[SummaryWriter]]] = {
    "transcript": (TranscriptWriter, NotesAfterRefusal),
    "continue": (NotesWriter, TranscriptWriter),
}
"""The writers of each method, in the order to try them: from the cheapest to the surest."""

FIRST_PAUSE = 60.0  # seconds of a breaker's first pause
LONGEST_PAUSE = 600.0  # upper bound of a pause, in seconds


class SummaryTries:
    """Makes the tries of writers. Keeps a circuit breaker for each tenant and name of a try."""

    def __init__(self) -> None:
        self._breaker = CircuitBreaker(FIRST_PAUSE, LONGEST_PAUSE, is_failure=_is_failure, report=_report)

    async def first_text(
        self,
        tries: Sequence[SummaryTry],
        progress: Progress,
        *,
        tenant: str,
        policy: str,
        seconds: float,
        deadline: float,
    ) -> tuple[str | None, Cause]:
        """Return the first text that one of the tries writes. If there is none, return ``None`` and the cause.

        The tries have ``deadline`` seconds together, and each one at least ``seconds``. Requests that wait may skip all
        but the last one, see ``Patience``.
        """
        asked, clock = False, asyncio.get_running_loop().time
        cause: Cause = "no_model"
        end = clock() + deadline
        waiting = [one for one in tries if not one.after_refusal]
        others = [one for one in tries if one.after_refusal]
        while waiting:
            (key, write, _), *waiting = waiting
            attempt = self._breaker.attempt((tenant, *key))
            if attempt is None:
                cause = cause if asked else "breaker_open"
                SUMMARIES.labels(outcome="skipped").inc()
                continue
            left = (end - clock()) / (len(waiting) + 1)
            asked = True
            try:
                with attempt:
                    # Not wait_for: its task and the error would form a reference cycle with the conversation.
                    async with progress.trying(max(seconds, left), last=not waiting):
                        text = await write()
            except AllowanceSpent:
                return None, "over_budget"
            except (SummaryFailed, SummaryRejected, TimeoutError) as failure:
                cause = "timeout" if isinstance(failure, TimeoutError) or cause == "timeout" else "failed"
                SUMMARIES.labels(outcome="failed").inc()
                log.warning("summary.failed", reason=str(failure) or "timeout", policy=policy)
                if isinstance(failure, SummaryRefused):
                    waiting, others = [*waiting, *others], []
                continue
            SUMMARIES.labels(outcome="made").inc()
            return text, cause
        return None, cause


def _is_failure(error: BaseException) -> bool:
    """Return whether the model failed. Otherwise the caller left, or the proxy sent no request."""
    return isinstance(error, Exception) and not isinstance(error, SummaryUnasked)


def _report(change: Change, key: Hashable, pause: float) -> None:
    BREAKER.labels(change=change).inc()
    # Omit the tenant, because it may be the digest of a caller's key.
    model = key[1:] if isinstance(key, tuple) else key
    log.warning(f"summary.breaker_{change}", model=model, **({"pause": pause} if pause else {}))
