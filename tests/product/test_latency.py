"""Response times by team and part: the metrics show which part of which team became slow."""

from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.scripted import behind, chat, client, key_hash
from tests.kit.upstream import Reply, StandIn

TEAMS = {"quick": (0.0, 0.0), "far": (0.6, 0.0), "waits": (0.0, 0.6)}
"""Seconds that the upstream takes to answer and to summarize, for each team."""


def test_metrics_show_which_part_of_which_team_became_slow(tmp_path: Path) -> None:
    def respond(body: dict[str, Any]) -> Reply:
        return Reply(content="Done.", delay=TEAMS[body["model"]][0])

    def summarize(body: dict[str, Any]) -> Reply:
        return Reply(content="Goal: done.", delay=TEAMS[body["model"]][1])

    upstream = StandIn(window=16_000, responder=respond, summariser=summarize)
    teams = {team: {"keys": [key_hash(team)]} for team in TEAMS}
    with behind(upstream, tmp_path, policy={"prepare": None}, auth={"mode": "keys"}, teams=teams) as url:
        for team in TEAMS:
            with client(url, team) as caller:
                caller.chat.completions.create(model=team, messages=chat(8, 900))
                caller.chat.completions.create(model=team, messages=chat(1, 10))
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    counted = {
        (sample.name, sample.labels["team"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.endswith("_seconds_sum") and "team" in sample.labels
    }
    assert (
        counted["compaction_upstream_seconds_sum", "far"] >= 1.2 > counted["compaction_upstream_seconds_sum", "quick"]
    )
    assert counted["compaction_summaries_wait_seconds_sum", "waits"] >= 0.6
    assert counted["compaction_overhead_seconds_sum", "waits"] < 0.6
