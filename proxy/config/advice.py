"""What is right in a configuration and yet, on this day, hardly meant."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from proxy.config.faults import Fault
from proxy.config.loading import Loaded
from proxy.config.tree import find


def advice(loaded: Loaded, today: date) -> list[str]:
    """A line for each thing worth a look in a configuration that is right. ``today`` is the day in UTC."""
    return loaded.sources.told(sorted(_expired(loaded, today)))


def _expired(loaded: Loaded, today: date) -> Iterator[Fault]:
    for name, team in loaded.settings.teams.items():
        for index, key in enumerate(team.keys):
            if key.expires is not None and key.expires <= today:
                _, line, _ = find(loaded.root, ("teams", name, "keys", index))
                where = f"teams.{name}.keys[{index}]"
                yield Fault(line, f"warning: {where}: expired on {key.expires} (UTC), and is refused: remove it")
