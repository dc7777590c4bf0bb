"""Tables of the settings in force for a team and a model, with the file and line that set each value."""

from __future__ import annotations

from fnmatch import fnmatchcase

from rich.table import Table

from proxy.cli.profile_report import wide_console
from proxy.config import Loaded, Policy
from proxy.config.inheritance import effective_values, overrides, stated
from proxy.config.issues import near
from proxy.errors import ConfigurationError
from proxy.summary.settings import forbidden_summary_models


def shown(loaded: Loaded, team: str | None, model: str | None) -> None:
    """Print the settings in force. Raises ``ConfigurationError`` for an unknown team."""
    policy = loaded.settings.policies[_policy_of(loaded, team)]
    values = stated(loaded.root, policy.name, loaded.written.policies)
    override = None
    for own, (_, over) in zip(policy.models, overrides(values), strict=True):
        if model is not None and fnmatchcase(model, own.match):
            policy, values, override = own.policy, over, own.match
            break
    console = wide_console()
    console.print(_about(loaded, team, model, policy, override), markup=False, highlight=False)
    table = Table("setting", "value", "set by")
    table.columns[0].no_wrap = True
    table.columns[2].overflow = "fold"
    for row in effective_values(policy, values, loaded.sources.place):
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)


def _policy_of(loaded: Loaded, team: str | None) -> str:
    if team is None:
        return "default"
    teams = loaded.settings.teams
    if team not in teams:
        raise ConfigurationError(f"there is no team '{team}'. Fix: {near(team, teams)}")
    return teams[team].policy


def _about(loaded: Loaded, team: str | None, model: str | None, policy: Policy, override: str | None) -> Table:
    table = Table("", "", show_header=False)
    table.add_row("team", team or "none")
    chain = [policy.name]
    while (own := loaded.written.policies.get(chain[-1])) is not None and own.extends is not None:
        chain.append(own.extends)
    table.add_row("policy", " extends ".join(chain))
    if team is not None:
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
