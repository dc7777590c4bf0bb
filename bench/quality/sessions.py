"""Recorded sessions, where they are at hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.quality.conversations import Conversation
from proxy.compaction.message import text_of

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "sessions"
"""Recorded sessions are not part of the project; they may lie beside its folder."""

# What an airline's agent needs again: reservations, flights, users and means of payment are words with a digit in them.
_IDENTIFIER = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z_])\w{6,60}\b")


def coding(folder: Path) -> list[Conversation]:
    """One long coding session; empty where it is not at hand."""
    file = folder / "coding-a.json"
    return [Conversation("coding session", _messages(json.loads(file.read_text())))] if file.exists() else []


def airline(folder: Path) -> list[Conversation]:
    """Forty customers of an airline, one conversation each; empty where they are not at hand.

    Their facts are the identifiers in them, at the message that names each first.
    """
    file = folder / "airline-40.json"
    if not file.exists():
        return []
    found = []
    for number, session in enumerate(json.loads(file.read_text())):
        messages = _messages(session)
        facts: dict[str, int] = {}
        for index, message in enumerate(messages):
            if index:  # the policy of the airline is the same in all
                for identifier in _IDENTIFIER.findall(text_of(message)):
                    facts.setdefault(identifier, index)
        found.append(Conversation(f"airline {number}", messages, facts))
    return found


def _messages(session: Any) -> list[dict[str, Any]]:
    return list(session["messages"])
