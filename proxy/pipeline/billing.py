"""Count what the calls of one request to upstreams cost, whatever the client or the upstream leaves out.

Each call has a meter, which sees its answer as it passes. The usage that the upstream reports counts. If a part of it
is missing, the proxy's own count of what it sent and of what arrived takes its place. Then the usage is marked as
estimated.

Without the proxy, the provider's prompt cache would have served the part of the prompt that the conversation's last
request already had, if that was recent. So the estimate charges that part at the cache's price. A negative saving is
possible: a checkpoint changes the prompt, and the next request can't use the cache.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog
from msgspec.structs import replace

from proxy.compaction.format import TextCounter
from proxy.constants import DAY
from proxy.dialects.answers import AnswerTail
from proxy.dialects.apis import DIALECTS
from proxy.dialects.usage import models_of, usage_of
from proxy.errors import UpstreamError, UpstreamInterrupted, UpstreamUnreachable
from proxy.http.decompression import Unpacking
from proxy.limits.prices import NO_OTHERS, Price
from proxy.overflow.silent import Finished
from proxy.pipeline.job import Forecast
from proxy.pipeline.response_start import ResponseStart, error_names
from proxy.store import Store, StoreFailed
from proxy.store.accounts import Amount
from proxy.store.replicated_map import FIRST_READ_SECONDS, ReplicatedMap, SharedValue, name_of
from proxy.telemetry.record import ACCEPTED, Cost, RequestRecord, UpstreamErrorNames, Usage
from proxy.upstream.transport import Answer

log = structlog.get_logger(__name__)

BYTES_A_TOKEN = 4  # bytes per token where nothing can be counted
EXPECTED_OUTPUT = 500  # output tokens to reserve for a call that may write more
RESPONSES = 10_000  # responses in the background that are in memory, the most recently used ones
BACKGROUND_SECONDS = DAY  # seconds for which a response in the background is remembered
UNPACKED_BYTES = 1_000_000  # bytes that a chunk of a compressed answer may become
CACHE_SECONDS = 300.0  # lifetime of an entry in a provider's prompt cache after its last use, at most providers

_FAILS = re.compile(
    rb'"error"(?!\s{0,9}:\s{0,9}null)|^(?:event: ?\S{0,64}(?:error|exception)|error:)|"response\.failed"', re.I | re.M
)
_WITHOUT_NAMES = re.compile(rb'"finish_reason"\s{0,9}:\s{0,9}"error"|"type"\s{0,9}:\s{0,9}"response\.failed"')
"""The events that end a failed answer: a search that finds more, and those that may have no error object."""

INLINE_BYTES = 32_768  # Characters that are counted on the event loop. More are counted in a thread.

_TAILS = {dialect.path: dialect.answers.tail for dialect in DIALECTS.values()}


@dataclass(slots=True, eq=False)
class Meter:
    """One call to an upstream."""

    _tail: AnswerTail
    sent: int  # the bytes of its body
    tokens: int | None = None  # the proxy's count, if it has counted
    complete: bool = False  # whether the answer has arrived
    draws: bool = False  # whether its output is images
    error: UpstreamErrorNames | None = None  # names of the error that the answer is, or ends with, despite its status
    free: bool = False  # whether the call certainly costs nothing
    place: int | None = None  # the index of the call in the record
    status: int = 0  # that of the answer, 0 before it begins
    writes: bool = True  # whether the answer has text that was generated
    _body: AsyncIterator[bytes] | None = None
    _source: Meter | None = None  # the meter of the upstream's own answer, which counts, if a bridge translates it
    _unpacking: Unpacking | None = None
    _end: Finished | None = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UpstreamUnreachable) or (isinstance(error, UpstreamInterrupted) and not self._own.status):
            self.free = True

    def response_started(self, start: ResponseStart) -> None:
        """Note that the start of the answer is read. An error costs nothing unless it reports a usage itself."""
        self.complete = self.complete or start.complete
        self.error = start.error
        self._end = start.end
        last = start.first.strip().rpartition(b"\n")[2]
        failed = start.overflow is not None or (start.error is not None and not start.answers.usage_in(last))
        self.free = self.free or failed

    def watch(self, answer: Answer, path: str = "") -> None:
        """See the bytes of an answer as they pass. ``path`` is that of the upstream's API if it isn't the client's."""
        if path:
            self._source = Meter(_TAILS[path](), self.sent)
            self._source.watch(answer)
            return
        self.status, self._body = answer.status, answer.body
        self.free = answer.status >= 300
        if answer.is_encoded:
            self._unpacking = Unpacking(answer.header("content-encoding"), UNPACKED_BYTES)
        answer.body = _Watched(answer.body, self)

    @property
    def _own(self) -> Meter:
        """Return the meter of the upstream's own answer."""
        return self._source or self

    def add(self, chunk: bytes) -> None:
        unpacking = self._unpacking
        if unpacking is not None:
            unpacking.feed(chunk)
            if unpacking.ended:
                self._tail.lost += len(chunk)
            chunk = unpacking.take()
        if chunk:
            self._tail.add(chunk)

    @property
    def model(self) -> str:
        """Return the model that the answer names; empty if it names none."""
        return self._own._tail.model

    @property
    def end(self) -> Finished | None:
        """Return the usage and finish reason so far. Log an error instead of raising it."""
        if self._end is None:
            try:
                self._end = self._tail.finished()
            except Exception as error:  # the client has its response
                log.exception("counting.failed", error=type(error).__name__)
        return self._end

    def end_failed(self) -> bool:
        """Return whether the answer is an error, or ends with one. Sets ``error``."""
        if self.error is None and self.status < 300:
            for part in filter(_FAILS.search, filter(_may_fail, self._tail.ending)):
                names = error_names(self.status, part)
                self.error = UpstreamErrorNames() if names is None and _WITHOUT_NAMES.search(part) else names
        return self.error is not None and self.status < 300

    async def usage(
        self, tokens: Callable[[], Awaitable[int | None]], count: TextCounter | None, factor: Callable[[], float]
    ) -> Usage:
        """Return the usage of the call. For the arguments see ``Bill.settle``."""
        own = self._own
        end = own.end
        usage = Usage() if end is None else usage_of(end) or Usage()
        if not usage.input and self.error is None:
            counted = self.tokens or await tokens()
            prompt = self.sent // BYTES_A_TOKEN if counted is None else round(counted * factor())
            usage = replace(usage, input=prompt, estimated=True)
        if self.draws and usage.image_output is None:
            usage = replace(usage, image_output=usage.output)
        # The usage of a stream may be that of its beginning.
        unsure = not own.complete or own._tail.provisional or self.error is not None
        partial = unsure and (end is None or end.finish_reason is None)
        if self.writes and (not usage.output or partial):
            written = round(await own._written(count) * factor())
            if written > (usage.output or 0):
                usage = replace(usage, output=written, estimated=True)
        return usage

    async def _written(self, count: TextCounter | None) -> int:
        text = self._tail.written()
        lost = self._tail.lost // BYTES_A_TOKEN
        if not text:
            return lost
        if count is None:
            return lost + max(1, len(text.encode(errors="replace")) // BYTES_A_TOKEN)
        return lost + (count(text) if len(text) <= INLINE_BYTES else await asyncio.to_thread(count, text))


def _may_fail(part: bytes) -> bool:
    """Return whether ``_FAILS`` may find something, in a hundredth of the time."""
    lower = part.lower()
    return b"error" in lower or b"exception" in lower or b"response.failed" in lower


class _Watched:
    """The body of an answer, which its meter sees."""

    def __init__(self, body: AsyncIterator[bytes], meter: Meter) -> None:
        self._next = body.__anext__
        self._meter = meter

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._next()
        except StopAsyncIteration:
            self._meter.complete = True
            raise
        self._meter.add(chunk)
        return chunk


class Bill:
    """The calls of one request, which owns the answer to its newest call, and closes it at its end."""

    def __init__(self) -> None:
        self.price_of: Pricing | None = None
        self.background: str | None = None  # the id of a response that the upstream makes in the background
        self._meters: list[Meter] = []
        self._answer: Answer | None = None

    def opened(self, answer: Answer, meter: Meter) -> None:
        self._answer = answer
        meter.watch(answer)

    async def close(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            await answer.close()

    async def drain(self) -> None:
        """Read the rest of the upstream's newest answer, whose client has left. Raises ``UpstreamInterrupted``."""
        own = None if self.last is None else self.last._own
        if own is not None and own._body is not None and not own.complete:
            async for _ in _Watched(own._body, own):
                pass

    @property
    def last(self) -> Meter | None:
        """Return the meter of the last call that may cost something."""
        return self._meters[-1] if self._meters else None

    @property
    def models(self) -> set[str]:
        """Return the models of calls that the provider made for the answers."""
        ends = [meter._own.end for meter in self._meters if not meter.free]
        usages = [end.usage for end in ends if end is not None and "iterations" in end.usage]
        return {model for usage in usages for model in models_of(usage)}

    def amount(self, usage: Usage) -> Amount:
        """Return the tokens and the price of a usage, to reserve or to count them."""
        cost = 0 if self.price_of is None else self.price_of.cost(usage, answers=False).sent
        return Amount((usage.input or 0) + (usage.output or 0), cost)

    def call(self, tail: AnswerTail, sent: int, tokens: int | None = None) -> Meter:
        """Begin a call, and return the meter to watch its answer with. The answer must begin within its block.

        If the client leaves or the time is over before that, the upstream may bill the prompt.
        """
        meter = Meter(tail, sent, tokens)
        self._meters.append(meter)
        return meter

    async def settle(
        self,
        record: RequestRecord,
        tokens: Callable[[], Awaitable[int | None]],
        count: TextCounter | None,
        factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Add what all calls cost to a record.

        ``tokens`` counts a prompt that wasn't counted before, or returns ``None``. ``factor`` returns the upstream's
        tokens per token here.
        """
        meters, self._meters = self._meters, []
        last = next((meter for meter in reversed(meters) if not meter.free), None)
        for meter in meters:
            call = record.calls[meter.place] if meter.place is not None and meter.place < len(record.calls) else None
            if meter.end_failed():
                if meter is meters[-1]:
                    record.error = record.error or UpstreamError.code
                if call is not None:
                    result = "error" if call.result == ACCEPTED else call.result
                    call = record.calls[meter.place or 0] = replace(call, result=result, error=meter.error)
            if meter.free:
                continue
            usage = await meter.usage(tokens, count, factor)
            if self.background is not None and usage.estimated and not usage.output:
                usage = replace(usage, output=EXPECTED_OUTPUT)
            record.usage = usage if record.usage is None else record.usage.plus(usage)
            if call is not None and len(record.calls) > 1:
                record.calls[meter.place or 0] = replace(call, usage=usage)
            if self.price_of is not None:
                cost = self.price_of.cost(usage, answers=meter is last)
                record.cost = cost if record.cost is None else record.cost.plus(cost)


class Basis(msgspec.Struct, frozen=True):
    """The facts about a request that its price depends on, without its content."""

    before: int | None = None
    sent: int | None = None
    shared: int | None = None
    forecast: Forecast | None = None
    recent: bool = False  # the conversation's last request is at most `CACHE_SECONDS` old
    new_checkpoint: bool = False  # this request is the first after a checkpoint
    fits: bool = True  # the request as received wasn't too large


NO_BASIS = Basis()


class Pricing(msgspec.Struct, frozen=True):
    """How to price the calls of a request."""

    price: Price
    basis: Basis = NO_BASIS  # that of the call whose answer the client gets
    others: Mapping[str, Price | None] = {}  # those of models that the provider called, `None`: as `price`

    def cost(self, usage: Usage, *, answers: bool) -> Cost:
        if answers:
            return cost_of(self.price, usage, self.basis, self.others)
        # Without the proxy there would have been no other call.
        return replace(cost_of(self.price, usage, NO_BASIS, self.others), as_received=0)


def pricing(price: Price | None) -> Pricing | None:
    return None if price is None else Pricing(price)


def cost_of(price: Price, usage: Usage, basis: Basis, others: Mapping[str, Price | None] = NO_OTHERS) -> Cost:
    """Return the price of a request by its reported usage, and the estimates. For ``others`` see ``Price.cost``."""
    answer = usage.without_compactions
    sent = price.cost(usage, others)
    extra = sent - price.cost(answer) if usage.compactions else 0
    # The use of a cache matters only if it has a price of its own.
    estimated = usage.estimated or (usage.cache_read is None and price.rates(usage.input or 0).cache_read is not None)
    if basis.before is None or basis.sent is None or not basis.sent:
        return Cost(sent, sent, estimated=estimated)
    ratio = (answer.input or 0) / basis.sent
    as_received = sent
    if basis.before != basis.sent and basis.fits:
        shared = (basis.shared or 0) * ratio
        as_received = _prompt_cost(price, answer, basis, round(basis.before * ratio), shared) + extra
    forecast = None
    if basis.forecast is not None:
        forecast = _forecast_cost(price, answer, basis, basis.forecast, ratio) + extra
    return Cost(sent, as_received, forecast, estimated)


def _prompt_cost(price: Price, usage: Usage, basis: Basis, prompt: int, shared: float) -> int:
    """Return the price of the same answer to another prompt, of which the cache would have served ``shared`` tokens."""
    caches = usage.cache_read is not None and (basis.recent or bool(usage.cache_read))
    read = min(prompt, round(shared)) if caches else 0
    written = prompt - read if usage.cache_write else 0
    lasting = round(written * (usage.cache_write_1h or 0) / usage.cache_write) if usage.cache_write else 0
    return price.cost(replace(usage, input=prompt, cache_read=read, cache_write=written, cache_write_1h=lasting))


def _forecast_cost(price: Price, usage: Usage, basis: Basis, forecast: Forecast, ratio: float) -> int:
    """Return the price of a request in shadow mode if the policy enforced compaction, with a new summary's price."""
    added = (basis.before or 0) - (basis.shared or 0)
    shared = 0 if basis.new_checkpoint else max(0, forecast.after - added)
    cost = _prompt_cost(price, usage, basis, round(forecast.after * ratio), shared * ratio)
    if basis.new_checkpoint and forecast.summarized:
        asked = round(forecast.summarized * ratio)
        cost += price.cost(Usage(asked, round(forecast.written * ratio), tier=usage.tier, region=usage.region))
    return cost


class Pending(SharedValue, frozen=True):
    """The estimate that was counted for a response in the background, until its usage is seen."""

    until: float  # when the estimate is forgotten
    model: str  # the upstream's name
    usage: Usage
    cost: Cost | None = None
    seen: bool = False

    def merged(self, other: Pending) -> Pending:
        """Return the state in which the usage has been seen."""
        return other if other.seen else self


class BackgroundResponses:
    """The responses that upstreams make in the background. The first usage that a caller reads replaces an estimate."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending = ReplicatedMap(store, "background", Pending, RESPONSES)

    def begin(self, tenant: str, id: str, model: str, record: RequestRecord) -> None:
        if record.usage is not None and record.usage.estimated:
            until = time.time() + BACKGROUND_SECONDS
            self._pending.put(tenant, "", id, Pending(until, model, record.usage, record.cost))

    async def find(self, tenant: str, id: str) -> Pending | None:
        """Return the estimate for a response whose usage hasn't been seen."""
        read = self._pending.prefetch(tenant, "", id, latest=True)
        if read is not None:
            await asyncio.wait({read}, timeout=FIRST_READ_SECONDS)
        pending = self._pending.get(tenant, "", id)
        return None if pending is None or pending.seen else pending

    async def correct(self, tenant: str, id: str, pending: Pending, record: RequestRecord, *, ended: bool) -> None:
        """Replace the usage in the record of a read by its difference from the estimate, which may be negative.

        ``ended`` is true if the response had ended. Before that, its usage isn't final. Of several reads at the same
        time, also in other processes, one does so.
        """
        usage, cost = record.usage, record.cost
        record.usage = record.cost = None
        known = self._pending.get(tenant, "", id)
        if not ended or usage is None or usage.estimated or known is None or known.seen:
            return
        try:
            ours = secrets.token_bytes(16)
            if await self._store.add(tenant, "background.seen", name_of("", id), ours, BACKGROUND_SECONDS) != ours:
                return
        except StoreFailed as failure:
            log.warning("background.not_shared", reason=str(failure))
        self._pending.put(tenant, "", id, replace(pending, seen=True))
        record.usage = usage.plus(pending.usage.negative())
        if cost is not None:
            before = pending.cost or Cost()
            record.cost = cost.plus(Cost(-before.sent, -before.as_received))

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return self._pending.forget(forgotten)

    async def aclose(self) -> None:
        await self._pending.aclose()
