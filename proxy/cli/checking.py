"""The command `check`: lists the errors and warnings of a configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from proxy.config import Loaded, read
from proxy.config.checks import advice, exposure
from proxy.errors import ConfigurationError
from proxy.pipeline.snapshot import listening

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?:warning: )?(?P<message>.*)", re.DOTALL)

_FIX = ". Fix: "


class NoEnvironment(Mapping[str, str]):
    """Stands in for every variable: 32 bytes in base64, which is a valid key of any kind."""

    def __getitem__(self, name: str) -> str:
        return "A" * 43 + "="

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def checked(path: Path, host: str | None, *, strict: bool, as_json: bool, no_env: bool) -> tuple[int, Loaded | None]:
    """Print the errors and warnings of a configuration. Return the exit status, and the configuration if it's valid.

    ``host`` is the address that `serve` would get. With ``no_env``, values with variables aren't checked.
    """
    loaded, errors = None, list[str]()
    try:
        loaded = read(path, NoEnvironment() if no_env else os.environ)
    except ConfigurationError as error:
        errors = [line for line in error.message.splitlines() if not (no_env and _has_variable(line))]
    warnings = [] if loaded is None else _warnings(loaded, host)
    status = int(bool(errors or (strict and warnings)))
    if as_json:
        found = {"file": str(path), "errors": [_parts(line) for line in errors]}
        click.echo(json.dumps({**found, "warnings": [_parts(line) for line in warnings]}, indent=2))
        return status, loaded
    for line in (*errors, *warnings):
        click.echo(line, err=True)
    if not status:
        click.echo(f"{path}: fine")
    return status, loaded


def _warnings(loaded: Loaded, host: str | None) -> list[str]:
    exposed = exposure(listening(loaded.settings, host), loaded)
    return [*loaded.warnings, *advice(loaded, datetime.now(UTC).date()), *exposed]


def _has_variable(error: str) -> bool:
    """Return whether the line of an error contains a variable."""
    found = _PLACE.match(error)
    if found is None:
        return False
    try:
        lines = Path(found["file"]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    number = int(found["line"])
    return number <= len(lines) and "${" in lines[number - 1]


def _parts(line: str) -> dict[str, Any]:
    found = _PLACE.match(line)
    place = {} if found is None else {"file": found["file"], "line": int(found["line"])}
    message, _, fix = (line if found is None else found["message"]).partition(_FIX)
    return {**place, "message": message, "fix": fix or None}
