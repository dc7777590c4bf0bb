"""The script of the session: the user's tasks, the model's decisions, the tools, and the planted facts.

The model's decision depends only on the last message of a request, so it still works after compaction of the others.
The tools return generated results, identical for identical arguments.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    lines = call_tool(name, arguments).split("\n")
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
    code = source(f"{words['service']}/{words['symptom']}/{words['task']}", 14)
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


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in parameters},
                "required": list(parameters),
            },
        },
    }
    for name, description, parameters in (
        ("read_file", "Read a file of the repository.", ("path",)),
        ("search_log", "Search a service's log of the last day.", ("service", "query")),
        ("run_command", "Run a shell command in the repository.", ("command",)),
        ("write_file", "Write a file of the repository, whole.", ("path", "content")),
    )
]

LEVELS = ("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR")
EVENTS = (
    "retrying the request after a timeout of the payment gateway",
    "connection pool exhausted, waiting for a free slot",
    "cache miss, loading the customer from the primary database",
    "message acknowledged and removed from the queue",
    "circuit breaker half open, one probe allowed",
    "slow query, the index on created_at was not used",
    "token refreshed for the background worker",
    "rate limit of the upstream reached, backing off",
)
NOUNS = ("order", "invoice", "basket", "customer", "refund", "shipment", "voucher", "session")
VERBS = ("load", "store", "merge", "check", "expire", "retry", "audit", "split")


def call_tool(name: str, arguments: str) -> str:
    """Return the result of a tool call. ``arguments`` is the model's JSON text."""
    return RESULTS[name](**json.loads(arguments))


def source(path: str, functions: int) -> str:
    """Return a module of about 160 characters per function."""
    dice = _dice(path)
    return "\n\n\n".join([f'"""The {path} module."""', *(_function(dice) for _ in range(functions))]) + "\n"


def _read_file(path: str) -> str:
    return source(path, _dice(path).randint(10, 22))


def _search_log(service: str, query: str) -> str:
    dice = _dice(service, query)
    return "\n".join(_log_lines(dice, service, dice.randint(35, 95)))


def _run_command(command: str) -> str:
    dice = _dice(command)
    rounds = dice.randint(12, 45)
    lines = [f"tests/test_{dice.choice(NOUNS)}.py::test_{dice.choice(VERBS)}_{i} PASSED" for i in range(rounds)]
    return "\n".join([f"$ {command}", *lines, f"{rounds} passed in {dice.random() * 9:.2f}s"])


def _write_file(path: str, content: str) -> str:
    return f"Wrote {len(content)} characters to {path}."


RESULTS: dict[str, Callable[..., str]] = {
    "read_file": _read_file,
    "search_log": _search_log,
    "run_command": _run_command,
    "write_file": _write_file,
}


def _dice(*words: str) -> random.Random:
    return random.Random(zlib.crc32("\0".join(words).encode()))  # noqa: S311 - a script, not a secret


def _log_lines(dice: random.Random, service: str, count: int) -> Iterator[str]:
    for _ in range(count):
        clock = f"{dice.randint(0, 23):02d}:{dice.randint(0, 59):02d}:{dice.randint(0, 59):02d}"
        place = f"services/{service}/{dice.choice(NOUNS)}.py:{dice.randint(10, 400)}"
        yield f"{clock} {dice.choice(LEVELS)} {place} {dice.choice(EVENTS)} ({dice.randint(1, 900)} ms)"


def _function(dice: random.Random) -> str:
    verb, noun, limit = dice.choice(VERBS), dice.choice(NOUNS), dice.randint(2, 90)
    return (
        f"def {verb}_{noun}({noun}: dict, limit: int = {limit}) -> list:\n"
        f'    """{verb.capitalize()} the {noun} and what hangs on it."""\n'
        f"    found = [row for row in {noun}.values() if row]\n"
        f"    return sorted(found)[:limit]"
    )
