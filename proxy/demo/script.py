"""The script of the session: the user's tasks, the model's decisions, and the planted facts.

The model's decision depends only on the last message of a request, so it still works after compaction of the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.demo import tools
from proxy.demo.replies import Reply, ToolCall

SYSTEM = (
    "You are an engineer on call for a shop's services. Work on one task at a time: look at the log and the source "
    "first, run the tests, then write the repaired file and say in one sentence what you changed. Keep in mind what "
    "you were told earlier in the session: tickets, ports and deadlines are said only once."
)
SERVICES = ("checkout", "ledger", "inventory", "gateway", "mailer")
SYMPTOMS = ("timeout", "duplicate", "deadlock", "backlog")

STEPS: tuple[tuple[tuple[str, dict[str, str]], ...], ...] = (
    (
        ("search_log", {"service": "{service}", "query": "{symptom} of task {task}"}),
        ("read_file", {"path": "services/{service}/{symptom}_{task}.py"}),
    ),
    (("run_command", {"command": "pytest services/{service} -k {symptom} --seed {task}"}),),
    (("write_file", {"path": "services/{service}/{symptom}_{task}.py", "content": "{source}"}),),
)
"""The tool calls of a task by step. Calls in one step run in parallel. A text follows the last step."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact that occurs once, early. The demo searches later requests for ``text``.

    ``said`` is the whole line and ``task`` its task (from 1). ``tool`` is the tool whose result contains it, or
    ``None`` for the user's message. ``at`` is the position in that result, from 0.0 (top) to 1.0 (end).
    """

    text: str
    said: str
    task: int
    tool: str | None = None
    at: float = 0.0


FACTS = (
    Fact("OPS-4821", "The deployment ticket for all of this is OPS-4821.", 1),
    Fact("release/2.11-hotfix", "Everything goes to the branch release/2.11-hotfix.", 1),
    Fact("port 5543", "The database password rotates on port 5543.", 2),
    Fact("06:30 UTC", "Never restart the ledger before 06:30 UTC.", 2),
    Fact("INC-70313", "04:12:09 ERROR pager: incident INC-70313 opened for this timeout", 1, "search_log", 0.5),
    Fact("runbooks.example/retries", "# Runbook: https://runbooks.example/retries", 1, "read_file", 0.0),
    Fact("coverage-8842.xml", "coverage written to artifacts/coverage-8842.xml", 1, "run_command", 1.0),
    Fact("CUST-19022", "09:47:31 WARN all failures belong to customer CUST-19022", 2, "search_log", 0.9),
)


def task_message(task: int) -> str:
    """Return the user's message for a task, counted from 1."""
    service, symptom = _subject(task)
    facts = [fact.said for fact in FACTS if fact.task == task and fact.tool is None]
    asked = f"Task {task}: find out why the {service} service shows a {symptom}, and repair it."
    return " ".join([asked, *facts])


def tool_result(call_id: str, name: str, arguments: str) -> str:
    """Return the result of a scripted tool call, including its facts."""
    task, _ = _place({"role": "tool", "tool_call_id": call_id})
    lines = tools.call(name, arguments).split("\n")
    for fact in FACTS:
        if (fact.task, fact.tool) == (task, name):
            lines.insert(round(fact.at * len(lines)), fact.said)
    return "\n".join(lines)


def decide(body: Mapping[str, Any]) -> Reply:
    """Return the model's next step in the task of the last message.

    Raises ``ValueError`` for a message outside of the script.
    """
    task, step = _place(body["messages"][-1])
    service, symptom = _subject(task)
    if step == len(STEPS):
        return Reply(content=f"Task {task} is done: the {symptom} in {service} came from a limit that was too low.")
    words = {"task": str(task), "service": service, "symptom": symptom}
    calls = [
        ToolCall(f"call_{task:04d}_{step}_{index}", name, _arguments(template, words))
        for index, (name, template) in enumerate(STEPS[step])
    ]
    return Reply(content=None, tool_calls=tuple(calls))


def facts_in(messages: list[Any]) -> int:
    """Return the number of facts that occur in these messages."""
    text = json.dumps(messages, ensure_ascii=False)
    return sum(fact.text in text for fact in FACTS)


def _arguments(template: dict[str, str], words: dict[str, str]) -> str:
    code = tools.source(f"{words['service']}/{words['symptom']}/{words['task']}", 14)
    return json.dumps({key: value.format(**words, source=code) for key, value in template.items()})


def _subject(task: int) -> tuple[str, str]:
    return SERVICES[task % len(SERVICES)], SYMPTOMS[task % len(SYMPTOMS)]


def _place(message: Mapping[str, Any]) -> tuple[int, int]:
    """Return the task and the step that follow a message."""
    if message["role"] == "tool":
        found = re.fullmatch(r"call_(\d+)_(\d+)_\d+", message["tool_call_id"])
        if found:
            return int(found[1]), int(found[2]) + 1
    found = re.match(r"Task (\d+):", str(message["content"]))
    if message["role"] != "user" or not found:
        raise ValueError(f"A {message['role']} message outside of the script: {message}")
    return int(found[1]), 0
