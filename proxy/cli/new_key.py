"""Keys for teams: made here, known by their hash only."""

from __future__ import annotations

import hashlib
import secrets
from datetime import date

PREFIX = "cp-"

RANDOM_BYTES = 32


def new_key() -> str:
    """A key that nobody can guess: the prefix and 43 letters, digits, ``-`` and ``_``."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def entry(key: str, expires: date | None) -> str:
    """The key as a configuration lists it, in YAML."""
    digest = f'"sha256:{hashlib.sha256(key.encode()).hexdigest()}"'
    return digest if expires is None else f"{{hash: {digest}, expires: {expires}}}"


def announcement(key: str, team: str, expires: date | None) -> str:
    """What the person who asked for a key is told."""
    return f"""\
The key, shown only now and kept nowhere. Hand it to the team:

  {key}

Its hash, for the configuration. A key that the team has already stays valid as long as it is listed:

teams:
  {team}:
    keys:
      - {entry(key, expires)}
"""
