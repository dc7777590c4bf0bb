"""S1, S6, S7, S15, S16, S17: one caller never gets another caller's data, even if a request claims that identity."""

import asyncio
import dataclasses
import hashlib
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.access.authenticator import Authenticator
from proxy.compaction.planning import Plan
from proxy.compaction.rules import SectionLimits
from proxy.compaction.turn import Turn
from proxy.config import Policy
from proxy.dialects.chat.counting import ChatCounter
from proxy.dialects.chat.request import parse
from proxy.limits.profiles import Profile
from proxy.pipeline import job as compacting
from proxy.pipeline.budget import rules_for
from proxy.pipeline.facts_cache import FactsCache
from proxy.pipeline.job import CompactionInput
from proxy.store import open_store
from proxy.summary.single_flight import Progress, Summaries
from proxy.summary.store import Checkpoint, StoredSummary
from tests.conftest import settings_for
from tests.kit.client import CHAT, JSON, StartProxy, ask, chat
from tests.kit.raw_upstream import Stage, answer
from tests.kit.scripted import behind, key_hash
from tests.kit.scripted import chat as conversation
from tests.kit.summary_conversation import Factory, SimpleOrder
from tests.kit.upstream import Reply, StandIn

PREFIX = "sk-the-same-twenty-chars-and-more-"
ALICE, BOB = PREFIX + "alice", PREFIX + "bob"


# The inputs that decide on a summary, each with two values.
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The inputs that a summary depends on."""

    tenant: str = "t"
    upstream: str = "u"
    model: str = "m"
    version: str = "4"
    first: str = "hello"
    second: str = "there"
    max_tokens: int = 4000
    prompt: str = "{messages}"
    summary_model: str = "small"
    redact: bool = False
    carried: int = 0


SAID = TEXT.map(str.strip)
"""White space around a message's text says nothing."""

shapes = st.builds(
    Shape,
    TEXT,
    TEXT,
    TEXT,
    TEXT,
    SAID,
    SAID,
    st.integers(100, 5000),
    TEXT.map(lambda text: f"{text}{{messages}}"),
    st.text("ab", min_size=1, max_size=2),
    st.booleans(),
    st.integers(0, 1),
)

_remembered = FactsCache()
_loop = asyncio.new_event_loop()


def key_of(shape: Shape) -> str:
    summary = {"max_tokens": shape.max_tokens, "prompt": shape.prompt, "model": shape.summary_model}
    policy = Policy.build("default", {"summary": {**summary, "redact_secrets": shape.redact}})
    messages = [{"role": "user", "content": shape.first}, {"role": "assistant", "content": shape.second}]
    body = parse(json.dumps({"model": shape.model, "messages": messages}).encode())
    rules = rules_for(policy, window_known=True)
    counter = ChatCounter(Profile("m"))
    case = CompactionInput(body, counter, policy, "enforce", 16_000, shape.tenant, shape.upstream, rules)
    turns: list[Turn] = _loop.run_until_complete(_turns(case))
    caps = SectionLimits(summary=100, users=100, newest=100, system=100, words=100, index=100, group=100)
    plan = Plan(caps, (2,), replaced={2: 10}, current_user_message={2: (shape.carried,)})
    version, compacting.PROMPT_VERSION = compacting.PROMPT_VERSION, shape.version
    try:
        return compacting.CompactionJob(case, turns, 0, 0, 20, plan).checkpoints((2,))[-1].key
    finally:
        compacting.PROMPT_VERSION = version


async def _turns(case: CompactionInput) -> list[Turn]:
    return await _remembered.turns(case.body.units, case.counter)


@settings(max_examples=60, deadline=None)
@given(shapes, shapes)
def test_a_key_changes_with_whatever_decides_on_a_summary(one: Shape, other: Shape) -> None:
    assert (key_of(one) == key_of(other)) == (one == other)
    assert len(key_of(one)) == 64


@settings(max_examples=60, deadline=None)
@given(shapes, st.data())
def test_a_key_changes_with_each_part_alone(shape: Shape, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(Shape)]))
    value = getattr(data.draw(shapes.filter(lambda drawn: getattr(drawn, name) != getattr(shape, name))), name)
    assert key_of(dataclasses.replace(shape, **{name: value})) != key_of(shape)


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT)
def test_messages_cannot_be_told_apart_elsewhere(left: str, right: str) -> None:
    """Moving text from the end of one message to the next one changes the key."""
    joined = Shape(first=left + right, second="")
    apart = Shape(first=left, second=right)
    alike = (joined.first.strip(), joined.second) == (apart.first.strip(), apart.second.strip())
    assert (key_of(joined) == key_of(apart)) == alike


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12))
def test_keys_that_begin_alike_are_other_tenants(ending: str) -> None:
    teams = Authenticator(settings_for("http://127.0.0.1:1", Path("/nowhere")))
    whole = teams.authenticate([(b"authorization", f"Bearer {PREFIX}{ending}".encode())]).tenant
    assert whole == "key:" + hashlib.sha256(f"{PREFIX}{ending}".encode()).hexdigest()
    assert teams.authenticate([(b"authorization", f"Bearer {PREFIX}{ending}x".encode())]).tenant != whole


def test_two_teams_pay_for_their_own_summaries(tmp_path: Path) -> None:
    """S1, S6: identical conversations, and headers that ask for the other team's."""
    upstream = StandIn(window=16_000, summariser=lambda body: Reply(content="Goal: something."))
    teams = {"a": {"keys": [key_hash(ALICE)]}, "b": {"keys": [key_hash(BOB)]}}
    body = json.dumps({"model": "m", "messages": conversation(7, 1_000), "user": "a", "cache_key": "x"}).encode()
    with behind(upstream, tmp_path, auth={"mode": "keys"}, teams=teams) as url:

        def asked(key: str, **headers: str) -> str | None:
            more = [(name.replace("_", "-"), value) for name, value in headers.items()]
            got = ask(url, CHAT, body, [JSON, ("authorization", f"Bearer {key}"), *more])
            assert (got.status, got.header("x-compaction")) == (200, "compacted")
            return got.header("x-compaction-summary")

        assert asked(ALICE) == "made"
        claims = {"x_team": "a", "x_user": "alice", "x_tenant": "team:a", "x_compaction_tenant": "team:a"}
        claims |= {"x_api_key": ALICE, "api_key": ALICE, "x_compaction_summary": "forged", "x_compaction_id": "1"}
        assert asked(BOB, **claims) == "made"
        assert (asked(ALICE), asked(BOB)) == ("stored", "stored")
    assert len(upstream.summaries) == 2
    assert b"forged" not in b"".join(request.raw for request in upstream.requests)


def test_the_same_beginning_with_other_words_is_another_conversation(tmp_path: Path) -> None:
    """S6: an equal id and first message don't help a caller who changes the messages between."""
    upstream = StandIn(window=16_000, summariser=lambda body: Reply(content="Goal: something."))
    with behind(upstream, tmp_path) as url:
        for answer in ("Answer 0", "Answer O"):
            messages = conversation(7, 1_000)
            messages[2]["content"] = messages[2]["content"].replace("Answer 0", answer)
            fields = {"model": "m", "messages": messages, "conversation": "same", "prompt_cache_key": "same"}
            got = ask(url, CHAT, json.dumps(fields).encode())
            assert (got.status, got.header("x-compaction-summary")) == (200, "made")
    assert len(upstream.summaries) == 2


def _returning(entry: StoredSummary) -> Factory:
    async def make(previous: StoredSummary | None, position: int, progress: Progress) -> StoredSummary:
        return entry

    return make


def test_another_tenants_entries_take_no_time() -> None:
    """S7: the look-up of what another tenant has takes as long as that of what nobody has."""

    async def measured() -> tuple[list[float], list[float]]:
        store = open_store("sqlite://")
        summaries = Summaries(store)
        for number in range(200):
            entry = StoredSummary("text", b"{}" * 2_000, {})
            wanted = SimpleOrder("team:a", [Checkpoint(1, f"{number:064}", "content")], _returning(entry))
            await summaries.obtain(wanted)
            await store.put("team:a", "summary", f"{number:064}", b"x" * 4_000, 60)
        hits: list[float] = []
        misses: list[float] = []
        # Look up in any order, because each look-up warms caches for the next one.
        order = [(number, there) for number in range(500) for there in (True, False)]
        random.Random(7).shuffle(order)
        for number, there in order:
            key = f"{number % 200 + (0 if there else 900):064}"
            began = time.perf_counter()
            assert await summaries.stored(("team:b", key)) is None
            (hits if there else misses).append(time.perf_counter() - began)
        await store.aclose()
        return hits, misses

    ratios: list[float] = []
    while len(ratios) < 5 and not (ratios and 0.8 < ratios[-1] < 1.25):  # what else the machine does is in it, too
        hits, misses = asyncio.run(measured())
        ratios.append(statistics.median(hits) / statistics.median(misses))
    assert 0.8 < ratios[-1] < 1.25, ratios


PATHS = (
    *("/v1/chat/completions", "/v1/models", "/v1/embeddings", "/v1/files/x", "/v1/", "/v1/chat/completions/"),
    *("/v1//chat/completions", "//v1/chat/completions", "/v1/chat%2Fcompletions", "/v1/%63hat/completions"),
    *("/V1/chat/completions", "/v1/models/", "/v1/../v1/models", "/v1/%2e%2e/metrics", "/v1/models;x=1"),
    *("/compaction/archive/00000000000000000000", "/compaction/archive/", "/compaction//archive/1"),
    *("/metrics/", "//metrics", "/livez/x", "/livez%2f", "//", "/docs", "/openapi.json", "/admin", "/config"),
)


@pytest.fixture
def locked(start_proxy: StartProxy, stage: Stage) -> Iterator[tuple[str, Any]]:
    teams = {"auth": {"mode": "keys"}, "teams": {"a": {"keys": [key_hash(ALICE)]}}}
    with stage(lambda _: [answer()]) as upstream:
        yield start_proxy(upstream.url, {**teams, "upstreams": {"main": {"api_key": "sk-operators"}}}), upstream


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
def test_without_a_key_there_is_nothing(locked: tuple[str, Any], method: str) -> None:
    """S15: every spelling of every path by every method, with no key, a wrong one, and half of the right one."""
    url, upstream = locked
    for path in PATHS:
        for key in (None, "wrong", ALICE[:-1], ALICE + "x", ALICE.upper()):
            headers = [] if key is None else [("authorization", f"Bearer {key}")]
            got = ask(url, path, None if method in ("GET", "HEAD", "TRACE") else b"{}", headers, method)
            assert got.status in (400, 401, 404, 405, 501), (method, path, key, got.status)
            assert b"compaction_requests" not in got.body
    assert upstream.arrived == []


CLAIMS = [
    ("x-user", "a"),
    ("x-team", "a"),
    ("x-tenant-id", "team:a"),
    ("x-forwarded-user", "alice"),
    ("x-forwarded-for", "127.0.0.1"),
    ("x-real-ip", "127.0.0.1"),
    ("forwarded", "for=127.0.0.1;host=localhost"),
    ("x-forwarded-host", "localhost"),
    ("x-litellm-key", ALICE),
    ("x-goog-api-key", ALICE),
    ("cookie", f"key={ALICE}"),
    ("origin", "http://localhost:8787"),
]


def test_who_one_is_comes_from_the_key_alone(locked: tuple[str, Any]) -> None:
    """S16, S17: neither headers nor an address on this machine make anybody somebody."""
    url, upstream = locked
    for path, body in ((CHAT, chat()), ("/v1/embeddings", b"{}"), ("/v1/models", None)):
        for claims in ([claim] for claim in CLAIMS):
            assert ask(url, path, body, [JSON, *claims]).status == 401, claims
        assert ask(url, path, body, [JSON, *CLAIMS]).status == 401
    assert upstream.arrived == []


def test_an_operators_key_is_nobodys(start_proxy: StartProxy, stage: Stage) -> None:
    """S16: the tenant is the caller's key even if the upstream gets the operator's."""
    with stage(lambda _: [answer()]) as upstream:
        url = start_proxy(upstream.url, {"upstreams": {"main": {"api_key": "sk-operators"}}})
        assert ask(url, CHAT, chat(), [JSON, ("authorization", f"Bearer {ALICE}"), *CLAIMS]).status == 200
        sent = dict(upstream.last.headers)
    assert sent["authorization"] == "Bearer sk-operators"
    assert sent.keys().isdisjoint({"x-forwarded-for", "x-real-ip", "forwarded", "x-api-key", "cookie"})
