"""Rows and tables of the limits of models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.limits.profiles.lookup import SOURCED
from proxy.limits.profiles.profile import Profile

FIELDS = SOURCED


class Row(NamedTuple):
    """One field of a profile: its value as text, and its source."""

    field: str
    value: str
    source: str


def describe(profile: Profile, *fields: str) -> list[Row]:
    """Return rows for ``fields``, or for all fields with a source. Numbers have thousands separators."""
    return [
        Row(field, _text(getattr(profile, field)), profile.sources.get(field, "unknown")) for field in fields or FIELDS
    ]


def render(profiles: Iterable[Profile], console: Console) -> None:
    """Print one table per profile, with its note below."""
    for profile in profiles:
        table = Table("field", "value", "source", title=Text(profile.model), title_justify="left")
        for row in describe(profile):
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        if profile.note:
            console.print(f"note: {profile.note}", markup=False, highlight=False)


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else str(value)
