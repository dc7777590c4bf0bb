"""Finish the records of requests, and write them in batches in the background."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from time import perf_counter

import structlog
from starlette.types import Scope

from proxy.http.request_body import Sent
from proxy.records.model import RecordStore
from proxy.store import Refused, StoreFailed
from proxy.store.guarded import Change, CircuitBreaker
from proxy.store.tenant_cache import cancelled
from proxy.telemetry.metrics import RECORDS
from proxy.telemetry.record import RECORD, RequestRecord, current, new_id
from proxy.telemetry.trace_context import Trace

log = structlog.get_logger(__name__)

WAITING = 4_000
"""Records that may wait to be written. The proxy drops the oldest ones over that."""

BATCH = 500
"""Records per write."""

LARGEST_PRICE = 10**17
"""US dollars times 10^12. A higher price of one request follows from a wrong figure, and counts as unknown."""

TENANTS = 4_000
"""Tenants to remember. The set starts again when it is full."""

PAUSE_SECONDS = 0.5
"""Seconds between two writes."""

WRITE_SECONDS = 5.0
"""Timeout of a write."""

CLOSING_SECONDS = 5.0
"""Seconds to write the last records when the process ends."""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds without a write after repeated failures. The pause doubles after each failed attempt."""

ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"})
"""Paths without ids."""

CLIENT_LEFT = "client_disconnected"

Sink = Callable[[RequestRecord], None]
"""Takes a finished record. It must be quick and mustn't raise."""

BeginTrace = Callable[[Scope], Trace]
"""Returns the trace of a request that has just arrived."""


class Recorder:
    """The records of one process."""

    def __init__(
        self,
        store: RecordStore | None,
        seconds: Callable[[], float],
        sinks: Sequence[Sink] = (),
        begin_trace: BeginTrace | None = None,
    ) -> None:
        """Write to ``store``, if there is one. ``seconds`` returns how long records are kept."""
        self._store = store
        self._seconds = seconds
        self._sinks = sinks
        self._begin_trace = begin_trace
        self._waiting: deque[RequestRecord] = deque()
        self._tenants: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._breaker = CircuitBreaker(FIRST_PAUSE, LONGEST_PAUSE, report=_report)

    def begin(self, scope: Scope) -> RequestRecord:
        """Return the record of a request that has just arrived, and put it into the scope and the task's context."""
        record = RequestRecord(new_id(), time.time(), path=_shown(scope["path"]))
        if self._begin_trace is not None:
            record.trace = self._begin_trace(scope)
        scope[RECORD] = record
        current.set(record)
        return record

    def end(self, record: RequestRecord, sent: Sent, started: float) -> None:
        """Finish a record after its response. ``started`` is the request's arrival by ``perf_counter``."""
        record.status, record.bytes_out = sent.status, sent.size
        if sent.error is not None:
            record.error = sent.error
            if sent.refused:
                record.verdict = "refused"
        elif not sent.complete:
            record.error = CLIENT_LEFT
            record.status = 499
        now = perf_counter()
        record.phases["total"] = _ms(now - started)
        if sent.begun:
            record.phases["first_byte"] = _ms(sent.first_byte - started)
        self.add(record)

    def add(self, record: RequestRecord) -> None:
        """Add a finished record."""
        cost = record.cost
        if cost is not None and max(cost.sent, cost.as_received, cost.forecast or 0) > LARGEST_PRICE:
            log.warning("records.price_ignored", record=record.id, team=record.team, model=record.model)
            record.cost = None
        for sink in self._sinks:
            sink(record)
        if self._store is None:
            return
        if len(self._tenants) >= TENANTS:
            self._tenants.clear()
        self._tenants.add(record.tenant)
        self._waiting.append(record)
        if len(self._waiting) > WAITING:
            self._waiting.popleft()
            RECORDS.labels(outcome="dropped").inc()
        if (self._task is None or self._task.done()) and not self._closing:
            # The task writes the records of many requests, so its log lines name none.
            self._task = asyncio.get_running_loop().create_task(self._write_soon(), context=Context())

    @property
    def failing(self) -> bool:
        """Return whether writes failed repeatedly, and none has succeeded since."""
        return self._breaker.is_open("records")

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the waiting records of forgotten tenants. Return the tenants that this process has recorded."""
        tenants = {tenant for tenant in self._tenants if forgotten(tenant)}
        self._waiting = deque(record for record in self._waiting if record.tenant not in tenants)
        return tenants

    async def flush(self) -> None:
        """Write all waiting records now. Raises ``StoreFailed``."""
        while self._waiting:
            await self._write_batch()

    async def aclose(self) -> None:
        """Write the waiting records, and give up after ``CLOSING_SECONDS``."""
        self._closing = True
        if self._task is not None:
            await cancelled(self._task)
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self.flush()
        except (StoreFailed, TimeoutError) as failure:
            log.warning("records.not_written", records=len(self._waiting), reason=str(failure) or "timeout")

    async def _write_soon(self) -> None:
        while self._waiting:
            await asyncio.sleep(PAUSE_SECONDS)
            attempt = self._breaker.attempt("records")
            if attempt is None:
                continue
            try:
                with attempt:
                    await self.flush()
            except StoreFailed as failure:
                log.warning("records.write_failed", reason=str(failure), waiting=len(self._waiting))

    async def _write_batch(self) -> None:
        """Write the oldest records. If the store can't hold one of them, write them one at a time and drop that one."""
        batch = self._taken(BATCH)
        try:
            await self._write(batch)
        except Refused:
            self._put_back(batch)
            for _ in range(len(batch)):
                await self._write_one()

    async def _write_one(self) -> None:
        taken = self._taken(1)
        try:
            await self._write(taken)
        except Refused as error:
            RECORDS.labels(outcome="dropped").inc(len(taken))
            for one in taken:
                log.exception("records.record_dropped", record=one.id, team=one.team, reason=str(error))

    def _taken(self, most: int) -> list[RequestRecord]:
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    async def _write(self, batch: list[RequestRecord]) -> None:
        """Write records. If the store doesn't work, they wait again. Raises ``StoreFailed``."""
        if self._store is None:
            return
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._store.write(batch, self._seconds())
        except Refused:
            raise
        except (StoreFailed, TimeoutError, asyncio.CancelledError) as error:
            self._put_back(batch)
            if isinstance(error, TimeoutError):
                raise StoreFailed(f"no answer within {WRITE_SECONDS:g} s") from None
            raise
        except Exception as error:  # from the encoder of a store, or a fault of the proxy
            raise Refused(type(error).__name__) from error
        RECORDS.labels(outcome="written").inc(len(batch))

    def _put_back(self, batch: list[RequestRecord]) -> None:
        # A write that is still running may succeed. The store skips records that it already has.
        room = max(0, WAITING - len(self._waiting))
        RECORDS.labels(outcome="dropped").inc(max(0, len(batch) - room))
        self._waiting.extendleft(reversed(batch[max(0, len(batch) - room) :]))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _shown(path: str) -> str:
    """Return the first two names of a path. The rest may be ids that a client chose."""
    if path in ENDPOINTS:
        return path
    names = path.split("/", 3)
    return "/".join([*names[:3], *("…" for _ in names[3:])])[:80]


def _report(change: Change, key: object, pause: float) -> None:
    log.warning(f"records.breaker_{change}", pause=pause)
