"""Amounts that the processes on one store spend together, such as the spending of a team.

The store has one entry for each account: what was spent, and what each process has reserved for calls in progress. A
process reserves before it spends. It reads the entry, decides, and writes its reservations if no other process has
changed the entry meanwhile. So at any time, at most one reservation exceeds a limit.

All reservations that wait in a process share one read and one write. An entry also has the number of each process's
last write, so that a write whose reply was lost counts once. A process renews its reservations; those of a process that
was killed end after ``LEASE_SECONDS``.

If the store fails or is slow, a process decides by the last entry that it has read and by its own amounts. It writes
these once the store works again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextvars import Context
from typing import Annotated, NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from proxy.constants import DAY, UNDECODABLE
from proxy.store.interface import Store, StoreFailed
from proxy.store.replicated_map import SharedValue
from proxy.store.tenant_cache import answered, cancelled

log = structlog.get_logger(__name__)

ADMIT_SECONDS = 0.5  # seconds that a reservation waits for the store
FLUSH_SECONDS = 0.2  # seconds after which amounts that were spent are written
PAUSE_SECONDS = 2.0  # seconds without a write after the store has failed
LEASE_SECONDS = 60.0  # seconds until the reservations of a process end, unless it renews them

RENEW_SECONDS = LEASE_SECONDS / 3

KNOWN_SECONDS = 3_600.0  # seconds after the end of its lease that a process's last write is known
ATTEMPTS = 50  # writes to try while other processes change the entry
CLOSING_SECONDS = 5.0  # seconds to write the last amounts when the process ends
LARGEST = 1 << 62  # The largest sum. JSON and the databases have integers of 64 bits.


class Amount(NamedTuple):
    """Tokens, and US dollars times 10^12."""

    tokens: int = 0
    money: int = 0

    def plus(self, other: Amount) -> Amount:
        return Amount(min(self.tokens + other.tokens, LARGEST), min(self.money + other.money, LARGEST))

    def minus(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.money - other.money)


NOTHING = Amount()


Count = Annotated[int, msgspec.Meta(ge=0)]
Time = Annotated[float, msgspec.Meta(ge=0, le=32_503_680_000)]  # seconds since 1970, until the year 3000


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    """The reservations of one process until a time in seconds since 1970, and the number of its last write."""

    write: Count
    tokens: Count
    money: Count
    until: Time


class Balance(SharedValue, frozen=True):
    """The stored state of an account. ``until`` is when it expires, in seconds since 1970.

    ``copied`` has what was spent in other stores, by their names, when it was last copied from there and added here.
    ``origin`` is the name of the store that this copy comes from.
    """

    until: Time
    tokens: int = 0
    money: int = 0
    reserved: dict[str, Reserved] = msgspec.field(default_factory=dict)
    copied: dict[str, Amount] = msgspec.field(default_factory=dict)
    origin: str = ""

    def copy_from(self, name: str) -> Balance:
        """Return a copy for another store. ``name`` is that of this store."""
        spent = Amount(self.tokens, self.money)
        return msgspec.structs.replace(self, copied={**self.copied, name: spent}, origin=name)

    def merged(self, other: Balance) -> Balance:
        spent = Amount(other.tokens, other.money)
        new = spent.minus(self.copied.get(other.origin, NOTHING))
        tokens, money = Amount(self.tokens, self.money).plus(new)
        return msgspec.structs.replace(self, tokens=tokens, money=money, copied={**self.copied, other.origin: spent})


Admits = Callable[[Amount], bool]  # returns whether a reservation is admitted, by what is spent and reserved without it


class _Waiting(NamedTuple):
    id: str
    amount: Amount
    admits: Admits
    decision: asyncio.Future[bool]


class TeamAccounts:
    """The accounts of teams, one for each period. ``kind`` is that of their entries."""

    def __init__(self, store: Store | None, kind: str, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds since 1970. Without a store, this process counts alone."""
        self._store = store
        self._kind = kind
        self._clock = clock
        self._accounts: dict[tuple[str, str], Account] = {}

    def of(self, team: str, period: str, until: float) -> Account:
        """Return the account of a team in a period. Its entry expires at ``until`` (seconds since 1970)."""
        account = self._accounts.get((team, period))
        if account is None:
            for old in [key for key, other in self._accounts.items() if key[0] == team and other.idle]:
                del self._accounts[old]
            place = f"team:{team}", self._kind, period
            account = self._accounts[team, period] = Account(self._store, place, until, self._clock)
        return account

    async def aclose(self) -> None:
        for account in self._accounts.values():
            await account.aclose()


class Account:
    """One account, as one process sees it. Use it on the event loop."""

    def __init__(
        self,
        store: Store | None,
        place: tuple[str, str, str],
        until: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``place`` is the tenant, kind, and key of the entry, which expires at ``until`` (seconds since 1970)."""
        self._store = store
        self._place = place
        self._clock = clock
        self._process = secrets.token_hex(4)
        self._entry = Balance(until)
        self._read = store is None
        self._unwritten = NOTHING
        self._attempts: dict[int, Amount] = {}
        self._writes = 0
        self._held: dict[str, Amount] = {}
        self._waiting: list[_Waiting] = []
        self._changed = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fails_until = 0.0

    @property
    def known(self) -> bool:
        return self._read

    @property
    def spent(self) -> Amount:
        """Return what all processes have spent, as far as this one has read."""
        return Amount(self._entry.tokens, self._entry.money).plus(self._unwritten)

    @property
    def total(self) -> Amount:
        """Return what all processes have spent and reserved, as far as this one has read."""
        now, total = self._clock(), self.spent
        for process, part in self._entry.reserved.items():
            if process != self._process and part.until > now:
                total = total.plus(Amount(part.tokens, part.money))
        return total.plus(self._reserved())

    @property
    def idle(self) -> bool:
        return not self._held and not self._changed and self._task is None

    async def read(self, *, again: bool = False) -> None:
        """Read the entry, unless this process has read it and ``again`` is false. Wait for ``ADMIT_SECONDS``."""
        if again or not self._read:
            await self.reserve("", NOTHING, lambda total: False)

    async def reserve(self, id: str, amount: Amount, admits: Admits) -> bool:
        """Reserve an amount under an id if ``admits`` agrees. Return whether it did."""
        if self._store is None or time.monotonic() < self._fails_until:
            return self._decide(id, amount, admits)
        waiting = _Waiting(id, amount, admits, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._start(self._store)
        try:
            decided = await answered(waiting.decision, ADMIT_SECONDS)
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise
        if decided:
            return waiting.decision.result()
        self._give_up(waiting)
        return self._decide(id, amount, admits)

    def settle(self, id: str, amount: Amount) -> bool:
        """End the reservation with an id, and count what was spent. Return whether there was such a reservation."""
        held = self._held.pop(id, None)
        if held is not None or amount != NOTHING:
            self._unwritten = self._unwritten.plus(amount)
            self._changed = True
            self._soon(FLUSH_SECONDS)
        return held is not None

    async def aclose(self) -> None:
        """Write the last amounts, for up to ``CLOSING_SECONDS``, and end the reservations."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSING_SECONDS)
            if self._task is not None:
                await cancelled(self._task)
        self._held.clear()
        if self._store is None or (self._unwritten == NOTHING and not self._changed):
            return
        try:
            async with asyncio.timeout(CLOSING_SECONDS):
                await self._write(self._store, [])
            self._changed = False
        except (StoreFailed, TimeoutError) as failure:
            log.warning("account.not_written", kind=self._place[1], reason=str(failure) or "timeout")

    def _decide(self, id: str, amount: Amount, admits: Admits) -> bool:
        admitted = admits(self.total)
        if admitted:
            self._held[id] = amount
            self._changed = self._store is not None
        return admitted

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        if waiting.decision.done() and not waiting.decision.cancelled() and waiting.decision.result():
            self.settle(waiting.id, NOTHING)
        waiting.decision.cancel()

    def _reserved(self) -> Amount:
        total = NOTHING
        for amount in self._held.values():
            total = total.plus(amount)
        return total

    def _has_part(self) -> bool:
        part = self._entry.reserved.get(self._process)
        return part is not None and (part.tokens, part.money) != NOTHING

    def _soon(self, seconds: float) -> None:
        if self._store is None:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._due)

    def _due(self) -> None:
        self._timer = None
        self._changed = self._changed or bool(self._held)
        if self._store is not None:
            self._start(self._store)

    def _start(self, store: Store) -> None:
        if self._task is None:
            # The task writes for many requests, so its log lines name none.
            self._task = asyncio.get_running_loop().create_task(self._work(store), context=Context())

    async def _work(self, store: Store) -> None:
        try:
            while self._waiting or self._changed:
                batch, self._waiting, self._changed = self._waiting, [], False
                try:
                    await self._write(store, batch)
                except StoreFailed as failure:
                    log.warning("account.not_written", kind=self._place[1], reason=str(failure))
                    self._fails_until = time.monotonic() + PAUSE_SECONDS
                    self._changed = True
                    batch, self._waiting = [*batch, *self._waiting], []
                    for waiting in batch:
                        if not waiting.decision.done():
                            waiting.decision.set_result(self._decide(*waiting[:3]))
                    self._soon(PAUSE_SECONDS)
                    return
        finally:
            self._task = None
            if self._held or self._changed:
                self._soon(RENEW_SECONDS if not self._changed else PAUSE_SECONDS)

    async def _write(self, store: Store, batch: list[_Waiting]) -> None:
        """Decide on reservations, and write them with the amounts that were spent. Raises ``StoreFailed``."""
        for _ in range(ATTEMPTS):
            raw = await store.get(*self._place)
            self._entry, self._read = self._decoded(raw), True
            admitted = self._admitted(batch)
            if not admitted and not self._held and self._unwritten == NOTHING and not self._has_part():
                break  # nothing to write
            if await self._written(store, raw, admitted):
                break
        else:
            raise StoreFailed("other processes change the entry all the time")
        for waiting in batch:
            if not waiting.decision.done():
                waiting.decision.set_result(waiting.id in admitted)
                if waiting.id in admitted:
                    self._held[waiting.id] = waiting.amount
            elif waiting.id in admitted:
                self._changed = True  # the request has given up, and the entry has its reservation

    def _admitted(self, batch: list[_Waiting]) -> dict[str, Amount]:
        admitted: dict[str, Amount] = {}
        total = self.total
        for waiting in batch:
            if not waiting.decision.done() and waiting.admits(total):
                admitted[waiting.id] = waiting.amount
                total = total.plus(waiting.amount)
        return admitted

    async def _written(self, store: Store, raw: bytes | None, admitted: dict[str, Amount]) -> bool:
        """Write the entry with this process's part. Return false if another process has changed it."""
        now, reserved, unwritten, entry = self._clock(), self._reserved(), self._unwritten, self._entry
        for amount in admitted.values():
            reserved = reserved.plus(amount)
        self._writes += 1
        number = self._writes
        self._attempts[number] = unwritten
        parts = {name: part for name, part in entry.reserved.items() if part.until + KNOWN_SECONDS > now}
        parts[self._process] = Reserved(number, *reserved, now + LEASE_SECONDS)
        spent = Amount(entry.tokens, entry.money).plus(unwritten)
        new = msgspec.structs.replace(entry, tokens=spent.tokens, money=spent.money, reserved=parts)
        value, seconds = msgspec.json.encode(new), max(DAY, entry.until - now)
        if raw is None:
            written = await store.add(*self._place, value, seconds) == value
        else:
            written = await store.replace(*self._place, raw, value, seconds)
        # If the store fails instead, the write may still take effect.
        del self._attempts[number]
        if written:
            self._attempts.clear()
            self._entry, self._unwritten = new, self._unwritten.minus(unwritten)
        return written

    def _decoded(self, raw: bytes | None) -> Balance:
        """Return the stored entry. If it has this process's last write, those amounts are written."""
        # What this process has read before the entry was lost or damaged still counts.
        entry = Balance(self._entry.until, self._entry.tokens, self._entry.money)
        if raw is not None:
            try:
                found = msgspec.json.decode(raw, type=Balance)
                tokens = found.tokens if found.tokens >= 0 else entry.tokens
                entry = replace(found, tokens=tokens, money=found.money if found.money >= 0 else entry.money)
            except UNDECODABLE as error:
                log.error("account.unreadable", kind=self._place[1], error=type(error).__name__)
        part = entry.reserved.get(self._process)
        if part is not None and part.write in self._attempts:
            # Earlier attempts, and later ones, compared with an entry that is gone.
            self._unwritten = self._unwritten.minus(self._attempts[part.write])
            self._attempts.clear()
        return entry
