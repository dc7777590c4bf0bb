"""Test the paths for records: isolation, pages, sums, and the commands that read the same file."""

import asyncio
import contextlib
import csv
import html
import io
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.config import load
from proxy.endpoints.records import PARAMETERS, REPORT, REQUESTS, STATUS
from proxy.limits.learned import LearnedLimit, LearnedLimits
from proxy.records.model import SUMS, LedgerSums, RecordQuery, sums_of
from proxy.records.report import BY, MONEY
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from proxy.store import open_store
from proxy.telemetry.record import Cost, Reason, RequestRecord, UpstreamCall, Usage, first_id
from tests.kit.program import call, program, terminal, write_config
from tests.kit.records import records_in, written
from tests.kit.scripted import behind, chat, key_hash
from tests.kit.upstream import AGENTS, EveryApi, Reply, StandIn, summarise
from tests.kit.waiting import until

TEAMS = ("red", "blue", "green")
COUNT = 2_500
DOLLAR = 10**12
CANARY = "CANARY-7f3a"


def made(number: int, team: str, when: float, **fields: Any) -> RequestRecord:
    """Return a record that names its team in its model. Every third one costs more than without the proxy."""
    verdict = ("compacted", "none", "shadow")[number % 3]
    forecast = DOLLAR // 9 if verdict == "shadow" else None
    shown: dict[str, Any] = {
        "path": "/v1/chat/completions",
        "api": "chat",
        "policy": f"for-{team}",
        "model": f"model-of-{team}",
        "upstream": "main",
        "verdict": verdict,
        "reason": Reason("fraction", 13_600, 15_200, 0.85) if verdict == "compacted" else None,
        "before": 1_000 + number,
        "sent": 500,
        "forecast": 400 if verdict == "shadow" else None,
        "calls": [UpstreamCall("accepted", 200, 12.0, 500)],
        "usage": Usage(510, 20, 100),
        "cost": Cost(DOLLAR // 7 + number, DOLLAR // (6 + number % 3), forecast, number % 2 == 0),
        "status": 200,
        "phases": {"total": 20.5},
    }
    shown |= fields
    id = f"{first_id(when)[:14]}{number:010x}"
    return RequestRecord(id, when, tenant=f"team:{team}", team=team, **shown)


class Running(NamedTuple):
    """A proxy with three teams, and their records, oldest first."""

    url: str
    http: httpx.Client
    folder: Path
    records: list[RequestRecord]

    def get(self, path: str, key: str = "sk-admin", **parameters: str) -> httpx.Response:
        return self.http.get(self.url + path, params=parameters or None, headers={"authorization": f"Bearer {key}"})

    def ids(self, key: str, **parameters: str) -> list[str]:
        return [one["id"] for one in self.get(REQUESTS, key, **parameters).json()["data"]]

    def of(self, team: str) -> list[RequestRecord]:
        return [one for one in self.records if one.team == team]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("records")
    config = write_config(
        {
            "auth": {"mode": "keys"},
            "admin": {"keys": [key_hash("sk-admin"), {"hash": key_hash("sk-old"), "expires": "2020-01-01"}]},
            "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1", "api_key": "sk-upstream"}},
            "teams": {team: {"keys": [key_hash(f"sk-{team}")]} for team in TEAMS},
        },
        folder,
    )
    now = time.time()
    records = [made(number, TEAMS[number % 7 % 3], now - 3 * (COUNT - number)) for number in range(COUNT)]
    parent = records[1]
    cost = {"kind": "summary", "parent": parent.id, "cost": Cost(DOLLAR // 100), "reason": None, "verdict": "none"}
    summary = made(COUNT, str(parent.team), parent.time, **cost)
    error = made(COUNT + 1, "blue", now - 1, calls=[UpstreamCall("upstream_timeout", None, 5.0)], status=504)
    written(folder / "store.db", [*records, summary, error])

    async def learned() -> None:
        store = open_store(f"sqlite:///{folder}/store.db")
        limits = LearnedLimits(store)
        for team in ("red", "blue"):
            limits.learn("main", f"model-of-{team}", f"team:{team}", LearnedLimit(input=9_000, named=8_000))
        await limits.aclose()
        await store.aclose()

    asyncio.run(learned())
    with serve(Proxy(load(config, {}))) as url, httpx.Client(trust_env=False, timeout=60) as http:
        yield Running(url, http, folder, [*records, error, summary])


def test_a_team_sees_its_own_records_by_every_path_and_parameter(running: Running) -> None:
    blue = running.of("blue")
    foreign = blue[len(blue) // 2]
    known = {one.id for one in running.of("red")}
    tried: list[dict[str, str]] = [
        {},
        {"team": "blue"},
        {"policy": "for-blue"},
        {"model": "model-of-blue"},
        {"verdict": "none", "since": "7d", "limit": "1000"},
        {"cursor": foreign.id},
        {"cursor": "f" * 24},
    ]
    for given in tried:
        found = running.ids("sk-red", **given)
        assert set(found) <= known
        assert bool(found) is not any("blue" in value for value in given.values())
    answers = [
        running.get(REPORT, "sk-red", by=by, format=form, **team)
        for by in BY
        for form in ("json", "csv")
        for team in ({}, {"team": "blue"})
    ]
    answers += [running.get(STATUS, "sk-red"), running.get(REQUESTS, "sk-red", limit="1000")]
    assert {answer.status_code for answer in answers} == {200}
    assert not any("blue" in answer.text for answer in answers)
    other, unknown = running.get(f"{REQUESTS}/{foreign.id}", "sk-red"), running.get(f"{REQUESTS}/{'0' * 24}", "sk-red")
    assert (other.status_code, other.content, sorted(other.headers)) == (404, unknown.content, sorted(unknown.headers))
    assert running.get(f"{REQUESTS}/{foreign.id}", "sk-blue").json()["id"] == foreign.id
    assert running.get(f"{REQUESTS}/{foreign.id}").json()["team"] == "blue"


def test_an_admin_key_is_for_records_alone(running: Running) -> None:
    assert {one["team"] for one in running.get(REQUESTS).json()["data"]} == set(TEAMS)
    refused = [running.get(path) for path in ("/v1/models", f"/compaction/archive/{'0' * 20}")]
    refused += [running.get(path, key) for path in PARAMETERS for key in ("sk-old", "sk-nobody")]
    refused += [running.http.get(running.url + path) for path in PARAMETERS if "{" not in path]
    assert {answer.status_code for answer in refused} == {401}
    body = {"model": "m", "messages": []}
    sent = running.http.post(f"{running.url}/v1/chat/completions", json=body, headers={"x-api-key": "sk-admin"})
    assert (sent.status_code, "admin key" in sent.text) == (401, True)


def test_pages_have_every_record_once_while_others_are_written(running: Running) -> None:
    wanted = [one.id for one in reversed(running.records) if one.kind == "request"]
    seen: list[str] = []
    cursor, page = {}, 0
    while True:
        found = running.get(REQUESTS, limit="300", **cursor).json()
        seen += [one["id"] for one in found["data"]]
        page += 1
        written(running.folder / "store.db", [made(5_000 + page, "red", time.time())])
        assert found["has_more"] is (found["next_cursor"] is not None)
        if not found["has_more"]:
            break
        cursor = {"cursor": found["next_cursor"]}
    assert (len(seen), page) == (len(set(seen)), 9)
    assert seen == sorted(wanted, reverse=True)


def added(records: Sequence[RequestRecord]) -> dict[str, Any]:
    sums = LedgerSums()
    for one in records:
        sums.add(sums_of(one))
    return {name: getattr(sums, name) for name in SUMS}


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: int(Decimal(row[name]) * DOLLAR) if name in MONEY else row[name] for name in SUMS}


def test_the_sums_of_a_report_are_those_of_the_records(running: Running) -> None:
    all_of = {team: [one for one in _stored(running) if one.team == team] for team in TEAMS}
    whole = running.get(REPORT, by="team").json()
    rows = {row["team"]: figures(row) for row in whole["rows"]}
    assert figures(whole["total"]) == {name: sum(row[name] for row in rows.values()) for name in SUMS}
    rows.pop(None, None)  # requests that were refused, so that they have no team
    assert rows == {team: added(of) for team, of in all_of.items()}
    for team in TEAMS:
        own = running.get(REPORT, f"sk-{team}", by="day,model").json()
        assert figures(own["total"]) == added(all_of[team])
        total = own["total"]
        spent = Decimal(total["cost"]) + Decimal(total["summary_cost"])
        assert Decimal(total["savings"]) == Decimal(total["as_received"]) - spent
        assert total["estimated_share"] == round(total["estimated"] / total["requests"], 4)
    answer = running.get(REPORT, by="team,day", format="csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    cells = list(csv.DictReader(io.StringIO(answer.text)))
    assert sum(int(row["summaries"]) for row in cells) == whole["total"]["summaries"]
    assert sum(Decimal(row["cost"]) for row in cells) == Decimal(whole["total"]["cost"])


def _stored(running: Running) -> list[RequestRecord]:
    """Return all records in the file, with those that another test added."""
    return records_in(running.folder / "store.db", RecordQuery(limit=10_000))


def test_one_record_has_its_summary_calls_and_says_why(running: Running) -> None:
    first = running.records[0]
    shown = running.get(f"{REQUESTS}/{first.id}").json()
    sentence = "The request had 15,200 tokens; the policy's trigger is 13,600 (85 % of the input budget)."
    assert shown["reason"] == {"trigger": "fraction", "level": 13_600, "size": 15_200, "share": 0.85, "text": sentence}
    attempt = {"status": 200, "result": "accepted", "ms": 12.0, "tokens": 500, "limit": None, "error": None}
    assert shown["attempts"] == [attempt]
    assert shown["cost"]["sent"] == f"0.{DOLLAR // 7:012d}"
    assert (shown["ms"]["total"], shown["summary_calls"]) == (20.5, [])
    assert datetime.fromisoformat(shown["time"]).timestamp() == pytest.approx(first.time, abs=0.001)
    (made_for,) = running.get(f"{REQUESTS}/{running.records[1].id}").json()["summary_calls"]
    assert (made_for["kind"], made_for["parent"], made_for["cost"]["sent"]) == (
        "summary",
        running.records[1].id,
        "0.01",
    )


def test_the_status_has_the_limits_of_the_callers_own(running: Running) -> None:
    red, all_of = running.get(STATUS, "sk-red").json(), running.get(STATUS).json()
    assert {one["model"] for one in red["learned_limits"]} == {"model-of-red"}
    assert {one["model"] for one in all_of["learned_limits"]} == {"model-of-red", "model-of-blue"}
    limit = red["learned_limits"][0]
    assert (limit["team"], limit["input"]["tokens"], limit["input"]["named"]) == ("red", 9_000, 8_000)
    shown = call(running.folder, "models", "model-of-red", "--config", "config.yaml").stdout
    assert re.search(r"model-of-red\W+red\W+input\W+8,000\W+9,000\W+refusal", shown), shown
    assert red["configuration"] == all_of["configuration"]
    assert red["store"] == {"kind": "sqlite", "archive": "sqlite", "failing": []}


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        (REQUESTS, "tenant=team:blue", "tenant"),
        (REQUESTS, "team=a&team=b", "team"),
        (REQUESTS, "verdict=fine", "verdict"),
        (REQUESTS, "since=yesterday", "since"),
        (REQUESTS, "limit=0", "limit"),
        (REQUESTS, "limit=1001", "limit"),
        (REQUESTS, "cursor=1", "cursor"),
        (f"{REQUESTS}/{'0' * 24}", "team=red", "team"),
        (REPORT, "since=2026-13-01", "since"),
        (REPORT, "by=tenant", "by"),
        (REPORT, "format=xml", "format"),
        (STATUS, "all=1", "all"),
    ],
)
def test_a_wrong_parameter_gets_400_with_its_fix(running: Running, path: str, query: str, param: str) -> None:
    answer = running.get(f"{path}?{query}", "sk-red")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert any(word in error["message"] for word in ("Use ", "must", "Send", "takes none"))


def test_the_commands_read_the_same_records(running: Running) -> None:
    id = running.records[0].id
    shown = call(running.folder, "show", id, "--config", "config.yaml")
    assert "15,200 tokens; the policy's trigger is 13,600 (85 % of the input budget)" in shown.stdout
    as_json = json.loads(call(running.folder, "show", id, "--config", "config.yaml", "--json").stdout)
    assert as_json == running.get(f"{REQUESTS}/{id}").json()
    options = ("--config", "config.yaml", "--by", "team,model")
    report = json.loads(call(running.folder, "report", *options, "--json").stdout)
    answered = running.get(REPORT, by="team,model").json()
    assert report == answered
    red = call(running.folder, "report", *options, "--team", "red", "--csv").stdout
    assert red == running.get(REPORT, by="team,model", team="red", format="csv").text
    text = call(running.folder, "report", "--config", "config.yaml", "--since", "24h").stdout
    assert all(team in text for team in (*TEAMS, "total", "Requests in shadow mode: blue (", "would have"))
    for width in (220, 120, 80, 40):
        narrow = terminal(running.folder, "report", *options, columns=width)
        for row in report["rows"]:
            for figure in (
                row["team"] or "-",
                f"{row['received']:,}",
                f"{row['sent']:,}",
                f"{float(row['savings']):.4f}",
            ):
                assert figure in narrow, width
        assert "…" not in narrow
        assert ("┃" in narrow) == (width == 220), "a table if the terminal has room for it, else blocks"
        assert max(map(len, narrow.splitlines())) <= width
    piped = call(running.folder, "report", *options, "--by", "team,model,api", COLUMNS="80").stdout.splitlines()
    assert max(map(len, piped)) <= 80
    assert [line.split()[0] for line in piped if line][1:4] == ["team", "model", "api"]
    wrong = [("show", "x"), ("report", "--since", "soon"), ("report", "--by", "tenant")]
    assert [call(running.folder, *one, "--config", "config.yaml").returncode for one in wrong] == [2, 2, 2]


def test_callers_without_an_identity_see_nothing(tmp_path: Path) -> None:
    with (
        behind(StandIn(window=16_000), tmp_path, auth={"keyless": "separate"}) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        id = http.post("/v1/chat/completions", json={"model": "m", "messages": chat(1, 5)}).headers["x-compaction-id"]
        own = {"authorization": "Bearer sk-a"}
        http.post("/v1/chat/completions", json={"model": "m", "messages": chat(1, 5)}, headers=own)
        assert until(lambda: http.get(REQUESTS, headers=own).json()["data"])
        assert http.get(REQUESTS).json()["data"] == []
        assert http.get(f"{REQUESTS}/{id}").status_code == 404
        assert http.get(REPORT).json()["rows"] == []


def misbehave(body: dict[str, Any]) -> Reply:
    """Answer as the model's name says."""
    match body["model"]:
        case "missing":
            return Reply(status=404, error={"error": {"message": CANARY, "code": "model_not_found"}})
        case "limited":
            return Reply(status=429, error={"error": {"message": CANARY}}, headers={"retry-after": "7"})
        case "broken":
            return Reply(content=f"{CANARY} one two three four five six", break_after=2)
    return Reply(content=CANARY)


def summarise_or_fail(body: dict[str, Any]) -> Reply:
    failing = body["model"] == "mute"
    return Reply(status=500, error={"error": {"message": CANARY}}) if failing else summarise(body)


NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)

COMPACTED = ["compacted", "the policy's trigger is", "85 %", "It cost "]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Incident(NamedTuple):
    """A request. ``turns`` make it long, and ``words`` make its last message long. ``parts`` explain what happened."""

    status: int
    parts: Sequence[str]
    model: str = "known"
    key: str = "sk-red"
    path: str = CHAT
    turns: int = 1
    words: int = 0
    stream: bool = False

    def body(self) -> dict[str, Any]:
        messages = chat(self.turns, 400 if self.turns > 1 else 5)
        messages[-1]["content"] += CANARY + " word" * self.words
        body = {"model": self.model, "stream": self.stream}
        match self.path:
            case "/v1/responses":
                return {**body, "input": messages}
            case "/v1/messages":
                return {**body, "max_tokens": 500, "messages": messages[1:]}
        return {**body, "messages": messages, "user": CANARY}


INCIDENTS = {
    "wrong key": Incident(
        401, ["The proxy refused the request.", "status 401, invalid_api_key"], key="sk-wrong", model="fine"
    ),
    "missing": Incident(404, ["Attempt 1 got status 404 (error)", "status 404"], "missing"),
    "limited": Incident(429, ["Attempt 1 got status 429 (error)", "status 429"], "limited"),
    "spent": Incident(402, ["The proxy refused the request.", "status 402, "], key="sk-green"),
    "broken": Incident(200, ["got status 200", "the error upstream_interrupted"], "broken", stream=True),
    "down": Incident(502, ["Attempt 1 got no response (upstream_unreachable)", "status 502"], "down"),
    "chat": Incident(200, COMPACTED, turns=30),
    "responses": Incident(200, COMPACTED, turns=30, path=RESPONSES),
    "messages": Incident(200, COMPACTED, turns=30, path=MESSAGES, stream=True),
    "no summary": Incident(200, ["digest"], "mute", turns=30),
    "too long": Incident(400, ["couldn't make the request smaller", "30,0", "status 400"], words=30_000),
    "shadow": Incident(400, ["shadow mode", "With enforce, it would send", "status 400"], key="sk-blue", turns=30),
    "retried": Incident(200, ["refused the request of", "limit of 16,", "Attempt 2 got"], "unknown", turns=30),
}
"""The requests of an afternoon, and parts of their explanations."""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_each_incident_is_explained_by_its_id_without_content(workers: int, tmp_path: Path) -> None:
    """By the API, the command, the log, and the dashboard. Each request has a connection of its own."""
    upstream = EveryApi(window=16_000, max_output=2_000, responder=misbehave, summariser=summarise_or_fail)
    with serve(upstream.app) as url:
        known = {"context_window": 16_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
        settings = {
            "auth": {"mode": "keys"},
            "admin": {"keys": [key_hash("sk-admin")]},
            "upstreams": {
                "main": {"base_url": f"{url}/v1", "api_key": f"sk-{CANARY}", "speaks": list(AGENTS)},
                "gone": {"base_url": "http://127.0.0.1:9/v1", "api_key": "none"},
            },
            "models": [
                {"match": "down", "upstream": "gone"},
                {"match": "unknown", "upstream": "main", "profile": {**known, "context_window": 64_000}},
                {"match": "*", "upstream": "main", "profile": known},
            ],
            "prices": {"*": {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.00001}},
            "policies": {"default": {}, "watching": {"mode": "shadow"}},
            "teams": {
                "red": {"keys": [key_hash("sk-red")]},
                "blue": {"keys": [key_hash("sk-blue")], "policy": "watching"},
                "green": {"keys": [key_hash("sk-green")], "limits": {"spend": {"tokens": 1, "per": "month"}}},
            },
        }
        with (
            program(write_config(settings, tmp_path), "--workers", str(workers)) as server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=60, limits=NO_KEEPALIVE) as http,
        ):
            admin = {"authorization": "Bearer sk-admin"}
            session = http.post("/compaction/sign-in", data={"key": "sk-admin"}).headers["set-cookie"].split(";")[0]
            http.cookies.clear()
            answers = {}
            for name, incident in INCIDENTS.items():
                answers[name] = failing(http, incident)
            # The budget is spent when a worker has read the ledger.
            spent = INCIDENTS["spent"]
            assert until(lambda: answers.update(spent=failing(http, spent)) or answers["spent"][0] == spent.status)
            for name, (status, parts, _, key, *_) in INCIDENTS.items():
                assert answers[name][0] == status, name
                path = f"{REQUESTS}/{answers[name][1]}"
                assert until(lambda path=path: http.get(path, headers=admin).status_code == 200), name
                found = http.get(path, headers=admin)
                story = " ".join(found.json()["explanation"])
                assert [part for part in parts if part not in story] == [], (name, story)
                assert CANARY not in found.text
                page = http.get(f"/compaction/view/{answers[name][1]}", headers={"cookie": session}).text
                told = call(tmp_path, "show", answers[name][1], "--config", "config.yaml").stdout
                for text in (html.unescape(page), " ".join(told.split())):
                    assert [part for part in parts if part not in text] == [], (name, text)
                    assert CANARY not in text
                logged = [line for line in lines(server.log) if line.get("request") == answers[name][1]]
                assert [line["status"] for line in logged if line["event"] == "request.finished"] == [status], name
                if key != "sk-wrong":
                    team = key.removeprefix("sk-")
                    listed = http.get(f"{REQUESTS}?team={team}&since=1h&limit=1000", headers=admin).json()["data"]
                    assert answers[name][1] in {one["id"] for one in listed}
                other = "sk-blue" if key != "sk-blue" else "sk-red"
                assert http.get(path, headers={"x-api-key": other}).status_code == 404
            for path in (REQUESTS, f"{REPORT}?by=team,model,upstream,day", STATUS):
                answer = http.get(path, headers=admin)
                assert (answer.status_code, CANARY in answer.text) == (200, False)
        assert CANARY.encode() not in server.log.read_bytes()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def failing(http: httpx.Client, incident: Incident) -> tuple[int, str]:
    """Return the status and the id of a response that may break off."""
    key = {"authorization": f"Bearer {incident.key}"}
    with http.stream("POST", incident.path, json=incident.body(), headers=key) as answer:
        with contextlib.suppress(httpx.RemoteProtocolError):
            answer.read()
        return answer.status_code, answer.headers["x-compaction-id"]
