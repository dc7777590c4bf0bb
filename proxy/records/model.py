"""Records of requests, the ledger that sums them, and their encoding for a store. No request waits for any of it.

They are encrypted if the store has keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from proxy.constants import DAY
from proxy.store.sealing import AesGcmCodec, Unreadable
from proxy.telemetry.metrics import STORE_UNREADABLE
from proxy.telemetry.record import RequestRecord, first_id

log = structlog.get_logger(__name__)

RECORD_LIMIT = 1_000  # maximum records of one page
LEDGER_DAYS = 400  # days that rows of the ledger are kept

TENANT_ROWS = 200
"""Rows of the ledger for each tenant and day. Requests for further models are summed up under ``OTHER``."""

DAY_ROWS = 20_000
"""Rows of the ledger for each day. Further callers without a team are summed up together, without a tenant."""

OTHER = "(other)"  # The model of such sums. No name that `shown_model` returns has parentheses, except `HIDDEN_MODEL`.
LARGEST_SUM = 4 * 10**18  # The largest amount in a row. Two of them can be added in 64 bits.


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Select records. ``None`` selects all.

    ``tenants`` restricts the result to these tenants. ``since`` and ``until`` are in seconds since 1970. ``before`` is
    a record's id: only older ones follow. ``parent`` is the id of a request whose summary calls to return. ``kind`` is
    ``request`` or ``summary``. ``status`` is the lowest and the highest one. ``error`` is a code of the proxy, or the
    code or type in an upstream's error. ``slow`` is the least milliseconds of the whole request. ``client`` is
    the start of the client's product and version.
    """

    tenants: tuple[str, ...] | None = None
    team: str | None = None
    policy: str | None = None
    model: str | None = None
    verdict: str | None = None
    kind: str | None = None
    parent: str | None = None
    since: float | None = None
    until: float | None = None
    before: str | None = None
    limit: int = 100
    key: str | None = None
    api: str | None = None
    status: tuple[int, int] | None = None
    error: str | None = None
    slow: float | None = None
    conversation: str | None = None
    user: str | None = None
    client: str | None = None

    @property
    def reads_values(self) -> bool:
        """Return whether names and times don't suffice to select records, so that their values must be read."""
        wanted = self.key, self.api, self.status, self.error, self.slow, self.conversation, self.user, self.client
        return any(one is not None for one in wanted)

    def selects(self, record: RequestRecord) -> bool:
        return (
            all((wanted := getattr(self, name)) is None or getattr(record, name) == wanted for name in _NAMES)
            and (self.tenants is None or record.tenant in self.tenants)
            and (self.since is None or record.id >= first_id(self.since))
            and (self.until is None or record.id < first_id(self.until))
            and (self.before is None or record.id < self.before)
            and (self.status is None or self.status[0] <= record.status <= self.status[1])
            and (self.slow is None or record.phases.get("total", 0.0) >= self.slow)
            and (self.error is None or self.error in _errors_of(record))
            and (self.client is None or (record.client or "").startswith(self.client))
        )


_NAMES = ("team", "policy", "model", "verdict", "kind", "parent", "key", "api", "conversation", "user")


def _errors_of(record: RequestRecord) -> tuple[str | None, ...]:
    named = record.upstream_error
    return (record.error,) if named is None else (record.error, named.code, named.type)


class LedgerLabels(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The requests that a row of the ledger sums up. ``day`` is in days since 1970 (UTC).

    Rows of versions without ``key`` have the same name in the store as rows without one.
    """

    day: int
    tenant: str
    team: str | None
    policy: str | None
    api: str
    model: str | None
    upstream: str | None
    key: str | None = None


@dataclass(slots=True)
class LedgerSums:
    """The sums of a row. docs/api.md describes them as columns of a report. Money is in parts of ``PICO``."""

    requests: int = 0
    compacted: int = 0
    avoided: int = 0
    shadow: int = 0
    errors: int = 0
    unpriced: int = 0
    estimated: int = 0
    summaries: int = 0
    received: int = 0
    sent: int = 0
    forecast: int = 0
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    summary_input: int = 0
    summary_output: int = 0
    cost: int = 0
    summary_cost: int = 0
    as_received: int = 0
    forecast_cost: int = 0
    would_compact: int = 0
    would_avoid: int = 0

    def add(self, other: LedgerSums) -> None:
        for name, amount in zip(SUMS, amounts_of(other), strict=True):
            if amount:
                setattr(self, name, getattr(self, name) + amount)

    def add_record(self, record: RequestRecord) -> None:
        usage, cost, before = record.usage, record.cost, record.before
        if record.kind == "summary":
            self.summaries += 1
            if usage is not None:
                self.summary_input += usage.input or 0
                self.summary_output += usage.output or 0
            if cost is not None:
                self.summary_cost += cost.sent
            elif usage is not None:
                self.unpriced += 1
            return
        self.requests += 1
        if record.failed:
            self.errors += 1
        if usage is not None:
            self.input += usage.input or 0
            self.output += usage.output or 0
            self.cache_read += usage.cache_read or 0
            self.cache_write += usage.cache_write or 0
        if cost is not None:
            self.cost += cost.sent
            self.as_received += cost.as_received
            self.forecast_cost += cost.sent if cost.forecast is None else cost.forecast
        elif usage is not None:
            self.unpriced += 1
        if (usage is not None and usage.estimated) or (cost is not None and cost.estimated):
            self.estimated += 1
        if record.verdict == "compacted":
            self.compacted += 1
            if not (record.fits or record.failed):
                self.avoided += 1
        elif record.verdict == "shadow":
            self.shadow += 1
        if record.forecast is not None:
            self.would_compact += 1
            if not record.fits:
                self.would_avoid += 1
        if before is not None:
            sent = before if record.sent is None else record.sent
            self.received += before
            self.sent += sent
            self.forecast += sent if record.forecast is None else record.forecast


SUMS: tuple[str, ...] = tuple(field.name for field in fields(LedgerSums))

amounts_of: Callable[[LedgerSums], tuple[int, ...]] = attrgetter(*SUMS)
"""Return the amounts of a row, in the order of ``SUMS``."""


class RecordStore(ABC):
    """Stores records and the ledger. All methods except ``aclose`` raise ``StoreFailed``."""

    @abstractmethod
    async def write(self, records: Sequence[RequestRecord], seconds: float, *, ledger: bool = True) -> None:
        """Store records for ``seconds``, and add them to the ledger unless ``ledger`` is false.

        Both happen, or neither. Records that are already stored are skipped, so a write can be repeated.
        """

    @abstractmethod
    async def copy_rows(self, rows: Sequence[tuple[LedgerLabels, LedgerSums]], source: str) -> None:
        """Store rows of another ledger in addition to those of this one. Replace rows that came from this source."""

    @abstractmethod
    async def get(self, id: str, tenants: tuple[str, ...] | None = None) -> RequestRecord | None:
        """Return a record of one of the tenants, or ``None``. Without ``tenants``, return one of any tenant."""

    @abstractmethod
    async def select(self, query: RecordQuery) -> list[RequestRecord]:
        """Return records, newest first."""

    @abstractmethod
    async def ledger(
        self, since: int, until: int, tenants: tuple[str, ...] | None = None
    ) -> list[tuple[LedgerLabels, LedgerSums]]:
        """Return the rows of the days from ``since`` to ``until`` (days since 1970, inclusive)."""

    @abstractmethod
    async def remove(self, tenant: str) -> Counter[str]:
        """Remove everything of a tenant. Return the number of records (``record``) and rows (``ledger row``)."""

    @abstractmethod
    async def maintain(self, most: int) -> None:
        """Remove expired records, the oldest ones over ``most``, and rows of the ledger after ``LEDGER_DAYS``."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the store."""


def sums_of(record: RequestRecord) -> LedgerSums:
    sums = LedgerSums()
    sums.add_record(record)
    return sums


def summed(records: Sequence[RequestRecord]) -> dict[LedgerLabels, LedgerSums]:
    rows: defaultdict[LedgerLabels, LedgerSums] = defaultdict(LedgerSums)
    for record in records:
        rows[labels_of(record)].add_record(record)
    return rows


def labels_of(record: RequestRecord) -> LedgerLabels:
    return LedgerLabels(
        int(record.time // DAY),
        record.tenant,
        record.team,
        record.policy,
        record.api,
        record.model,
        record.upstream,
        record.key,
    )


def bounded(labels: LedgerLabels, tenant_rows: int, day_rows: int) -> LedgerLabels:
    """Return the labels of a row that doesn't exist yet, given the number of rows of its tenant and day.

    Clients choose the names of models. In open mode they also choose their keys, and each key is a tenant.
    """
    if labels.team is None and day_rows >= DAY_ROWS:
        return replace(labels, tenant="", model=OTHER)
    return replace(labels, model=OTHER) if tenant_rows >= TENANT_ROWS else labels


def row_order(row: tuple[LedgerLabels, LedgerSums]) -> tuple[str, ...]:
    """Return the sort key of a ledger's row: by day, then by the other labels."""
    return tuple(str(getattr(row[0], name)).zfill(8) for name in LedgerLabels.__struct_fields__)


_RECORD, _ROW = "record", "ledger"

_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError)
"""Errors of a value that a store returned. Another version of the proxy may have written it, with other fields."""

REMEMBERED = 2_000  # Names, and rows of the ledger, whose encoding a store remembers. Each takes up to about 1 KB.
LOGGED = 1_000  # unreadable rows that a process logs, each once

T = TypeVar("T")


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A value with the id of its codec, and its tenant's name in the store."""

    codec: str
    tenant: str
    value: bytes


class RecordCodec:
    """Values, and the names that tenants, teams, policies, and models have in the store.

    With keys, values are encrypted and names are keyed digests, as in ``SealedStore``.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Encrypt with the first of the ``keys``, 32 bytes each, and decrypt with all of them."""
        codecs = [AesGcmCodec(key) for key in keys]
        self._codecs: dict[str, AesGcmCodec | None] = {codec.id: codec for codec in codecs} or {"": None}
        self.ids = list(self._codecs)
        """The ids of the codecs that decrypt, or an empty one without keys."""
        self._logged: set[str] = set()
        # Most records have the labels of earlier ones, and digests take longer than anything else in a write.
        self.names = lru_cache(REMEMBERED)(self._names)
        self.columns = lru_cache(REMEMBERED)(self._columns)
        self.row = lru_cache(REMEMBERED)(self._row)

    def _names(self, kind: str, name: str) -> list[str]:
        """Return the names that a tenant, team, policy, or model has in the store, by each key."""
        return [name if codec is None else codec.name(kind, name) for codec in self._codecs.values()]

    def _columns(self, *names: str | None) -> list[str | None]:
        """Return the names that a record's tenant, team, policy, and model have in the store, by the first key."""
        kinds = ("tenant", "team", "policy", "model")
        return [None if own is None else self.names(kind, own)[0] for kind, own in zip(kinds, names, strict=True)]

    def record(self, record: RequestRecord) -> Sealed:
        return self._sealed(record.tenant, _RECORD, record.id, record)

    def _row(self, labels: LedgerLabels, source: str = "") -> tuple[str, Sealed]:
        """Return the key and the value of a ledger's row. Rows that were copied from a ``source`` have own keys."""
        key = self._names("labels", msgspec.msgpack.encode(labels).hex() + source)[0]
        return key, self._sealed(labels.tenant, _ROW, key, labels)

    def _sealed(self, tenant: str, kind: str, key: str, content: RequestRecord | LedgerLabels) -> Sealed:
        name, value = self.names("tenant", tenant)[0], msgspec.msgpack.encode(content)
        codec = self._codecs[self.ids[0]]
        return Sealed(self.ids[0], name, value if codec is None else codec.seal((name, kind, key), value))

    def open_record(self, id: str, sealed: Sealed) -> RequestRecord | None:
        """Return a stored record, or ``None`` if no key decrypts it or it's unreadable, which is logged."""
        return self._opened(_RECORD, id, sealed, RequestRecord)

    def open_row(self, key: str, sealed: Sealed) -> LedgerLabels | None:
        """Return the labels of a stored row, or ``None`` if no key decrypts them or they're unreadable."""
        return self._opened(_ROW, key, sealed, LedgerLabels)

    def _opened(self, kind: str, key: str, sealed: Sealed, form: type[T]) -> T | None:
        if sealed.codec not in self._codecs:
            return None
        codec, value = self._codecs[sealed.codec], sealed.value
        try:
            plain = value if codec is None else codec.open((sealed.tenant, kind, key), value)
        except (Unreadable, TypeError):
            self.unreadable(kind, key)
            return None
        return self.decoded(kind, key, plain, form)

    def sums(self, key: str, amounts: Mapping[str, object]) -> LedgerSums:
        """Return the sums of a stored row. An amount that isn't an integer is logged, and counts as 0."""
        try:
            return msgspec.convert(amounts, LedgerSums, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return LedgerSums(*(self._amount(key, name, amounts.get(name, 0)) for name in SUMS))

    def _amount(self, key: str, name: str, amount: object) -> int:
        try:
            return msgspec.convert(amount, int, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.unreadable(_ROW, f"{key}.{name}")
            return 0

    def unreadable(self, kind: str, key: str) -> None:
        """Count a value that can't be read, and log it once."""
        STORE_UNREADABLE.inc()
        if len(self._logged) < LOGGED and key not in self._logged:
            self._logged.add(key)
            log.warning("records.entry_unreadable", kind=kind, key=key)

    def decoded(self, kind: str, key: str, value: bytes, form: type[T]) -> T | None:
        """Return a decoded value, or ``None`` if it's unreadable."""
        try:
            return msgspec.msgpack.decode(value, type=form)
        except _DAMAGED:
            self.unreadable(kind, key)
            return None
