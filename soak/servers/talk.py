"""Generate the texts of users and tools. Equal seeds give equal texts.

Imports only the standard library, because the servers' environments train the models' tokenizers on these texts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

_COMMON = """
about after again all also an and another any are around ask at away back be because been before begin between big
both but by call came can change check city close code come could count country day did different do does down each
early end enough error even every example failed far file find first follow for form found from function get give go
good great group had hand have he head help her here high him his home house how idea if in into is it its just keep
kind know large last later learn leave left letter life light like line list little long look made make man many may
me mean message might more most move much must my name near need never new next night no not now number of off often
old on one only open or order other our out over own page paper part people place plan plant point press problem
program put question read real request result right river run same saw say school second see sentence server set she
should show side small so some something sometimes soon sound spell stand start state still stop story study such
system table take tell test than that the their them then there these they thing think this those thought three
through time to together token too try turn two under until up use value very want was watch water way we well were
what when where which while white who why will window with without word work world would write year you young your
"""
WORDS = _COMMON.split()

SUFFIXES = ("py", "md", "json", "yaml", "txt")

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the project, from a line on.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            "required": ["path"],
        },
    },
}


class Speaker:
    """A generator of texts, seeded with a number."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._calls = 0

    def prose(self, words: int) -> str:
        """Return sentences with this number of words in all."""
        sentences: list[str] = []
        while words > 0:
            length = min(words, self._rng.randint(4, 14))
            chosen = self._rng.choices(WORDS, k=length)
            sentences.append(" ".join([chosen[0].capitalize(), *chosen[1:]]) + ".")
            words -= length
        return " ".join(sentences)

    def listing(self, words: int) -> str:
        """Return numbered lines of code with this number of words in all, like the result of a tool."""
        lines = []
        for number in range(1, max(1, words // 6) + 1):
            name, of, value = self._rng.choices(WORDS, k=3)
            lines.append(f"{number}: {name}_{of} = {value}({self._rng.randint(0, 999)})")
        return "\n".join(lines)

    def exchange(self, words: int) -> list[dict[str, Any]]:
        """Return a call of the tool and its result with this number of words."""
        self._calls += 1
        folder, name = self._rng.choices(WORDS, k=2)
        arguments = {"path": f"{folder}/{name}.{self._rng.choice(SUFFIXES)}", "line": self._rng.randint(1, 400)}
        function = {"name": "read_file", "arguments": json.dumps(arguments)}
        id_ = f"call_{self._calls}_{name}"
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": id_, "content": self.listing(words)},
        ]

    def length(self, shortest: int, longest: int) -> int:
        """Return a number of words within the bounds."""
        return self._rng.randint(shortest, longest)


def samples() -> Iterator[str]:
    """Yield texts for the training of a tokenizer."""
    speaker = Speaker(0)
    for _ in range(400):
        yield speaker.prose(60)
        yield speaker.listing(120)
        yield json.dumps([*speaker.exchange(12), TOOL])
