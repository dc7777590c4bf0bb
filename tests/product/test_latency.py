"""Response times by team and part: the command, the page, the path, and the metrics have the same figures."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.constants import DAY
from proxy.records.report import SAMPLE, latency
from proxy.records.sqlite import SqliteRecords
from proxy.telemetry.record import RequestRecord, UpstreamCall, first_id
from tests.kit.program import call
from tests.kit.scripted import behind, chat, client, key_hash
from tests.kit.upstream import Reply, StandIn
from tests.kit.waiting import until

ADMIN = {"authorization": "Bearer cp-admin"}
TEAMS = {"quick": (0.0, 0.0), "far": (0.6, 0.0), "waits": (0.0, 0.6)}
"""Seconds that the upstream takes to answer and to summarize, for each team."""


def answered(team: str, when: float, ms: float, number: int) -> RequestRecord:
    """Return a record of a request that waited only for its upstream."""
    id = f"{first_id(when)[:18]}{number:06x}"
    phases = {"body": 1.0, "upstream": ms, "first_byte": ms + 5, "total": ms + 6}
    tenant = f"team:{team}"
    calls = [UpstreamCall("accepted", 200, ms)]
    return RequestRecord(id, when, tenant=tenant, team=team, status=200, calls=calls, phases=phases)


async def stored(file: Path, records: list[RequestRecord]) -> None:
    async with aclosing(SqliteRecords(file)) as store:
        await store.write(records, 9 * DAY)


def by_part(found: dict[str, Any], team: str) -> dict[str, dict[str, Any]]:
    return {row["part"]: row for row in found["rows"] if row["team"] == team}


def test_one_look_shows_which_part_of_which_team_became_slow(tmp_path: Path) -> None:
    def respond(body: dict[str, Any]) -> Reply:
        return Reply(content="Done.", delay=TEAMS[body["model"]][0])

    def summarize(body: dict[str, Any]) -> Reply:
        return Reply(content="Goal: done.", delay=TEAMS[body["model"]][1])

    upstream = StandIn(window=16_000, responder=respond, summariser=summarize)
    teams = {team: {"keys": [key_hash(team)]} for team in TEAMS}
    days = [answered("far", time.time() - day * DAY, 20.0, day) for day in range(1, 6)]
    store = {"url": f"sqlite:///{tmp_path}/store.db"}
    sections = {"auth": {"mode": "keys"}, "admin": {"keys": [key_hash("cp-admin")]}, "teams": teams, "store": store}
    asyncio.run(stored(tmp_path / "store-records.db", days))
    with behind(upstream, tmp_path, policy={"prepare": None}, **sections) as url:
        for team in TEAMS:
            with client(url, team) as caller:
                caller.chat.completions.create(model=team, messages=chat(8, 900))
                caller.chat.completions.create(model=team, messages=chat(1, 10))
        with httpx.Client(base_url=url, headers=ADMIN, trust_env=False) as admin:
            found: dict[str, Any] = {}

            def recorded() -> bool:
                found.update(admin.get("/compaction/report").json()["latency"])
                return sum(row["requests"] for row in found["rows"] if row["part"] == "total") == 11

            assert until(recorded)
            page = admin.get("/compaction/savings").text
        own = httpx.get(f"{url}/compaction/report", headers={"authorization": "Bearer far"}, trust_env=False).json()
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    far, waits, quick = (by_part(found, team) for team in ("far", "waits", "quick"))
    assert far["upstream"]["p95"] > 600 > 100 > quick["upstream"]["p95"]
    assert waits["summary"]["p95"] > 600 > waits["upstream"]["p95"]
    assert waits["total"]["p95"] > waits["summary"]["p95"] + waits["own"]["p50"]
    assert max(rows["own"]["p95"] for rows in (far, waits, quick)) < 600, "the proxy's own part has no waits"
    assert [one["p50"] for one in far["upstream"]["slices"] if one["requests"]][:-1] == [20.0] * 5
    assert far["upstream"]["slices"][-1]["p50"] > 600, "since today"
    assert far["upstream"]["requests"] == 7
    assert {row["team"] for row in own["latency"]["rows"]} == {"far"}

    printed = call(tmp_path, "report", "--config", "config.yaml", "--json")
    times = json.loads(printed.stdout)["latency"]
    assert times["rows"] == found["rows"]
    text = call(tmp_path, "report", "--config", "config.yaml", "--team", "far").stdout
    whole = re.search(r"far +│ upstream's start +│ +7 │ +([\d.]+) │", text)
    assert whole is not None, text
    assert whole[1] == "0.020"
    assert "quick" not in text
    assert page.count("upstream&#39;s start") == 3
    assert "0.020<br>" in page
    counted = {
        (sample.name, sample.labels["team"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.endswith("_seconds_sum") and "team" in sample.labels
    }
    assert counted["compaction_upstream_seconds_sum", "far"] >= 1.2
    assert counted["compaction_summaries_wait_seconds_sum", "waits"] >= 0.6
    assert counted["compaction_overhead_seconds_sum", "waits"] < 0.6


def figures(folder: Path, since: float, until: float, records: list[RequestRecord]) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        async with aclosing(SqliteRecords(folder / "records.db")) as store:
            await store.write(records, DAY)
            return await latency(store, since, until, None, None)

    return asyncio.run(read())


@pytest.mark.parametrize(("hours", "slices"), [(1, 5), (2, 9), (24, 9), (168, 8)])
def test_the_slices_of_a_period_are_round(tmp_path: Path, hours: int, slices: int) -> None:
    found = figures(tmp_path, 100 * DAY + 300.0 - hours * 3_600, 100 * DAY + 300.0, [])
    assert (len(found["slices"]), found["rows"]) == (slices, [])
    assert all(start.endswith(":00.000Z") for start in found["slices"])


def test_a_slice_counts_its_newest_requests(tmp_path: Path) -> None:
    start, old = 10.0 * DAY, SAMPLE
    records = [answered("busy", start + n / 10, 20.0 if n >= old else 10.0, n) for n in range(old + SAMPLE)]
    found = figures(tmp_path, start, start + 7_000, records)
    upstream = by_part(found, "busy")["upstream"]
    assert (found["sampled"], upstream["requests"], upstream["p50"]) == (True, SAMPLE, 20.0)
