"""Checks across sections: what is right by itself and wrong together."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.compaction.conditions import Trigger
from proxy.config.faults import Fault, near
from proxy.config.fields import KINDS
from proxy.config.globs import meet
from proxy.config.inheritance import overrides, stated
from proxy.config.messages import dotted
from proxy.config.policy import ModelOverride, Policy, Summary, WrittenPolicy
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.tree import Mapping, Path, find, shown
from proxy.errors import ConfigurationError
from proxy.upstream.provider_names import litellm_providers
from proxy.upstream.providers import SPEAKS_OPENAI, reach

Finding = tuple[Path, str]


def cross_check(root: Mapping, written: WrittenSettings, settings: Settings) -> list[Fault]:
    """Everything that does not go together, in the order of the file."""
    findings = [
        *_routes(settings),
        *_providers(settings),
        *_teams(settings),
        *_shared_keys(settings),
        *_auth(settings),
        *_any_origin(settings),
        *_memory(settings),
        *_prepare(root, written, settings),
    ]
    return sorted(Fault(find(root, path)[1], message) for path, message in findings)


def _routes(settings: Settings) -> Iterator[Finding]:
    for index, route in enumerate(settings.models):
        if route.upstream not in settings.upstreams:
            hint = near(route.upstream, settings.upstreams)
            yield ("models", index, "upstream"), f"models[{index}].upstream: no upstream '{route.upstream}'; {hint}"


def _providers(settings: Settings) -> Iterator[Finding]:
    for name, upstream in settings.upstreams.items():
        where = f"upstreams.{name}"
        try:
            found = reach(upstream.provider, upstream.base_url, upstream.lane, where=where)
        except ConfigurationError as error:
            yield ("upstreams", name), error.message
            continue
        asked_for = found is None or found.lane == "translate"
        # What is relayed to everywhere needs nobody to ask.
        if asked_for and upstream.provider not in SPEAKS_OPENAI and upstream.provider not in litellm_providers():
            hint = near(upstream.provider, litellm_providers() | SPEAKS_OPENAI.keys())
            hint = hint if hint.startswith("did") else "write it as LiteLLM does, or lane: relay and base_url"
            yield ("upstreams", name, "provider"), f"{where}.provider: LiteLLM knows no '{upstream.provider}'; {hint}"


def doubts(root: Mapping, written: WrittenSettings, settings: Settings) -> list[Fault]:
    """What is not wrong, and hardly meant, in the order of the file."""
    findings = [*_summary_models(written, settings), *_useless_globs(settings)] if settings.models else []
    return sorted(Fault(find(root, path)[1], message) for path, message in findings)


def _summary_models(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for name, own in written.policies.items():
        places: list[tuple[Path, Summary]] = [(("policies", name), own.summary)]
        places += [(("policies", name, "models", index), over.summary) for index, over in enumerate(own.models)]
        for above, summary in places:
            for key in ("model", "fallback_model"):
                path: Path = (*above, "summary", key)
                model = getattr(summary, key)
                if model is not None and settings.route(model) is None:
                    message = (
                        f"{dotted(path)}: no route of 'models' matches '{shown(model)}', so it makes no summary: "
                        "correct it, or add a route"
                    )
                    yield path, message


def _useless_globs(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        for index, glob in enumerate(team.models or ()):
            if not any(meet(glob, route.match) for route in settings.models):
                path: Path = ("teams", name, "models", index)
                message = (
                    f"{dotted(path)}: no route of 'models' can match '{shown(glob)}', so it lets nobody use anything: "
                    "correct it, or add a route"
                )
                yield path, message


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


def _any_origin(settings: Settings) -> Iterator[Finding]:
    if settings.auth.mode != "open" or "*" not in settings.server.cors_origins:
        return
    for name, upstream in settings.upstreams.items():
        if upstream.spends:
            message = (
                f"server.cors_origins: '*' lets any web page spend the key of upstreams.{name}, as auth.mode is open. "
                "Fix: list the origins, or set auth.mode: keys"
            )
            yield ("server", "cors_origins"), message
            return


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
        policy, values = settings.policies[name], stated(root, name, written.policies)
        # A policy that states neither has what its parent has, which is reported there.
        here = _of_interest(own)
        if here and "prepare" in values.items and (message := _too_late(policy, f"policies.{name}")):
            yield ("policies", name, here[0]), message
            continue
        for index, (match, over) in enumerate(overrides(values)):
            is_own = index < len(own.models)
            keys = _of_interest(own.models[index]) if is_own else here
            if not keys or "prepare" not in over.items:
                continue
            if message := _too_late(policy.models[index].policy, f"policies.{name}.models ({match})"):
                yield ("policies", name, *(("models", index) if is_own else ()), keys[0]), message


def _of_interest(own: WrittenPolicy | ModelOverride) -> list[str]:
    return [key for key in ("prepare", "trigger") if key in own.model_fields_set]


def _too_late(policy: Policy, where: str) -> str | None:
    """What is wrong where a policy prepares no sooner than it compacts."""
    for kind in KINDS:
        begin, end = _lowest(policy.prepare, kind), _lowest(policy.trigger, kind)
        if begin is not None and end is not None and begin >= end:
            return (
                f"{where}.prepare: {begin:g} ({kind}) must be below the trigger's {end:g}, so that the "
                "summary is ready in time: lower prepare, or raise trigger"
            )
    return None


def _lowest(trigger: Trigger, kind: str) -> float | None:
    """The lowest bound of this kind, of the clauses that have no other part."""
    bounds = []
    for clause in trigger:
        parts = {key: getattr(clause, key) for key in KINDS if getattr(clause, key) is not None}
        if parts.keys() == {kind}:
            bounds.append(parts[kind])
    return min(bounds, default=None)
