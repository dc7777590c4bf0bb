"""Finish the records of requests, and write them in batches in the background."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from time import perf_counter

import structlog
from starlette.types import Scope

from proxy.http.request_body import Sent
from proxy.records.model import RecordStore
from proxy.store import Refused, StoreFailed
from proxy.store.tenant_cache import Place, Waiting, WriteBehind
from proxy.telemetry.metrics import RECORDS
from proxy.telemetry.record import RECORD, Refusal, RequestRecord, Trace, current, new_id

log = structlog.get_logger(__name__)

WAITING = 4_000
"""Records that may wait to be written. The proxy drops further ones."""

LARGEST_PRICE = 10**17
"""US dollars times 10^12. A higher price of one request follows from a wrong figure, and counts as unknown."""

TENANTS = 4_000
"""Tenants to remember. The set starts again when it is full."""

PAUSE_SECONDS = 0.5
"""Seconds between two writes, unless many records wait."""

WRITE_SECONDS = 5.0
"""Timeout of a write."""

ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"})
"""Paths without ids."""

CLIENT_LEFT = "client_disconnected"

Sink = Callable[[RequestRecord], None]
"""Takes a finished record. It must be quick. If it raises, the other sinks and the store still get the record."""

BeginTrace = Callable[[Scope], Trace]
"""Returns the trace of a request that has just arrived."""


_WRITTEN, _DROPPED = RECORDS.labels(outcome="written"), RECORDS.labels(outcome="dropped")


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
        self._tenants: set[str] = set()
        self._writes: WriteBehind[RequestRecord] = WriteBehind(
            "record", self._write, WAITING, _failed, _ended, gather_seconds=PAUSE_SECONDS
        )

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
            if sent.limit is not None:
                name, size, used = sent.limit
                record.refused_by = Refusal(name, size, math.ceil(time.time() + sent.retry_after), used)
        elif not sent.complete:
            record.error = CLIENT_LEFT
            record.status = 499
        now = perf_counter()
        if record.calls:
            record.phases["upstream"] = round(sum(call.ms for call in record.calls), 3)
        record.phases["total"] = _ms(now - started)
        if sent.begun:
            record.phases["first_byte"] = _ms(sent.first_byte - started)
        self.add(record)

    def add(self, record: RequestRecord) -> None:
        cost = record.cost
        if cost is not None and max(cost.sent, cost.as_received, cost.forecast or 0) > LARGEST_PRICE:
            log.warning("records.price_ignored", record=record.id, team=record.team, model=record.model)
            record.cost = None
        for sink in self._sinks:
            try:
                sink(record)
            except Exception as error:  # the response has been sent, and the ledger needs the record
                log.exception("records.sink_failed", error=type(error).__name__)
        if self._store is None:
            return
        if len(self._tenants) >= TENANTS:
            self._tenants.clear()
        self._tenants.add(record.tenant)
        if not self._writes.put((record.tenant, record.id), record, 1, 0.0):
            _DROPPED.inc()

    @property
    def failing(self) -> bool:
        """Return whether the last write failed."""
        return self._writes.failing

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the waiting records of forgotten tenants. Return the tenants that this process has recorded."""
        tenants = {tenant for tenant in self._tenants if forgotten(tenant)}
        self._writes.forget(forgotten)
        return tenants

    async def aclose(self) -> None:
        """Write the waiting records, and give up if the store fails for too long."""
        if left := await self._writes.aclose():
            log.warning("records.not_written", records=left)

    async def _write(self, batch: Sequence[tuple[Place, Waiting[RequestRecord]]]) -> None:
        """Write records. The store skips those that it already has. Raises ``StoreFailed``, and ``Refused`` for one."""
        if self._store is None:
            return
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._store.write([waiting.value for _, waiting in batch], self._seconds())
        except StoreFailed:
            raise
        except TimeoutError:
            raise StoreFailed(f"no answer within {WRITE_SECONDS:g} s") from None
        except Exception as error:  # from the encoder of a store, or a fault of the proxy
            log.exception("store.write_failed", kind="record", reason=type(error).__name__)
            raise Refused(type(error).__name__) from error


def _failed(records: int, reason: str) -> None:
    log.warning("records.write_failed", reason=reason, records=records)


def _ended(place: Place, waiting: Waiting[RequestRecord], written: bool) -> None:
    if written:
        _WRITTEN.inc()
        return
    _DROPPED.inc()
    log.error("records.record_dropped", record=waiting.value.id, team=waiting.value.team)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _shown(path: str) -> str:
    """Return the first two names of a path. The rest may be ids that a client chose."""
    if path in ENDPOINTS:
        return path
    names = path.split("/", 3)
    return "/".join([*names[:3], *("…" for _ in names[3:])])[:80]
