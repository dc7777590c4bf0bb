"""Load recorded sessions, if there are any."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench.quality.conversations import Conversation
from proxy.dialects.chat.units import text_of

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "sessions"
"""Recorded sessions aren't part of the project. They may be in a folder next to it."""

# Reservations, flights, users, and payment methods of an airline are words with a digit.
_IDENTIFIER = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z_])\w{6,60}\b")


def coding(folder: Path) -> list[Conversation]:
    """Return one long coding session, or nothing if the folder doesn't have it."""
    file = folder / "coding-a.json"
    return [Conversation("coding session", _messages(json.loads(file.read_text())))] if file.exists() else []


def airline(folder: Path) -> list[Conversation]:
    """Return forty conversations of airline customers, or nothing if the folder doesn't have them.

    Their facts are identifiers, each with the first message that contains it.
    """
    file = folder / "airline-40.json"
    if not file.exists():
        return []
    found = []
    for number, session in enumerate(json.loads(file.read_text())):
        messages = _messages(session)
        facts: dict[str, int] = {}
        for index, message in enumerate(messages):
            if index:  # The first message is the airline's policy, which all conversations share.
                for identifier in _IDENTIFIER.findall(text_of(message)):
                    facts.setdefault(identifier, index)
        found.append(Conversation(f"airline {number}", messages, facts))
    return found


def _messages(session: Any) -> list[dict[str, Any]]:
    return list(session["messages"])
