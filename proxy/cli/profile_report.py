"""Tables of the limits of models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.limits.profiles.lookup import SOURCED
from proxy.limits.profiles.profile import Profile

WIDE = 150
"""Columns of tables that don't go to a terminal."""


def wide_console() -> Console:
    """Return the console for tables. In a file or a pipe it has room for long names."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console


def rows(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Return each field of a profile, its value as text, and its source. Numbers have thousands separators."""
    for field in SOURCED:
        value = getattr(profile, field)
        text = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
        yield field, text, profile.sources.get(field, "unknown")


def render(profiles: Iterable[Profile], console: Console) -> None:
    """Print one table per profile, with its note below."""
    for profile in profiles:
        table = Table("field", "value", "source", title=Text(profile.model), title_justify="left")
        for row in rows(profile):
            table.add_row(*map(Text, row))
        console.print(table)
        if profile.note:
            console.print(f"note: {profile.note}", markup=False, highlight=False)
