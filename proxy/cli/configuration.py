"""Reports about a configuration: its errors and warnings, the settings of a team and a model, and all keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from proxy.cli.tables import table_console
from proxy.config import Loaded, Policy, Settings, read
from proxy.config.checks import advice, exposure, forbidden_summary_models
from proxy.config.document import near
from proxy.config.policy import effective_values, overrides, stated
from proxy.errors import ConfigurationError

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


def checked(
    path: Path | None, host: str | None, *, strict: bool, as_json: bool, no_env: bool, live: bool
) -> tuple[int, Loaded | None]:
    """Print the errors and warnings of a configuration. Return the exit status, and the configuration if it's valid.

    ``host`` is the address that `serve` would get. With ``no_env``, values with variables aren't checked.
    With ``live``, also test what the configuration needs, or the defaults without a ``path``.
    """
    loaded, errors = None, list[str]()
    try:
        loaded = None if path is None else read(path, NoEnvironment() if no_env else os.environ)
    except ConfigurationError as error:
        errors = [line for line in error.message.splitlines() if not (no_env and _has_variable(line))]
    warnings = []
    if loaded is not None:
        exposed = exposure(loaded.settings.listening(host), loaded)
        warnings = [*loaded.warnings, *advice(loaded, datetime.now(UTC).date()), *exposed]
    findings = []
    if live and not errors:
        from proxy.cli.live import examined  # it loads LiteLLM

        findings = examined(Settings() if loaded is None else loaded.settings)
    failed = any(finding.state == "failed" for finding in findings)
    status = int(bool(errors or (strict and warnings) or failed))
    if as_json:
        found: dict[str, Any] = {"file": path and str(path), "errors": [_parts(line) for line in errors]}
        found |= {"warnings": [_parts(line) for line in warnings]}
        found |= {"findings": [asdict(finding) for finding in findings]} if live else {}
        click.echo(json.dumps(found, indent=2))
        return status, loaded
    for line in (*errors, *warnings):
        click.echo(line, err=True)
    if any("} isn't set" in line for line in errors):
        click.echo("To check a configuration without its variables, pass --no-env.", err=True)
    for finding in findings:
        click.echo(finding.text)
    if not status:
        click.echo(f"{path or 'The defaults'}: fine")
    return status, loaded


def _has_variable(error: str) -> bool:
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


def shown(loaded: Loaded, team: str | None, model: str | None) -> None:
    """Print the settings in force. Raises ``ConfigurationError`` for an unknown team."""
    teams = loaded.settings.teams
    if team is not None and team not in teams:
        raise ConfigurationError(f"there is no team '{team}'. Fix: {near(team, teams)}")
    policy = loaded.settings.policies["default" if team is None else teams[team].policy]
    values = stated(loaded.root, policy.name, loaded.written.policies)
    override = None
    for own, (_, over) in zip(policy.models, overrides(values), strict=True):
        if model is not None and fnmatchcase(model, own.match):
            policy, values, override = own.policy, over, own.match
            break
    console = table_console()
    console.print(_about(loaded, team, model, policy, override), markup=False, highlight=False)
    table = Table("setting", "value", "set by")
    table.columns[0].no_wrap = True
    table.columns[2].overflow = "fold"
    for row in effective_values(policy, values, loaded.sources.position):
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def _about(loaded: Loaded, team: str | None, model: str | None, policy: Policy, override: str | None) -> Table:
    table = Table("", "", show_header=False)
    table.add_row("team", team or "none")
    chain = [policy.name]
    while (own := loaded.written.policies.get(chain[-1])) is not None and own.extends is not None:
        chain.append(own.extends)
    table.add_row("policy", " extends ".join(chain))
    if team is not None:
        from proxy.cli.store import stored_budgets  # a check without a team needs no store

        for budget in stored_budgets(loaded.settings, team):
            table.add_row("budget", budget.text)
        for forbidden in forbidden_summary_models(loaded.settings, team, policy):
            table.add_row("summaries", f"not from {forbidden}: the team may not use it")
    if model is None:
        globs = [own.match for own in loaded.settings.policies[policy.name].models]
        table.add_row("model", f"any but {', '.join(globs)}" if globs else "any")
        return table
    table.add_row("model", model)
    table.add_row("settings for some models", "none that match" if override is None else f"those for {override}")
    route = loaded.settings.route(model)
    table.add_row("goes to", "nowhere: no route matches" if route is None else f"{route.upstream}, as {route.model}")
    allowed = None if team is None else loaded.settings.teams[team].models
    if allowed is not None and not any(fnmatchcase(model, glob) for glob in allowed):
        table.add_row("may be used", f"no: the team may use {', '.join(allowed) or 'none'}")
    return table
