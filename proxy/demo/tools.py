"""The agent's tools. They return generated results, identical for identical arguments."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

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


def call(name: str, arguments: str) -> str:
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
