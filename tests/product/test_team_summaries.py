"""Test that a team's list of models also holds for the models that summarize its conversations."""

from pathlib import Path
from typing import Any

import pytest

from proxy.server.loopback import serve
from tests.kit.scripted import PROFILE, chat, client, key_hash, proxied
from tests.kit.upstream import StandIn

LONG = chat(7, 1_000)
"""A conversation just over the trigger."""

OTHER = "cheap"
"""A model of another provider."""

POLICIES: dict[str, dict[str, Any]] = {
    "model": {"summary": {"model": OTHER}},
    "fallback": {"summary": {"fallback_model": OTHER}},
    "both": {"summary": {"model": OTHER, "fallback_model": OTHER}},
    "override": {"models": [{"match": "local/*", "summary": {"model": OTHER}}]},
}


def summarized(folder: Path, policy: dict[str, Any], models: list[str], *, fails: bool) -> tuple[str, StandIn, StandIn]:
    """Return the origin of the summary of a conversation, and the upstreams of its own model and of the other one."""
    own, other = StandIn(), StandIn()
    if fails:
        own.summariser = lambda body: 1 / 0
    with serve(own.app) as near, serve(other.app) as far:
        settings = {
            "auth": {"mode": "keys"},
            "teams": {"a": {"keys": [key_hash("ka")], "models": models}},
            "upstreams": {
                name: {"base_url": f"{url}/v1", "api_key": "sk"} for name, url in (("near", near), ("far", far))
            },
            "models": [
                {"match": "local/*", "upstream": "near", "profile": PROFILE},
                {"match": "*", "upstream": "far", "profile": PROFILE},
            ],
            "policies": {"default": policy},
        }
        with proxied(settings, folder) as url, client(url, "ka") as caller:
            answer = caller.chat.completions.with_raw_response.create(model="local/m", messages=LONG)
    return answer.headers["x-compaction-summary"], own, other


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_model_off_the_list_gets_nothing(tmp_path: Path, name: str, *, fails: bool) -> None:
    origin, own, other = summarized(tmp_path, POLICIES[name], ["local/*"], fails=fails)
    assert other.requests == other.others == []
    assert origin == ("digest" if fails else "made")
    assert [one.summary for one in own.requests] == [True, False]


def test_a_model_on_the_list_summarizes(tmp_path: Path) -> None:
    origin, own, other = summarized(tmp_path, POLICIES["model"], ["local/*", OTHER], fails=False)
    assert origin == "made"
    assert [one.summary for one in other.requests] == [True]
    assert [one.summary for one in own.requests] == [False]
