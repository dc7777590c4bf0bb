"""Checks across sections: what is right by itself and wrong together."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.compaction.conditions import Trigger
from proxy.config.faults import Fault, near
from proxy.config.fields import KINDS
from proxy.config.inheritance import stated
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.tree import Mapping, Path, find

Finding = tuple[Path, str]


def cross_check(root: Mapping, written: WrittenSettings, settings: Settings) -> list[Fault]:
    """Everything that does not go together, in the order of the file."""
    findings = [
        *_routes(settings),
        *_teams(settings),
        *_shared_keys(settings),
        *_auth(settings),
        *_memory(settings),
        *_prepare(root, written, settings),
    ]
    return sorted(Fault(find(root, path)[1], message) for path, message in findings)


def _routes(settings: Settings) -> Iterator[Finding]:
    for index, route in enumerate(settings.models):
        if route.upstream not in settings.upstreams:
            hint = near(route.upstream, settings.upstreams)
            yield ("models", index, "upstream"), f"models[{index}].upstream: no upstream '{route.upstream}'; {hint}"


def _teams(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        if team.policy not in settings.policies:
            hint = near(team.policy, settings.policies)
            yield ("teams", name, "policy"), f"teams.{name}.policy: no policy '{team.policy}'; {hint}"


def _shared_keys(settings: Settings) -> Iterator[Finding]:
    owners: dict[str, str] = {}
    for name, team in settings.teams.items():
        for index, key in enumerate(team.keys):
            owner = owners.setdefault(key.hash, name)
            if owner != name:
                message = f"teams.{name}.keys[{index}]: team '{owner}' has this key too; a key belongs to one team"
                yield ("teams", name, "keys", index), message


def _auth(settings: Settings) -> Iterator[Finding]:
    if settings.auth.mode != "keys":
        return
    if not any(team.keys for team in settings.teams.values()):
        yield ("auth", "mode"), "auth.mode: 'keys' lets nobody in, as no team lists a key: add teams.NAME.keys"
    for name, upstream in settings.upstreams.items():
        if not upstream.has_credential:
            message = (
                f"upstreams.{name}: api_key is missing: with auth.mode 'keys' a caller's key is this proxy's own and "
                "is never sent on; give the upstream's key (any text where it needs none)"
            )
            yield ("upstreams", name), message


def _memory(settings: Settings) -> Iterator[Finding]:
    least = 2 * settings.server.body_limit
    if settings.server.body_memory < least:
        message = (
            f"server.max_body_memory: must be twice body_limit at least, {least:,} bytes, as a body may come "
            "compressed: raise it, or lower body_limit"
        )
        yield ("server", "max_body_memory"), message


def _prepare(root: Mapping, written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for name, own in written.policies.items():
        # A policy that states neither has what its parent has, which is reported there.
        here = [key for key in ("prepare", "trigger") if key in own.model_fields_set]
        if not here or "prepare" not in stated(root, name, written.policies).items:
            continue
        policy = settings.policies[name]
        for kind in KINDS:
            begin, end = _lowest(policy.prepare, kind), _lowest(policy.trigger, kind)
            if begin is not None and end is not None and begin >= end:
                message = (
                    f"policies.{name}.prepare: {begin:g} ({kind}) must be below the trigger's {end:g}, so that the "
                    "summary is ready in time: lower prepare, or raise trigger"
                )
                yield ("policies", name, here[0]), message


def _lowest(trigger: Trigger, kind: str) -> float | None:
    """The lowest bound of this kind, of the clauses that have no other part."""
    bounds = []
    for clause in trigger:
        parts = {key: getattr(clause, key) for key in KINDS if getattr(clause, key) is not None}
        if parts.keys() == {kind}:
            bounds.append(parts[kind])
    return min(bounds, default=None)
