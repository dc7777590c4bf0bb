"""The command `keys list`: shows the keys of all teams and administrators."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from proxy.cli.profile_report import print_table
from proxy.config import Settings

SHOWN = 12
"""Characters of a hash to show, enough to find it in the file."""

ADMIN = "(admin)"
"""Shown in place of a team, whose name can't have parentheses."""


def list_keys(settings: Settings, console: Console) -> None:
    """Print the keys of teams and administrators: the start of the hash, the name, and whether it is valid."""
    table = Table("team", "key", "name", "expires", "state", "policy")
    for row in _rows(settings, time.time()):
        table.add_row(*row)
    if table.row_count:
        print_table(table, console)
    else:
        console.print("The configuration has no keys. Create one with: compaction-proxy keys new --team NAME")


def _rows(settings: Settings, now: float) -> Iterator[tuple[str, ...]]:
    teams = [(name, team.policy, key) for name, team in settings.teams.items() for key in team.keys]
    admins = () if settings.admin is None else settings.admin.keys
    for team, policy, key in [*teams, *((ADMIN, "", key) for key in admins)]:
        state = "expired" if now >= key.ends else "valid"
        shown = key.hash.removeprefix("sha256:")[:SHOWN]
        yield team, f"sha256:{shown}…", key.name or "", str(key.expires or "never"), state, policy
