"""Sessions of agents on each API: what they say is in effect stays until it ends, and the user's task stays whole."""

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
READ = words(400, "read")
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
    read = (
        reminder("Called the Read tool with the following input: {}"),
        reminder(f"Result of calling the Read tool:\n{READ}"),
    )
    client.user(*read)
    client.user(reminder("# claudeMd\n\nBe brief."), reminder("The following agents are available:\n- reviewer"))
    client.user("Go on.")
    client.step(end=reminder(RULES))
    with session(client, tmp_path) as steps:
        prompts = steps(34)
    assert len(prompts) > 5
    for prompt in prompts:
        assert all(said in prompt for said in ("Be brief.", "- reviewer", RULES))
        assert "<user_message>\nThen take" not in prompt
        assert READ not in prompt
        assert "Called the Read tool" not in prompt


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


@pytest.mark.parametrize("api", APIS)
def test_what_an_agent_says_in_messages_of_its_own_leaves_the_room_to_the_task(api: str, tmp_path: Path) -> None:
    client = Client(api)
    agents = "# AGENTS.md instructions for /w/app\n\n<INSTRUCTIONS>\nNever push to main.\n</INSTRUCTIONS>"
    place = reminder("  <cwd>/w/app</cwd>\n  <shell>bash</shell>", "environment_context")
    going = '<codex_internal_context source="goal">\n' + words(300, "goal") + "\n</codex_internal_context>"
    task = [f"Requirement {number}: case K{number * 37} gives code {number * 911}." for number in range(20)]
    client.user(agents, place)
    client.user("\n".join(task))
    with session(client, tmp_path) as steps:
        steps(8)
        prompts = []
        for said in ("And the tests, too.", "And the documents.", "Finish it."):
            client.say()
            client.user(going)
            client.user(said)
            prompts += steps(9)
    assert len(prompts) > 5
    for prompt in prompts:
        assert [one for one in task if one not in prompt] == []
        assert prompt.count("<codex_internal_context") <= 4
        assert "<user_message>\n# AGENTS.md" not in prompt
        assert "<user_message>\n<codex_internal" not in prompt
        assert "Never push to main." in prompt


@pytest.mark.parametrize("api", APIS)
def test_a_short_file_of_rules_stays_whole(api: str, tmp_path: Path) -> None:
    client = Client(api)
    client.user("Mend the queue.")
    client.step(path="src/AGENTS.md", out="# Style\n\nIn this folder, tabs.\nNever push to main.")
    with session(client, tmp_path) as steps:
        prompts = steps(34)
    assert len(prompts) > 5
    for prompt in prompts:
        assert "src/AGENTS.md:\n- # Style\n- In this folder, tabs.\n- Never push to main." in prompt


@pytest.mark.parametrize("api", APIS)
def test_counters_never_push_out_what_else_the_system_says(api: str, tmp_path: Path) -> None:
    client = Client(api)
    place = "# Environment\n\nThe folder is /w/app. " + words(450, "place")
    client.user("Mend the queue.")
    client.units.append({"role": "system", "content": place})
    prompts = []
    with session(client, tmp_path) as steps:
        for number in range(44):
            prompts += steps(1)
            left = f"<total_tokens>{149_000 - 311 * number} tokens left</total_tokens>"
            client.units.append({"role": "system", "content": left})
    assert len(prompts) > 10
    for prompt in prompts:
        assert "The folder is /w/app." in prompt
    assert sum("tokens left" in prompt for prompt in prompts) == len(prompts)
    assert prompts[-1].count("tokens left") < 35
