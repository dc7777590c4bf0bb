"""What is right in a configuration and yet hardly meant."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Environ
from datetime import date
from pathlib import Path

from proxy.config.document import parse
from proxy.config.faults import Fault
from proxy.config.loading import load
from proxy.config.settings import Settings
from proxy.config.tree import Mapping, find


def advice(path: Path, environ: Environ[str, str], today: date) -> list[str]:
    """A line for each thing worth a look in a file that is right. ``today`` is the day in UTC.

    Raises ``errors.ConfigurationError`` for a file that is wrong.
    """
    settings = load(path, environ)
    found = sorted(_expired(parse(path.read_bytes()), settings, today))
    return [f"{path}:{fault.line}: warning: {fault.message}" for fault in found]


def _expired(root: Mapping, settings: Settings, today: date) -> Iterator[Fault]:
    for name, team in settings.teams.items():
        for index, key in enumerate(team.keys):
            if key.expires is not None and key.expires <= today:
                _, line, _ = find(root, ("teams", name, "keys", index))
                message = f"teams.{name}.keys[{index}]: expired on {key.expires} (UTC), and is refused: remove it"
                yield Fault(line, message)
