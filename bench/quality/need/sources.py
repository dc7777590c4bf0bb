"""Load histories, each with the names in the next calls. None of them is part of the project.

They are in the data folder, or in places that the operator names: folders or git repositories.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from bench.quality.conversations import Message
from bench.quality.need import codex
from bench.quality.need.text import Case, occurring, tokens, values
from proxy.dialects.chat.units import arguments_of

FOLDER = Path(__file__).parents[4] / "shared" / "data"
"""The folder with recorded data may be next to the project."""

MOST_CASES = 25

CHECKPOINTS = "entire/checkpoints/v1"
"""The branch on which the tool ``entire`` keeps sessions of coding agents."""

SUPPORT_WINDOW = 4096
SUPPORT_CUT = 0.6
"""Share of a support conversation's messages that are its history."""
SUPPORT_LEAST = 0.85
"""Share of the window that a history has at least. Shorter ones aren't compacted."""
VALUE_LENGTHS = range(3, 61)
"""Characters of a value that is a name. Longer values of arguments are prose."""


@dataclass(frozen=True)
class Source:
    """A kind of history. ``read`` gets the data folder and the places that the operator named."""

    windows: tuple[int, ...]
    read: Callable[[Path, Sequence[Path]], list[Case]]


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
    for _, raw in files(places, CHECKPOINTS, "*full.jsonl"):
        id_, messages = codex.session(raw.decode().splitlines())
        if id_ and len(messages) > len(sessions.get(id_, ())):
            sessions[id_] = messages
    found = [made for id_, messages in sessions.items() if (made := codex.case(id_, messages)) is not None]
    return sorted(found, key=lambda made: (-made.scale, made.id))[:MOST_CASES]


def support(folder: Path, places: Sequence[Path]) -> list[Case]:
    """Return a case for each of the longest conversations of customers with an agent that has tools."""
    sized: list[tuple[int, str, Case]] = []
    for name, raw in files(places, "HEAD", "*historical_trajectories/*.json"):
        for number, conversation in enumerate(json.loads(raw)):
            made = _support_case(f"{name} {number}", conversation["traj"])
            size = tokens(made.messages)
            if made.idents and size >= SUPPORT_WINDOW * SUPPORT_LEAST:
                sized.append((-size, made.id, made))
    return [made for *_, made in sorted(sized, key=lambda one: one[:2])][:MOST_CASES]


def _support_case(id_: str, messages: list[Message]) -> Case:
    cut = int(len(messages) * SUPPORT_CUT)
    while messages[cut]["role"] == "tool":
        cut += 1
    arguments = [text for message in messages[cut:] for _, text in arguments_of(message)]
    used = (value for text in arguments for _, value in values(text) if len(value) in VALUE_LENGTHS)
    return Case(id_, messages[:cut], [], occurring(used, messages[:cut]))


SOURCES = {
    "coding": Source((32_768, 65_536), prepared),
    "codex": Source((32_768, 65_536), codex_sessions),
    "support": Source((SUPPORT_WINDOW,), support),
}


def half(cases: Sequence[Case], name: str | None) -> list[Case]:
    """Return the half ``a`` (development) or ``b`` (held out), or all cases. A hash of the id decides."""
    return [case for case in cases if name is None or name == "ab"[hashlib.sha256(case.id.encode()).digest()[0] % 2]]


def files(places: Iterable[Path], reference: str, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of matching files, in the reference of a repository or in a plain folder.

    Skip the files that a partial copy of a repository lists but doesn't have.
    """
    for place in places:
        if not _is_repository(place):
            for path in sorted(path for path in place.rglob("*") if path.is_file()):
                if fnmatch(str(path.relative_to(place)), pattern):
                    yield str(path.relative_to(place)), path.read_bytes()
            continue
        listed = _git(place, "ls-tree", "-r", "--name-only", "-z", reference) or b""
        for name in listed.decode().split("\0"):
            if fnmatch(name, pattern) and (raw := _git(place, "cat-file", "blob", f"{reference}:{name}")) is not None:
                yield name, raw


def _is_repository(place: Path) -> bool:
    return (place / ".git").exists() or ((place / "HEAD").is_file() and (place / "objects").is_dir())


def _git(place: Path, *arguments: str) -> bytes | None:
    """Return the output of a command, or ``None`` if it failed because the reference or the object is missing."""
    run = subprocess.run(["git", "-C", str(place), *arguments], capture_output=True, check=False)
    return run.stdout if run.returncode == 0 else None
