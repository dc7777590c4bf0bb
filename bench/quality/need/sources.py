"""Load histories, each with the names in the next calls. None of them is part of the project.

They are in the data folder, or in folders that the operator names.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.quality.conversations import Message
from bench.quality.need import codex
from bench.quality.need.case import Case, occurring, tokens
from bench.quality.text import values
from proxy.dialects.chat.units import arguments_of

MOST_CASES = 25

SUPPORT_WINDOW = 4096
SUPPORT_CUT = 0.6
"""Share of a support conversation's messages that are its history."""
SUPPORT_LEAST = 0.85
"""Share of the window that a history has at least. Shorter ones aren't compacted."""
VALUE_LENGTHS = range(3, 61)
"""Characters of a value that is a name. Longer values of arguments are prose."""


def prepared(folder: Path, places: Sequence[Path]) -> list[Case]:
    """Return the prepared cases of coding sessions, or nothing if the folder doesn't have them."""
    file = folder / "need-cli.json.gz"
    if not file.exists():
        return []
    rows = json.loads(gzip.decompress(file.read_bytes()))
    return [Case(row["id"], row["messages"], row["paths"], row["idents"]) for row in rows]


def codex_sessions(folder: Path, places: Sequence[Path]) -> list[Case]:
    """Return a case for each of the longest Codex sessions. Of several recordings of a session, the longest counts."""
    sessions: dict[str, list[Message]] = {}
    for _, raw in files(places, "*full.jsonl"):
        id_, messages = codex.session(raw.decode().splitlines())
        if id_ and len(messages) > len(sessions.get(id_, ())):
            sessions[id_] = messages
    found = [made for id_, messages in sessions.items() if (made := codex.case(id_, messages)) is not None]
    return sorted(found, key=lambda made: (-made.scale, made.id))[:MOST_CASES]


def support(folder: Path, places: Sequence[Path]) -> list[Case]:
    """Return a case for each of the longest conversations of customers with an agent that has tools."""
    cases = (
        _support_case(f"{name} {number}", conversation["traj"])
        for name, raw in files(places, "historical_trajectories/*.json")
        for number, conversation in enumerate(json.loads(raw))
    )
    sized = [(-tokens(made.messages), made.id, made) for made in cases if made.idents]
    long = [one for one in sized if -one[0] >= SUPPORT_WINDOW * SUPPORT_LEAST]
    return [made for *_, made in sorted(long, key=lambda one: one[:2])][:MOST_CASES]


def _support_case(id_: str, messages: list[Message]) -> Case:
    cut = int(len(messages) * SUPPORT_CUT)
    while messages[cut]["role"] == "tool":
        cut += 1
    arguments = [text for message in messages[cut:] for _, text in arguments_of(message)]
    used = (value for text in arguments for _, value in values(text) if len(value) in VALUE_LENGTHS)
    return Case(id_, messages[:cut], [], occurring(used, messages[:cut]))


def files(places: Iterable[Path], pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of matching files."""
    for place in places:
        for path in sorted(place.rglob(pattern)):
            yield str(path.relative_to(place)), path.read_bytes()


SOURCES = {"coding": prepared, "codex": codex_sessions, "support": support}
"""The kinds of histories. Each function gets the data folder and the folders that the operator named."""

WINDOWS = {"coding": (32_768, 65_536), "codex": (32_768, 65_536), "support": (SUPPORT_WINDOW,)}
