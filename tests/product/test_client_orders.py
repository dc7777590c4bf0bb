"""Sessions of agents on each API: what they say is in effect stays until it ends, and the user's task stays whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.server.loopback import serve
from tests.kit.agent_client import REQUIREMENTS, TASK, Client, reminder
from tests.kit.any_api import Upstream, strings
from tests.kit.combinations import combined
from tests.kit.messages import words
from tests.kit.scripted import PROFILE, proxied
from tests.kit.three_apis import APIS, PATHS

RULES = "Contents of /w/src/CLAUDE.md:\n\nNever push to main."
SKILL = "Base directory for this skill: /w/skills/deploy\n\n# Deploy\n" + words(1_500, "skill")

FIELDS: dict[str, dict[str, Any]] = {"chat": {}, "messages": {"max_tokens": 400}, "responses": {"store": False}}

Session = Callable[[int], list[str]]
"""Take this many steps, and return the compacted prompts."""


@contextlib.contextmanager
def session(client: Client, folder: Path) -> Iterator[Session]:
    upstream, path = Upstream(), PATHS[client.api]
    with serve(upstream.app) as behind:
        main = {"base_url": f"{behind}/v1", "api_key": "k", "speaks": [*APIS], "ask_limits": False}
        models = [{"match": "*", "upstream": "main", "profile": PROFILE}]
        policy = {"trigger": {"fraction": 0.5}, "prepare": None, "self_compacting": "usual"}
        settings = {"upstreams": {"main": main}, "models": models, "policies": {"default": policy}}
        with proxied(settings, folder) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as http:

            def steps(count: int) -> list[str]:
                prompts = []
                for _ in range(count):
                    client.step()
                    body = {**json.loads(client.body()), **FIELDS[client.api]}
                    response = http.post(path, json=body, headers={"authorization": "Bearer k"})
                    assert response.status_code == 200, response.text
                    if response.headers.get("x-compaction") == "compacted":
                        prompts.append("\n".join(strings(upstream.bodies[-1])))
                return prompts

            yield steps


@pytest.mark.parametrize(
    ("beside", "api"), combined(3, ["Tool loaded.", SKILL, "PostToolUse hook: formatted two files."], APIS)
)
def test_the_task_stays_whole_whatever_is_beside_a_result(api: str, beside: str, tmp_path: Path) -> None:
    client = Client(api)
    client.user("Hello.")
    client.say()
    client.user(TASK)
    client.step(beside=(beside, reminder("<total_tokens>149000 tokens left</total_tokens>")))
    with session(client, tmp_path) as steps:
        prompts = steps(30)
    assert len(prompts) > 5
    assert [sum(one in prompt for one in REQUIREMENTS) for prompt in prompts] == [len(REQUIREMENTS)] * len(prompts)


@pytest.mark.parametrize("api", APIS)
def test_reminders_after_the_clients_own_summary_and_at_the_end_of_a_result_stay(api: str, tmp_path: Path) -> None:
    client = Client(api)
    client.user(
        "This session is being continued from a previous conversation that ran out of context. The summary below "
        "covers the earlier portion of the conversation.\n\nThe queue is half done.\n\nContinue the conversation from "
        "where it left off without asking the user any further questions. Then take the next open step."
    )
    client.user(reminder("# claudeMd\n\nBe brief."), reminder("The following agents are available:\n- reviewer"))
    client.user("Go on.")
    client.step(end=reminder(RULES))
    with session(client, tmp_path) as steps:
        prompts = steps(34)
    assert len(prompts) > 5
    for prompt in prompts:
        assert all(said in prompt for said in ("Be brief.", "- reviewer", RULES))
        assert "<user_message>\nThen take" not in prompt


def test_the_newest_goal_of_codex_stays(tmp_path: Path) -> None:
    client = Client("responses")

    def goal(text: str) -> None:
        said = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": text}
        client.units.append(said)

    client.user("Mend the queue.")
    goal("Ship the queue.")
    with session(client, tmp_path) as steps:
        steps(6)
        goal("Ship the queue and its tests.")
        prompts = steps(26)
    assert len(prompts) > 5
    for prompt in prompts:
        assert "Ship the queue and its tests." in prompt
        assert "Ship the queue.\n" not in prompt
