"""The parts of a session that all Python drivers share. Only the standard library is available in each environment."""

from __future__ import annotations

import json
import os
import random
import traceback
from collections.abc import Callable

TURNS = int(os.environ["SOAK_TURNS"])
MODEL = os.environ["SOAK_MODEL"]
SYSTEM = "You are a careful engineer. Use the tools."
MOST_ERRORS = 3


def question(part: int) -> str:
    """Return the user's message for a part."""
    return f"Part {part} please; the ticket is PART-{1000 + part}."


def found(name: str, target: str) -> str:
    """Return a tool's result, 1 to 4 KB."""
    size = random.Random(f"{name} {target}").randint(1_000, 4_000)  # noqa: S311 - the same in every run
    return "\n".join(f"{target}:{line} value of {name} = {line * 7919 % 10007}" for line in range(size // 40))


def read(target: str) -> str:
    """Read a file."""
    return found("read", target)


def search(target: str) -> str:
    """Search a file."""
    return found("search", target)


def run(target: str) -> str:
    """Run a file."""
    return found("run", target)


TOOLS = {"read": read, "search": search, "run": run}


def drive(turn: Callable[[int], str]) -> None:
    """Run the turns of a session. Each returns the answer's text. Report every turn as a line of JSON."""
    errors = 0
    for part in range(1, TURNS + 1):
        try:
            text = turn(part)
            problem = None if f"Done with part {part}:" in text else f"wrong answer: {text[:200]!r}"
        except Exception as error:  # noqa: BLE001 - every error that the client shows counts
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps({"turn": part, "error": problem}), flush=True)
        errors += problem is not None
        if errors >= MOST_ERRORS:
            break
    # Otherwise LlamaIndex's process ends only minutes later.
    os._exit(1 if errors else 0)
