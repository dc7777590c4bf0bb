"""The command `keys new`: creates a key for a team. The configuration contains only its hash."""

from __future__ import annotations

import hashlib
import secrets
from datetime import date

PREFIX = "cp-"

RANDOM_BYTES = 32


def new_key() -> str:
    """Return a random key: the prefix and 43 letters, digits, ``-`` and ``_``."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def entry(key: str, expires: date | None) -> str:
    """Return the YAML entry for the key in a configuration."""
    digest = f'"sha256:{hashlib.sha256(key.encode()).hexdigest()}"'
    return digest if expires is None else f"{{hash: {digest}, expires: {expires}}}"


def announcement(key: str, team: str, expires: date | None) -> str:
    """Return the text that the command prints."""
    return f"""\
The key. It is shown only once and not stored. Give it to the team:

  {key}

Its hash, for the configuration. The team's other keys stay valid while they are listed:

teams:
  {team}:
    keys:
      - {entry(key, expires)}
"""
