"""Finish the records of requests, and write them in batches in the background. Tag them by keyed digests.

The tags name the conversation and the end user. The turns of a conversation share their first messages, so a digest of
these names it. The key is random, and all processes on a store share it. Without it, nobody can test a guess of a name
or of a message against a tag.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from time import perf_counter

import msgspec
import structlog
from starlette.types import Scope

from proxy.access.authenticator import Caller
from proxy.constants import DAY
from proxy.dialects.counting import Counter
from proxy.dialects.request import Request
from proxy.http.request_body import Sent
from proxy.records.model import RecordStore
from proxy.store import Refused, Store, StoreFailed
from proxy.store.replicated_map import FIRST_READ_SECONDS
from proxy.store.tenant_cache import Place, Waiting, WriteBehind
from proxy.telemetry.metrics import RECORDS
from proxy.telemetry.record import RECORD, Refusal, RequestRecord, Trace, current, new_id

log = structlog.get_logger(__name__)

WAITING = 4_000  # Records that may wait to be written. The proxy drops further ones.
LARGEST_PRICE = 10**17  # US dollars times 10^12. A higher price follows from a wrong figure, and counts as unknown.
TENANTS = 4_000  # Tenants to remember. The set starts again when it is full.
PAUSE_SECONDS = 0.5  # seconds between two writes, unless many records wait
WRITE_SECONDS = 5.0  # timeout of a write

ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"})
"""Paths without ids."""

CLIENT_LEFT = "client_disconnected"

Sink = Callable[[RequestRecord], None]
"""Takes a finished record. It must be quick. If it raises, the other sinks and the store still get the record."""

BeginTrace = Callable[[Scope], Trace]  # returns the trace of a request that has just arrived


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
        record.phases["total"] = round((now - started) * 1000, 3)
        if sent.begun:
            record.phases["first_byte"] = round((sent.first_byte - started) * 1000, 3)
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


def _shown(path: str) -> str:
    """Return the first two names of a path. The rest may be ids that a client chose."""
    if path in ENDPOINTS:
        return path
    names = path.split("/", 3)
    return "/".join([*names[:3], *("…" for _ in names[3:])])[:80]


KIND = "record-tags"

KEY_SECONDS = 400.0 * DAY  # Lifetime of the key. Records live for days, so a new key divides few conversations.
STARTING_SECONDS = 2.0  # seconds that a start waits for the key at most
RETRY_SECONDS = 60.0  # seconds between two attempts to read the key
OPENING = 8  # Units before the model's first one that name a conversation. Further ones don't count.
LARGE = 65_536  # bytes of a unit whose bytes count instead of its text, because decoding takes longer
BEGINNING = 2_000  # Characters of a text that count, with its length. Digests of long system messages take longest.

TAG = re.compile(r"[0-9a-f]{16}")


class Tags:
    """Makes the tags of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key: bytes | None = None
        self._reading: asyncio.Task[None] | None = None
        self._began = 0.0

    async def prepare(self) -> None:
        """Read the key before the first request."""
        await self._soon(STARTING_SECONDS)

    async def describe(self, record: RequestRecord, caller: Caller, body: Request, counter: Counter | None) -> None:
        """Add the tags to a request's record. Without a key or a stored identity, it gets none."""
        if not caller.has_storage or (key := self._key or await self._soon()) is None:
            return
        user, session = body.sender
        record.user = _tag(key, "user", user) if user else None
        opening = [] if counter is None or body.continues else _opening(body, counter)
        if opening:
            record.conversation = _tag(key, "conversation", caller.tenant, user, session, *opening)

    async def of_user(self, name: str) -> str | None:
        """Return the tag of an end user's name, or a tag as it is. ``None`` if there is no key yet."""
        if TAG.fullmatch(name):
            return name
        key = self._key or await self._store.get("", KIND, "key")
        return None if key is None else _tag(key, "user", name)

    async def _soon(self, seconds: float = FIRST_READ_SECONDS) -> bytes | None:
        """Return the key. Requests wait for it only briefly, so that a failing store delays none."""
        now = time.monotonic()
        if self._reading is None or (self._reading.done() and now > self._began + RETRY_SECONDS):
            self._began, self._reading = now, asyncio.create_task(self._read())
        if not self._reading.done() and (left := self._began + seconds - now) > 0:
            await asyncio.wait([self._reading], timeout=left)
        return self._key

    async def _read(self) -> None:
        try:
            self._key = await self._store.add("", KIND, "key", secrets.token_bytes(32), KEY_SECONDS)
        except StoreFailed as failure:
            log.warning("records.no_tags", reason=str(failure))


def _opening(body: Request, counter: Counter) -> list[str]:
    """Return the texts before the model's first unit. They stay the same when clients move cache breakpoints."""
    texts: list[str] = []
    for raw in body.units[:OPENING]:
        text = counter.format.clients_text(raw) if len(raw) <= LARGE else bytes(raw).hex()
        if text is None:
            break
        texts.append(text)
    return texts


def _tag(key: bytes, *parts: str) -> str:
    short = [part if len(part) <= BEGINNING else f"{len(part)} {part[:BEGINNING]}" for part in parts]
    try:
        data = msgspec.msgpack.encode(short)
    except UnicodeEncodeError:  # half of a surrogate pair
        data = ascii(short).encode()
    # A stored key that somebody damaged may be longer.
    return blake2b(data, key=key[: blake2b.MAX_KEY_SIZE], digest_size=8).hexdigest()
