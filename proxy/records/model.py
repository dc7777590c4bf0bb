"""Records of requests, and the ledger that sums them. No request waits for either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import astuple, replace

from proxy.constants import DAY
from proxy.telemetry.record import RequestRecord

RECORD_LIMIT = 1_000
"""Maximum records of one page."""

LEDGER_DAYS = 400
"""Days that rows of the ledger are kept."""

TENANT_ROWS = 200
"""Rows of the ledger for each tenant and day. Requests for further models are summed up under ``OTHER``."""

DAY_ROWS = 20_000
"""Rows of the ledger for each day. Further callers without a team are summed up together, without a tenant."""

OTHER = "(other)"
"""The model of such sums. No name that ``shown_model`` returns has parentheses, except ``HIDDEN_MODEL``."""

LARGEST_SUM = 4 * 10**18
"""The largest amount in a row. Two of them can be added in 64 bits."""


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Select records. ``None`` selects all.

    ``tenants`` restricts the result to these tenants. ``since`` and ``until`` are in seconds since 1970. ``before`` is
    a record's id: only older ones follow. ``parent`` is the id of a request whose summary calls to return. ``kind`` is
    ``request`` or ``summary``.
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


class LedgerLabels(msgspec.Struct, frozen=True, order=True):
    """What a row of the ledger sums up. ``day`` is in days since 1970 (UTC)."""

    day: int
    tenant: str
    team: str | None
    policy: str | None
    api: str
    model: str | None
    upstream: str | None


class LedgerSums(msgspec.Struct, omit_defaults=True):
    """The sums of a row.

    Counts of requests: ``requests``, ``compacted``, ``avoided`` (compacted because they were larger than the model
    accepts, and answered), ``shadow``, ``would_compact`` (in shadow mode, those that ``enforce`` would compact),
    ``would_avoid`` (those of them that were larger than the model accepts), ``errors`` (status 400 or higher),
    ``unpriced`` (no price is known), and ``estimated`` (the upstream didn't report its usage or its cache).
    ``summaries`` is the number of calls to summary models. Tokens: ``received`` and ``sent`` by the proxy's count,
    ``forecast`` (sent, or what ``enforce`` would send), the upstreams' ``input``, ``output``, ``cache_read``, and
    ``cache_write``, and the summary models' ``summary_input`` and ``summary_output``. Money in US dollars times 10^12:
    ``cost`` as sent, ``summary_cost``, ``as_received`` (estimated, without the proxy), and ``forecast_cost`` (as sent,
    or in shadow mode what ``enforce`` would cost).
    """

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
        """Add the sums of another row."""
        for name, amount in zip(SUMS, astuple(other), strict=True):
            if amount:
                setattr(self, name, getattr(self, name) + amount)


SUMS: tuple[str, ...] = LedgerSums.__struct_fields__


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
    async def count(self) -> int:
        """Return the number of records, in which expired ones may be included."""

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
    """Return what one record adds to the ledger."""
    usage, cost = record.usage, record.cost
    sums = LedgerSums()
    if usage is not None:
        read, written = usage.cache_read or 0, usage.cache_write or 0
        if record.kind == "summary":
            sums.summary_input, sums.summary_output = usage.input or 0, usage.output or 0
        else:
            sums.input, sums.output = usage.input or 0, usage.output or 0
            sums.cache_read, sums.cache_write = read, written
    if cost is None:
        sums.unpriced = int(usage is not None)
    elif record.kind == "summary":
        sums.summary_cost = cost.sent
    else:
        sums.cost, sums.as_received, sums.estimated = cost.sent, cost.as_received, int(cost.estimated)
        sums.forecast_cost = cost.sent if cost.forecast is None else cost.forecast
    if record.kind == "summary":
        sums.summaries = 1
        return sums
    if usage is not None and usage.estimated:
        sums.estimated = 1
    sums.requests = 1
    sums.errors = int(record.status >= 400)
    sums.shadow = int(record.verdict == "shadow")
    sums.compacted = int(record.verdict == "compacted")
    sums.avoided = int(record.verdict == "compacted" and not record.fits and record.status < 400)
    sums.would_compact = int(record.forecast is not None)
    sums.would_avoid = int(record.forecast is not None and not record.fits)
    if record.before is not None:
        sums.received = record.before
        sums.sent = record.before if record.sent is None else record.sent
        sums.forecast = sums.sent if record.forecast is None else record.forecast
    return sums


def labels_of(record: RequestRecord) -> LedgerLabels:
    """Return the row of the ledger that a record belongs to."""
    return LedgerLabels(
        int(record.time // DAY),
        record.tenant,
        record.team,
        record.policy,
        record.api,
        record.model,
        record.upstream,
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
