"""Roll out compaction by team: each figure of a team equals that of the upstream, which refuses what doesn't fit."""

import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import yaml

from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from tests.kit.messages import user, words
from tests.kit.program import call
from tests.kit.scripted import PROFILE, chat, client, key_hash
from tests.kit.upstream import Received, Reply, StandIn

TEAMS = {"trying": "shadow", "first": "enforce", "later": "off"}
WINDOW = 16_000
PRICE = Decimal("0.000001")


def conversations(team: str) -> list[list[Any]]:
    """Return short ones, and ones below the trigger, above it, and above the window."""
    sizes = [(1, 20), (6, 550), (6, 550), (14, 500), (14, 505), (20, 550), (20, 600), (20, 500)]
    return [[user(f"{team} {number} {words(9, f's{number}')}"), *chat(*size)[1:]] for number, size in enumerate(sizes)]


def test_each_figure_of_each_team_is_that_of_the_upstream(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW, responder=lambda body: Reply(content="Done."))
    asked = [(team, messages) for team in TEAMS for messages in conversations(team)]
    random.Random(7).shuffle(asked)
    statuses: dict[str, list[int]] = {team: [] for team in TEAMS}
    with serve(upstream.app) as url:
        settings = {
            "auth": {"mode": "keys"},
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
            "policies": {"default": {}, **{mode: {"mode": mode, "prepare": None} for mode in TEAMS.values()}},
            "teams": {team: {"keys": [key_hash(team)], "policy": mode} for team, mode in TEAMS.items()},
            "prices": {
                f"for-{team}": {"input_cost_per_token": float(PRICE), "output_cost_per_token": 0} for team in TEAMS
            },
            "store": {"url": f"sqlite:///{tmp_path}/store.db"},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        with serve(Proxy(load(tmp_path / "config.yaml", {}))) as entrance:
            for team, messages in asked:
                with client(entrance, team) as own:
                    try:
                        own.chat.completions.create(model=f"for-{team}", messages=messages)
                        statuses[team].append(200)
                    except openai.BadRequestError as error:
                        statuses[team].append(error.status_code)
    report = reported(tmp_path)
    rows = {row["team"]: row for row in report["rows"]}
    for team, row in rows.items():
        ledger = [one for one in upstream.requests if one.body["model"] == f"for-{team}"]
        compare(
            team,
            row,
            [one for one in ledger if not one.summary],
            [one for one in ledger if one.summary],
            statuses[team],
        )
    # The proxy needs no count of the three small ones of each team, and with `off` of none.
    came = sorted(one.tokens for one in upstream.requests if one.body["model"] == "for-later")
    first = [one for one in upstream.conversations if one.body["model"] == "for-first"]
    assert rows["trying"]["received"] == rows["trying"]["sent"] == rows["first"]["received"] == sum(came[3:])
    assert rows["first"]["sent"] == sum(one.tokens for one in first) - sum(came[:3])
    assert rows["later"]["received"] == rows["later"]["sent"] == 0
    for name, total in report["total"].items():
        if name.endswith("_share"):
            continue
        assert Decimal(total) == sum(Decimal(row[name]) for row in rows.values()), name


def reported(folder: Path) -> Any:
    return json.loads(call(folder, "report", "--config", "config.yaml", "--json").stdout)


def compare(team: str, row: dict[str, Any], sent: list[Received], summaries: list[Received], got: list[int]) -> None:
    """Compare a team's row with the requests that the upstream got, and with the statuses that its client got."""
    answered = [one for one in sent if one.status == 200]
    refused = [one for one in sent if one.status == 400]
    assert row["requests"] == len(got) == 8
    assert row["errors"] == got.count(400)
    assert row["input"] == sum(one.tokens for one in answered)
    assert Decimal(row["cost"]) == row["input"] * PRICE
    assert (row["unpriced"], row["estimated"]) == (0, 0), "the price doesn't depend on the cache"
    assert row["summaries"] == len(summaries)
    assert row["summary_input"] == sum(one.tokens for one in summaries)
    assert Decimal(row["summary_cost"]) == row["summary_input"] * PRICE
    if team == "first":
        assert got == [200] * 8, "each request was compacted until it fit"
        assert row["compacted"] == 5
        assert row["avoided"] == 3, "the other teams' equal conversations were refused"
    else:
        assert len(sent) == 8
        assert len(refused) == row["errors"] == 3
        assert (row["compacted"], row["avoided"], row["summaries"]) == (0, 0, 0)
    if team == "trying":
        assert (row["shadow"], row["would_compact"], row["would_avoid"]) == (8, 5, len(refused))
    else:
        assert (row["shadow"], row["would_compact"], row["would_avoid"]) == (0, 0, 0)
