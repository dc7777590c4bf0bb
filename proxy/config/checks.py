"""Checks across sections: settings that are valid alone but not together."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.config.fields import KINDS, lowest
from proxy.config.inheritance import overrides, stated
from proxy.config.issues import Issue, issue, near
from proxy.config.policy import ModelOverride, Policy, WrittenPolicy
from proxy.config.providers import SPEAKS_OPENAI, litellm_providers, resolve_transport
from proxy.config.sections import sections
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.tree import Node, Path, dotted, line_of
from proxy.errors import ConfigurationError

Finding = tuple[Path, str, str]
"""The path of a setting, the problem, and its fix."""


def cross_check(root: Node, written: WrittenSettings, settings: Settings) -> list[Issue]:
    """Return the errors across sections, in the order of the file."""
    findings = [
        *_routes(settings),
        *_unknown_providers(settings),
        *_teams(settings),
        *_shared_keys(settings),
        *_auth(settings),
        *_any_origin(settings),
        *_memory(settings),
        *(found for section in sections() for found in section.errors(written, settings)),
    ]
    issues = [issue(line_of(root, path), problem, fix, dotted(path)) for path, problem, fix in findings]
    return sorted([*issues, *_missing_addresses(root, settings), *_prepare(root, written, settings)])


def _routes(settings: Settings) -> Iterator[Finding]:
    for index, route in enumerate(settings.models):
        if route.upstream not in settings.upstreams:
            fix = near(route.upstream, settings.upstreams)
            yield ("models", index, "upstream"), f"there is no upstream '{route.upstream}'", fix


def _missing_addresses(root: Node, settings: Settings) -> Iterator[Issue]:
    for name, upstream in settings.upstreams.items():
        try:
            resolve_transport(upstream.provider, upstream.base_url, upstream.lane, where=f"upstreams.{name}")
        except ConfigurationError as error:
            yield Issue(line_of(root, ("upstreams", name)), error.message)


def _unknown_providers(settings: Settings) -> Iterator[Finding]:
    for name, upstream in settings.upstreams.items():
        # Providers in SPEAKS_OPENAI and relays need no look-up in LiteLLM.
        if upstream.provider in SPEAKS_OPENAI or upstream.lane == "relay":
            continue
        if upstream.provider not in litellm_providers():
            hint = near(upstream.provider, litellm_providers() | SPEAKS_OPENAI.keys())
            fix = hint if hint.startswith("did") else "use a provider of LiteLLM, or set lane: relay and base_url"
            yield ("upstreams", name, "provider"), f"LiteLLM has no provider '{upstream.provider}'", fix


def _teams(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        if team.policy not in settings.policies:
            problem, fix = f"there is no policy '{team.policy}'", near(team.policy, settings.policies)
            yield ("teams", name, "policy"), problem, fix


def _shared_keys(settings: Settings) -> Iterator[Finding]:
    owners: dict[str, str] = {}
    admins = {key.hash for key in settings.admin.keys} if settings.admin is not None else frozenset()
    for name, team in settings.teams.items():
        for index, key in enumerate(team.keys):
            if key.hash in admins:
                fix = "use a key of its own for admin.keys, from: compaction-proxy keys new --team admin"
                yield ("teams", name, "keys", index), "admin.keys also has this key", fix
            owner = owners.setdefault(key.hash, name)
            if owner != name:
                yield ("teams", name, "keys", index), f"team '{owner}' also has this key", "keep it in one team"


def _auth(settings: Settings) -> Iterator[Finding]:
    if settings.auth.mode != "keys":
        return
    if not any(team.keys for team in settings.teams.values()):
        fix = "add the lines that this command prints: compaction-proxy keys new --team NAME"
        yield ("auth", "mode"), "every request is refused, because no team lists a key", fix
    # A configuration without upstreams gets one error, for the first default, instead of one for each.
    stated = len(settings.upstreams) if "upstreams" in settings.model_fields_set else 1
    for name, upstream in list(settings.upstreams.items())[:stated]:
        if not upstream.has_credential:
            problem = "api_key is missing. With auth.mode 'keys' the proxy never forwards a caller's key"
            fix = 'add api_key: "${OPENAI_API_KEY}", or api_key: none for an upstream without keys'
            yield ("upstreams", name), problem, fix


def _any_origin(settings: Settings) -> Iterator[Finding]:
    if settings.auth.mode != "open" or "*" not in settings.server.cors_origins:
        return
    name = next((name for name, upstream in settings.upstreams.items() if upstream.spends), None)
    if name is not None:
        problem = f"'*' lets any web page spend the key of upstreams.{name}, because auth.mode is open"
        yield ("server", "cors_origins"), problem, "cors_origins: [https://app.example], or auth: {mode: keys}"


def _memory(settings: Settings) -> Iterator[Finding]:
    least = 2 * settings.server.body_limit
    if settings.server.body_memory < least:
        problem = f"must be at least twice body_limit, {least:,} bytes, because a body may be compressed"
        yield ("server", "max_body_memory"), problem, f"max_body_memory: {least}, or a smaller body_limit"


def _prepare(root: Node, written: WrittenSettings, settings: Settings) -> Iterator[Issue]:
    """Find policies that don't prepare a summary before they compact."""
    for name, own in written.policies.items():
        policy, values = settings.policies[name], stated(root, name, written.policies)
        # If a policy states neither, the error belongs to its parent.
        here = _keys_of_interest(own)
        if here and "prepare" in values.settings and (late := _too_late(policy)):
            yield issue(line_of(root, ("policies", name, here[0])), *late, f"policies.{name}.prepare")
            continue
        for index, (match, over) in enumerate(overrides(values)):
            path: Path = ("policies", name)
            keys = here
            if index < len(own.models):
                path, keys = (*path, "models", index), _keys_of_interest(own.models[index])
            if keys and "prepare" in over.settings and (late := _too_late(policy.models[index].policy)):
                yield issue(line_of(root, (*path, keys[0])), *late, f"policies.{name}.models ({match}).prepare")


def _keys_of_interest(own: WrittenPolicy | ModelOverride) -> list[str]:
    return [key for key in ("prepare", "trigger") if key in own.model_fields_set]


def _too_late(policy: Policy) -> tuple[str, str] | None:
    """Return problem and fix if a policy doesn't prepare before it compacts."""
    for kind in KINDS:
        begin, end = lowest(policy.prepare, kind), lowest(policy.trigger, kind)
        if begin is not None and end is not None and begin >= end:
            problem = f"{begin:g} ({kind}) must be below the trigger's {end:g}, so that the summary is ready in time"
            return problem, f"prepare: {{{kind}: {below(end, 0.88)}}}, or a higher trigger"
    return None


def below(bound: float, share: float) -> str:
    """Return a figure of the same kind below a bound."""
    return f"{bound * share:.2g}" if bound <= 1 else str(max(1, int(bound * share)))
