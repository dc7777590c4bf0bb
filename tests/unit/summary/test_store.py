"""One making for all who wait, kept for all who come later."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from proxy.compaction.identifiers import Mention
from proxy.store import Entry, Store, StoreFailed
from proxy.summary import single_flight, times
from proxy.summary import store as module
from proxy.summary.single_flight import NothingToAsk, Progress, Summaries
from proxy.summary.store import KIND, LEASES, Cause, Checkpoint, StoredSummary
from tests.kit.summary_conversation import Factory, SimpleOrder

pytestmark = pytest.mark.anyio

FIRST, SECOND, THIRD = (Checkpoint(n, key) for n, key in ((10, "k10"), (20, "k20"), (30, "k30")))


def entry(text: str, *, cause: Cause | None = None) -> StoredSummary:
    names = {f"/a/{text}": Mention("path")}
    return StoredSummary(text, b'{"role":"user","content":"%s"}' % text.encode(), names, cause=cause)


class Shelf(Store):
    """A store in memory that can fail, be slow, and lose keys."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str, str], bytes] = {}
        self.leases: dict[tuple[str, str], bytes] = {}
        self.gets = 0
        self.failing = False
        self.stuck = False
        self.gate: asyncio.Event | None = None
        self.trouble: dict[str, str] = {}

    def _check(self) -> None:
        if self.failing:
            raise StoreFailed("disk full")

    async def get_many(self, tenant: str, kind: str, keys: Sequence[str]) -> dict[str, bytes]:
        (key,) = keys
        self.gets += 1
        found = self.leases.get((tenant, key)) if kind == LEASES else self.kept.get((tenant, kind, key))
        if self.gate is not None:
            await self.gate.wait()
        if self.trouble.get(key) == "hangs":
            await asyncio.sleep(3600)
        if self.trouble.get(key) == "fails":
            raise StoreFailed("disk full")
        self._check()
        return {} if found is None else {key: found}

    async def put_many(self, entries: Sequence[Entry]) -> None:
        raise NotImplementedError

    async def add(self, tenant: str, kind: str, key: str, value: bytes, seconds: float) -> bytes:
        self._check()
        if kind == LEASES:
            return self.leases.setdefault((tenant, key), value)
        if self.stuck:
            await asyncio.Event().wait()
        return self.kept.setdefault((tenant, kind, key), value)

    async def replace(self, tenant: str, kind: str, key: str, old: bytes, new: bytes, seconds: float) -> bool:
        self._check()
        kept: dict[Any, bytes] = self.leases if kind == LEASES else self.kept
        place = (tenant, key) if kind == LEASES else (tenant, kind, key)
        if kept.get(place) != old:
            return False
        if seconds:
            kept[place] = new
        else:
            del kept[place]
        return True

    async def aclose(self) -> None:
        pass


class Maker:
    """Make entries after ``go`` is set, and record the requests."""

    def __init__(self, text: str = "made", *, digest: bool = False, held: bool = False) -> None:
        self.text = text
        self.digest = digest
        self.calls: list[tuple[str | None, int]] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.ending: asyncio.Event | None = None
        if not held:
            self.go.set()

    async def __call__(self, previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        self.calls.append((previous.text if previous else None, position))
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.ending is not None:
                await self.ending.wait()
            raise
        return entry(self.text, cause="failed" if self.digest else None)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "DIGEST", 0.0)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def summaries(shelf: Shelf) -> AsyncIterator[Summaries]:
    """Summaries that leave no task behind."""
    summaries = Summaries(shelf)
    yield summaries
    await summaries.aclose()
    await turns_of_the_loop(20)
    assert all("TestRunner" in repr(task) for task in asyncio.all_tasks()), "only anyio's own tasks"


async def turns_of_the_loop(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_made_once_and_stored(summaries: Summaries, shelf: Shelf) -> None:
    make = Maker()
    assert await summaries.obtain(SimpleOrder("t", [FIRST], make)) == (entry("made"), "made")
    assert await summaries.obtain(SimpleOrder("t", [FIRST], make)) == (entry("made"), "stored")
    assert make.calls == [(None, 0)]
    assert list(shelf.kept) == [("t", KIND, "k10")]
    # Another process, or this one after a restart.
    assert await Summaries(shelf).obtain(SimpleOrder("t", [FIRST], make)) == (entry("made"), "stored")
    assert len(make.calls) == 1


@pytest.mark.parametrize(
    ("known", "start"),
    [([], (None, 0)), ([FIRST], ("k10", 10)), ([FIRST, SECOND], ("k20", 20)), ([SECOND], ("k20", 20))],
)
async def test_a_checkpoints_summary_is_made_from_the_latest_one_that_is_stored(
    known: Sequence[Checkpoint], start: tuple[str | None, int], summaries: Summaries, shelf: Shelf
) -> None:
    for checkpoint in known:
        await summaries.obtain(SimpleOrder("t", [checkpoint], Maker(checkpoint.key)))
    make = Maker()
    await Summaries(shelf).obtain(SimpleOrder("t", [FIRST, SECOND, THIRD], make))
    assert make.calls == [start]


@pytest.mark.parametrize("leaving", [range(1), range(1, 20), range(19)], ids=("the first", "the others", "all but one"))
async def test_who_leaves_does_not_end_it_for_those_who_stay(
    leaving: range, summaries: Summaries, shelf: Shelf
) -> None:
    make = Maker(held=True)
    callers = [asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], make))) for _ in range(20)]
    await make.began.wait()
    for n in leaving:
        callers[n].cancel()
    await turns_of_the_loop()
    make.go.set()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    for n, outcome in enumerate(outcomes):
        if n in leaving:
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            assert outcome == (entry("made"), "made")
    assert (len(make.calls), make.cancelled) == (1, 0)


async def test_it_goes_on_when_the_last_one_leaves(summaries: Summaries, shelf: Shelf) -> None:
    make = Maker(held=True)
    callers = [asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], make))) for _ in range(3)]
    await make.began.wait()
    for caller in callers:
        caller.cancel()
    await turns_of_the_loop()
    again = asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], Maker("unused"))))
    await turns_of_the_loop()
    again.cancel()
    await turns_of_the_loop()
    assert make.cancelled == 0
    make.go.set()
    await turns_of_the_loop(20)
    assert await summaries.obtain(SimpleOrder("t", [FIRST], Maker("unused"))) == (entry("made"), "stored")
    assert ("t", KIND, "k10") in shelf.kept


async def test_no_more_than_so_many_go_on_without_a_client(
    monkeypatch: pytest.MonkeyPatch, summaries: Summaries, shelf: Shelf
) -> None:
    """A tenant's own bound first; over the bound of the process, the tenant that has most of them loses one."""
    monkeypatch.setattr(single_flight, "LEFT_OF_A_TENANT", 3)
    monkeypatch.setattr(single_flight, "LEFT", 4)

    async def left(tenant: str, key: str) -> Maker:
        make = Maker(held=True)
        caller = asyncio.ensure_future(summaries.obtain(SimpleOrder(tenant, [Checkpoint(1, key)], make)))
        await make.began.wait()
        caller.cancel()
        await turns_of_the_loop()
        return make

    strangers = [await left("s", f"k{number}") for number in range(5)]
    assert [make.cancelled for make in strangers] == [0, 0, 0, 1, 1]
    mine = [await left("t", f"k{number}") for number in range(2)]
    assert [make.cancelled for make in mine] == [0, 0], "a stranger's makings don't end another tenant's"
    assert [make.cancelled for make in strangers] == [0, 0, 1, 1, 1]
    # A request that comes while the cancelled one is still ending doesn't join it.
    assert (await summaries.obtain(SimpleOrder("s", [Checkpoint(1, "k2")], Maker("again"))))[0].text == "again"


async def test_a_fault_in_a_making_without_a_client_is_logged(summaries: Summaries, shelf: Shelf) -> None:
    go = asyncio.Event()

    async def broken(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        await go.wait()
        raise LookupError("a fault of ours")

    caller = asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], broken)))
    await turns_of_the_loop()
    caller.cancel()
    await turns_of_the_loop()
    with capture_logs() as logs:
        go.set()
        await turns_of_the_loop(20)
    assert [line["event"] for line in logs] == ["summary.background_failed"]


async def test_who_lost_patience_gets_a_digest_that_the_summary_replaces(summaries: Summaries, shelf: Shelf) -> None:
    make = Maker(held=True)
    got, origin = await summaries.obtain(SimpleOrder("t", [FIRST], make, 0.05))
    assert (got.text, got.cause, origin) == ("for now", "timeout", "digest")
    assert await summaries.obtain(SimpleOrder("t", [FIRST], make, 0.05)) == (got, "digest")
    assert not shelf.kept, "no digest is stored"
    make.go.set()
    await turns_of_the_loop(50)
    got, origin = await summaries.obtain(SimpleOrder("t", [FIRST], make, 0.05))
    assert (got.text, got.replaced, origin) == ("made", "timeout", "stored")
    assert len(make.calls) == 1


@pytest.mark.usefixtures("no_digests")
async def test_no_request_waits_for_the_next_call_after_a_late_one(summaries: Summaries) -> None:
    late = Maker(held=True)
    first, _ = await summaries.obtain(SimpleOrder("t", [FIRST], late, 0.05))
    late.digest = True
    late.go.set()
    await turns_of_the_loop(50)
    summaries.cache.remember(("t", FIRST.key), first)  # as if the call had ended late, too
    again = Maker("again", held=True)
    got, origin = await summaries.obtain(SimpleOrder("t", [FIRST], again, 3600.0))
    assert (got.message, origin) == (first.message, "digest")
    await again.began.wait()
    again.go.set()
    await turns_of_the_loop(50)
    assert (await summaries.obtain(SimpleOrder("t", [FIRST], again)))[0].text == "again"


async def test_a_late_digest_does_not_hide_the_summary_of_another_worker(summaries: Summaries, shelf: Shelf) -> None:
    make = Maker(held=True)
    await summaries.obtain(SimpleOrder("t", [FIRST], make, 0.05))
    shelf.kept["t", KIND, FIRST.key] = msgspec.msgpack.encode(entry("of another"))
    assert (await summaries.obtain(SimpleOrder("t", [FIRST], make, 0.05)))[0].text == "of another"


async def test_forgetting_a_tenant_ends_summaries_that_nobody_waits_for(summaries: Summaries, shelf: Shelf) -> None:
    make, others = Maker(held=True), Maker(held=True)
    await summaries.obtain(SimpleOrder("t", [FIRST], make, 0.05))
    await summaries.obtain(SimpleOrder("other", [FIRST], others, 0.05))
    summaries.forget(lambda tenant: tenant == "t")
    await turns_of_the_loop(50)
    assert (make.cancelled, others.cancelled) == (1, 0)
    assert not shelf.kept
    assert not summaries.given_up(SimpleOrder("t", [FIRST], make))


async def test_a_try_is_skipped_for_a_request_that_waits_but_not_the_last_one(summaries: Summaries) -> None:
    skipped: list[bool] = []
    ended = asyncio.Event()

    async def two(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        for last in (False, True):
            try:
                async with progress.trying(3600, last=last):
                    await asyncio.sleep(0.2 if last else 3600)
                skipped.append(False)
            except TimeoutError:
                skipped.append(True)
        ended.set()
        return entry("by the second")

    got, _ = await summaries.obtain(SimpleOrder("t", [FIRST], two, 0.05))
    assert got.text == "for now"
    await ended.wait()
    assert skipped == [True, False]


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", b"garbage", msgspec.msgpack.encode({"text": 5}), msgspec.msgpack.encode([1]),
     b"\x81\xa4text\xa2\xff\xfe", msgspec.msgpack.encode(entry("x"))[:-3]],
)  # fmt: skip
async def test_an_entry_that_cannot_be_read_is_made_anew(value: bytes, summaries: Summaries, shelf: Shelf) -> None:
    shelf.kept["t", KIND, "k10"] = shelf.kept["t", KIND, "k20"] = value
    make = Maker()
    assert await summaries.obtain(SimpleOrder("t", [FIRST, SECOND], make)) == (entry("made"), "made")
    assert make.calls == [(None, 0)]
    assert msgspec.msgpack.decode(shelf.kept["t", KIND, "k20"], type=StoredSummary) == entry("made")


async def test_a_digest_stands_in_for_a_while_and_is_never_stored_nor_built_upon(
    summaries: Summaries, shelf: Shelf
) -> None:
    failing = Maker("digest", digest=True)
    for origin in ("digest", "digest"):
        found, said = await summaries.obtain(SimpleOrder("t", [FIRST], failing))
        assert (found.text, found.digest, said) == ("digest", True, origin)
    assert len(failing.calls) == 1
    assert shelf.kept == {}
    later = Maker("later")
    await summaries.obtain(SimpleOrder("t", [FIRST, SECOND], later))
    assert later.calls == [(None, 0)]


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
async def test_a_store_that_fails_for_an_earlier_summary_leaves_what_is_in_memory(
    trouble: str, summaries: Summaries, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store returns the last summary, but none of the earlier ones."""
    monkeypatch.setattr(times, "LOOKING", 0.05)
    shelf.trouble[SECOND.key] = trouble
    first, third = Maker("first"), Maker("third")
    await summaries.obtain(SimpleOrder("t", [FIRST], first))
    assert await summaries.obtain(SimpleOrder("t", [FIRST, SECOND, THIRD], third)) == (entry("third"), "made")
    assert third.calls == [("first", 10)]


async def test_an_error_reaches_all_who_wait_and_the_next_one_tries_again(summaries: Summaries, shelf: Shelf) -> None:
    async def broken(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        await asyncio.sleep(0)
        raise LookupError("a fault of ours")

    callers = [asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], broken))) for _ in range(3)]
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LookupError] * 3
    assert (await summaries.obtain(SimpleOrder("t", [FIRST], Maker())))[1] == "made"


async def test_made_ahead_in_the_background_once(summaries: Summaries, shelf: Shelf) -> None:
    make = Maker(held=True)
    for _ in range(5):
        summaries.begin(SimpleOrder("t", [FIRST], make))
    await make.began.wait()
    summaries.begin(SimpleOrder("t", [FIRST], make))
    caller = asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], make)))
    await turns_of_the_loop()
    # A request that leaves doesn't end a summary that was begun early.
    caller.cancel()
    await turns_of_the_loop()
    make.go.set()
    await turns_of_the_loop(20)
    assert await summaries.obtain(SimpleOrder("t", [FIRST], make)) == (entry("made"), "stored")
    summaries.begin(SimpleOrder("t", [FIRST], make))
    await turns_of_the_loop()
    assert len(make.calls) == 1


class Unaskable(Maker):
    """Find no model to ask."""

    async def __call__(self, previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        await super().__call__(previous, position, progress)
        raise NothingToAsk


@pytest.mark.parametrize(("lifetime", "calls"), [(times.DIGEST, 1), (0.0, 2)])
async def test_without_a_model_nothing_is_made_ahead(
    lifetime: float, calls: int, summaries: Summaries, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "DIGEST", lifetime)
    ahead = Unaskable()
    with capture_logs() as logs:
        for _ in range(2):
            summaries.begin(SimpleOrder("t", [FIRST], ahead))
            await turns_of_the_loop(20)
    assert (len(ahead.calls), shelf.leases, logs) == (calls, {}, [])
    found, origin = await summaries.obtain(SimpleOrder("t", [FIRST], Maker("digest", digest=True)))
    assert (found.text, origin) == ("digest", "digest")


async def test_a_request_that_waits_for_a_task_ahead_makes_its_own_digest(summaries: Summaries, shelf: Shelf) -> None:
    ahead, own = Unaskable(held=True), Maker("digest", digest=True)
    summaries.begin(SimpleOrder("t", [FIRST], ahead))
    await ahead.began.wait()
    callers = [asyncio.ensure_future(summaries.obtain(SimpleOrder("t", [FIRST], own))) for _ in range(3)]
    await turns_of_the_loop()
    with capture_logs() as logs:
        ahead.go.set()
        found = await asyncio.gather(*callers)
    assert [(one.text, origin) for one, origin in found] == [("digest", "digest")] * 3
    assert (len(ahead.calls), len(own.calls), logs) == (1, 1, [])


@pytest.mark.usefixtures("no_digests")
async def test_a_digest_without_a_call_is_no_failure_and_a_success_resets_the_count(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 1)
    summaries = Summaries(shelf)

    async def unasked(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        return entry("digest", cause="breaker_open")

    failing = Maker("digest", digest=True)
    makes: list[Factory] = [failing, failing, *[unasked] * 5]
    for make in makes:
        assert not (await summaries.obtain(SimpleOrder("t", [FIRST], make)))[0].given_up
    assert (await summaries.obtain(SimpleOrder("t", [FIRST], Maker())))[1] == "made"
    assert (await summaries.obtain(SimpleOrder("t", [SECOND], Maker())))[1] == "made", (
        "which drops the first one from memory"
    )
    shelf.kept.clear()
    for _ in range(2):
        assert not (await summaries.obtain(SimpleOrder("t", [FIRST], failing)))[0].given_up
    await summaries.aclose()


@pytest.mark.usefixtures("no_digests")
async def test_the_number_of_remembered_failures_is_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_flight, "FAILED", 3)
    summaries = Summaries(shelf)
    for _ in range(2):
        await summaries.obtain(SimpleOrder("t", [FIRST], Maker(digest=True)))
    for n in range(3):
        await summaries.obtain(SimpleOrder("t", [Checkpoint(1, f"k{n}")], Maker(digest=True)))
    assert not (await summaries.obtain(SimpleOrder("t", [FIRST], Maker(digest=True))))[0].given_up
    await summaries.aclose()


@pytest.mark.usefixtures("no_digests")
async def test_after_three_failures_no_model_is_called_for_a_conversation(summaries: Summaries) -> None:
    failing = Maker(digest=True)
    states = [(await summaries.obtain(SimpleOrder("t", [FIRST], failing)))[0].given_up for _ in range(4)]
    assert states == [False, False, True, True]
    assert len(failing.calls) == 3
    assert summaries.given_up(SimpleOrder("t", [FIRST, SECOND], failing)), "a later checkpoint of the conversation"
    assert not summaries.given_up(SimpleOrder("other", [FIRST], failing))
