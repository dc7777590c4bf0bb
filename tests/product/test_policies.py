"""The effects of policies and teams, seen from the official client."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripted import behind, chat, client, key_hash
from tests.kit.upstream import StandIn

WINDOW = 16_000

Headers = Mapping[str, str]


def ask(url: str, messages: list[Any], *, key: str = "sk-client", **extra: Any) -> Headers:
    with client(url, key) as caller:
        raw = caller.chat.completions.with_raw_response.create(model="m", messages=messages, **extra)
    return raw.headers


def outcome(policy: Mapping[str, Any], messages: list[Any], folder: Path, **extra: Any) -> tuple[Headers, StandIn]:
    upstream = StandIn(window=WINDOW, max_output=2_000)
    with behind(upstream, folder, policy=policy) as url:
        return ask(url, messages, **extra), upstream


def last_messages(upstream: StandIn) -> list[Any]:
    messages: list[Any] = upstream.conversations[-1].body["messages"]
    return messages


LONG = chat(7, 1_000)


@pytest.mark.parametrize(
    ("mode", "asked", "done"),
    [
        ("enforce", "off", "off"),
        ("enforce", "shadow", "shadow"),
        ("enforce", "SHADOW", "shadow"),
        ("shadow", "off", "off"),
        ("off", "shadow", "off"),
    ],
)
def test_the_header_makes_less_of_it(mode: str, asked: str, done: str, tmp_path: Path) -> None:
    headers, upstream = outcome({"mode": mode}, LONG, tmp_path, extra_headers={"x-compaction": asked})
    assert headers["x-compaction"] == done
    assert last_messages(upstream) == LONG
    assert "x-compaction" not in upstream.requests[0].headers


def test_the_header_where_the_policy_forbids_it(tmp_path: Path) -> None:
    headers, upstream = outcome({"allow_header": False}, LONG, tmp_path, extra_headers={"x-compaction": "off"})
    assert headers["x-compaction"] == "compacted"
    assert len(last_messages(upstream)) < len(LONG)


TEAMS: dict[str, Any] = {
    "policies": {
        "default": {"trigger": {"tokens": 14_000}, "keep": {"messages": 2}},
        "careful": {"extends": "default", "keep": {"messages": 6}},
        "hands-off": {"extends": "careful", "mode": "off"},
        "stubborn": {"extends": "careful", "allow_header": False},
    },
    "teams": {
        "search": {"keys": [key_hash("sk-search")], "policy": "careful"},
        "legal": {"keys": [key_hash("sk-legal")], "policy": "hands-off"},
        "bots": {"keys": [key_hash("sk-bots")], "policy": "stubborn", "models": ["m", "gpt-*"]},
    },
}


def test_each_team_has_its_policy(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    policies, teams = TEAMS["policies"], TEAMS["teams"]
    with behind(upstream, tmp_path, policies=policies, teams=teams) as url:
        kept = {}
        for key in ("sk-nobody", "sk-search", "sk-legal", "sk-bots"):
            headers = ask(url, LONG, key=key, extra_headers={"x-compaction": "off"} if key == "sk-bots" else None)
            kept[headers["x-compaction-policy"]] = len(last_messages(upstream)) - 2
    # `keep` counts from the message that reached the trigger, which may be one or two before the last.
    assert 2 <= kept["default"] <= 4
    assert 6 <= kept["careful"] == kept["stubborn"] <= 8
    assert kept["hands-off"] == len(LONG) - 2
    assert {request.headers["authorization"] for request in upstream.requests} == {"Bearer sk-upstream"}


def test_a_policy_has_settings_of_its_own_for_some_models(tmp_path: Path) -> None:
    """By the name that the client gives, and each with summaries of its own."""
    upstream = StandIn(window=WINDOW, max_output=2_000)
    policy = {
        "trigger": {"tokens": 15_000},
        "keep": {"messages": 2},
        "models": [{"match": "eager*", "trigger": {"tokens": 14_000}}, {"match": "*", "allow_header": False}],
    }
    done = {}
    with behind(upstream, tmp_path, policy=policy) as url, client(url) as caller:
        for model in ("eager-1", "patient", "eager-2"):
            header = {"x-compaction": "off"} if model == "patient" else None
            raw = caller.chat.completions.with_raw_response.create(model=model, messages=LONG, extra_headers=header)
            done[model] = (raw.headers["x-compaction"], raw.headers["x-compaction-policy"])
    assert done == {
        "eager-1": ("compacted", "default"),
        "patient": ("none", "default"),
        "eager-2": ("compacted", "default"),
    }
