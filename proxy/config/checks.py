"""Checks across sections: settings that are valid alone but not together."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.compaction.conditions import Trigger
from proxy.config.faults import Issue, near, said
from proxy.config.fields import KINDS
from proxy.config.globs import covers, meet
from proxy.config.inheritance import overrides, stated
from proxy.config.messages import dotted
from proxy.config.policy import ModelOverride, Policy, Summary, WrittenPolicy
from proxy.config.provider_names import litellm_providers
from proxy.config.providers import SPEAKS_OPENAI, resolve_transport
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.tree import Mapping, Path, find, shown
from proxy.errors import ConfigurationError
from proxy.limits.profiles import Profiles

Finding = tuple[Path, str]


def cross_check(root: Mapping, written: WrittenSettings, settings: Settings) -> list[Issue]:
    """Return the errors across sections, in the order of the file."""
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
    return sorted(Issue(find(root, path)[1], message) for path, message in findings)


def _routes(settings: Settings) -> Iterator[Finding]:
    for index, route in enumerate(settings.models):
        if route.upstream not in settings.upstreams:
            problem, fix = f"there is no upstream '{route.upstream}'", near(route.upstream, settings.upstreams)
            yield ("models", index, "upstream"), said(problem, fix, f"models[{index}].upstream")


def _providers(settings: Settings) -> Iterator[Finding]:
    for name, upstream in settings.upstreams.items():
        where = f"upstreams.{name}"
        try:
            found = resolve_transport(upstream.provider, upstream.base_url, upstream.lane, where=where)
        except ConfigurationError as error:
            yield ("upstreams", name), error.message
            continue
        asked_for = found is None or found.lane == "translate"
        # Providers in SPEAKS_OPENAI need no look-up in LiteLLM.
        if asked_for and upstream.provider not in SPEAKS_OPENAI and upstream.provider not in litellm_providers():
            hint = near(upstream.provider, litellm_providers() | SPEAKS_OPENAI.keys())
            fix = hint if hint.startswith("did") else "use a provider of LiteLLM, or set lane: relay and base_url"
            message = said(f"LiteLLM has no provider '{upstream.provider}'", fix, f"{where}.provider")
            yield ("upstreams", name, "provider"), message


def warnings(root: Mapping, written: WrittenSettings, settings: Settings) -> list[Issue]:
    """Return warnings about settings that are valid but probably not intended, in the order of the file."""
    findings = [
        *(_summary_models(written, settings) if settings.models else ()),
        *(_useless_globs(settings) if settings.models else ()),
        *_unreachable_routes(settings),
        *_unknown_windows(settings),
        *_azure_versions(settings),
        *_keyless_teams(settings),
        *_large_keeps(written, settings),
    ]
    return sorted(Issue(find(root, path)[1], message) for path, message in findings)


def _summary_models(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for name, own in written.policies.items():
        places: list[tuple[Path, Summary]] = [(("policies", name), own.summary)]
        places += [(("policies", name, "models", index), over.summary) for index, over in enumerate(own.models)]
        for above, summary in places:
            for key in ("model", "fallback_model"):
                path: Path = (*above, "summary", key)
                model = getattr(summary, key)
                if model is not None and settings.route(model) is None:
                    message = said(
                        f"no route of 'models' matches '{shown(model)}', so it makes no summary",
                        f'correct the name, or add a route: {{match: "{shown(model)}", upstream: NAME}}',
                        dotted(path),
                    )
                    yield path, message


def _useless_globs(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        for index, glob in enumerate(team.models or ()):
            if not any(meet(glob, route.match) for route in settings.models):
                path: Path = ("teams", name, "models", index)
                message = said(
                    f"no route of 'models' can match '{shown(glob)}', so it allows no model",
                    f'correct it, or add a route: {{match: "{shown(glob)}", upstream: NAME}}',
                    dotted(path),
                )
                yield path, message


def _unreachable_routes(settings: Settings) -> Iterator[Finding]:
    for index, route in enumerate(settings.models):
        first = next((n for n in range(index) if covers(settings.models[n].match, route.match)), None)
        if first is not None:
            yield (
                ("models", index, "match"),
                said(
                    f"never reached, because models[{first}] ('{shown(settings.models[first].match)}') comes first",
                    f"move this route before models[{first}], or remove it",
                    f"models[{index}].match",
                ),
            )


def _unknown_windows(settings: Settings) -> Iterator[Finding]:
    """Find models that routes name in full and whose context window neither the file nor a table has."""
    profiles: Profiles | None = None
    for index, route in enumerate(settings.models):
        model = route.model or route.match
        upstream = settings.upstreams.get(route.upstream)
        stated = route.profile is not None and (route.profile.context_window or route.profile.max_input_tokens)
        if stated or upstream is None or set("*?[") & set(model):
            continue
        if profiles is None:
            profiles = Profiles()
            profiles.load()
        found = profiles.find(model, provider=upstream.provider, override=route.profile, address=upstream.base_url)
        if found.context_window is None and found.max_input_tokens is None:
            yield (
                ("models", index),
                said(
                    f"the context window of '{shown(model)}' is unknown unless the upstream reports it",
                    "add its size in tokens, as in profile: {context_window: 128000}",
                    f"models[{index}]",
                ),
            )


def _azure_versions(settings: Settings) -> Iterator[Finding]:
    for name, upstream in settings.upstreams.items():
        newer = (upstream.base_url or "").endswith("/v1")
        if upstream.provider == "azure" and upstream.api_version is None and not newer:
            problem = "Azure requires api_version with this base_url"
            fix = 'add api_version: "2024-10-21", or end base_url in /openai/v1'
            yield ("upstreams", name), said(problem, fix, f"upstreams.{name}")


def _keyless_teams(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        if not team.keys:
            fix = f"add the lines that this command prints: compaction-proxy keys new --team {name}"
            yield ("teams", name), said("no caller belongs to this team, because it lists no key", fix, f"teams.{name}")


def _large_keeps(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for name, own in written.policies.items():
        policy = settings.policies[name]
        places: list[tuple[Path, Policy, WrittenPolicy | ModelOverride]] = [(("policies", name), policy, own)]
        places += [
            (("policies", name, "models", index), policy.models[index].policy, over)
            for index, over in enumerate(own.models)
        ]
        for path, found, stated_here in places:
            key = next((key for key in ("keep", "trigger") if key in stated_here.model_fields_set), None)
            kind = next(kind for kind in KINDS if getattr(found.keep, kind) is not None)
            kept, bound = getattr(found.keep, kind), _lowest(found.trigger, kind)
            if key is not None and bound is not None and kept >= bound:
                yield (
                    (*path, key),
                    said(
                        f"{kept:g} ({kind}) isn't below the trigger's {bound:g}, so a compaction can keep all messages",
                        f"keep: {{{kind}: {_below(bound, 0.2)}}}",
                        dotted((*path, "keep")),
                    ),
                )


def _teams(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        if team.policy not in settings.policies:
            problem, fix = f"there is no policy '{team.policy}'", near(team.policy, settings.policies)
            yield ("teams", name, "policy"), said(problem, fix, f"teams.{name}.policy")


def _shared_keys(settings: Settings) -> Iterator[Finding]:
    owners: dict[str, str] = {}
    for name, team in settings.teams.items():
        for index, key in enumerate(team.keys):
            owner = owners.setdefault(key.hash, name)
            if owner != name:
                message = said(
                    f"team '{owner}' also has this key", "keep it in one team", f"teams.{name}.keys[{index}]"
                )
                yield ("teams", name, "keys", index), message


def _auth(settings: Settings) -> Iterator[Finding]:
    if settings.auth.mode != "keys":
        return
    if not any(team.keys for team in settings.teams.values()):
        fix = "add the lines that this command prints: compaction-proxy keys new --team NAME"
        yield ("auth", "mode"), said("every request is refused, because no team lists a key", fix, "auth.mode")
    # A configuration without upstreams gets one error, for the first default, instead of one for each.
    stated = len(settings.upstreams) if "upstreams" in settings.model_fields_set else 1
    for name, upstream in list(settings.upstreams.items())[:stated]:
        if not upstream.has_credential:
            message = said(
                "api_key is missing. With auth.mode 'keys' the proxy never forwards a caller's key",
                'add api_key: "${OPENAI_API_KEY}", or api_key: none for an upstream without keys',
                f"upstreams.{name}",
            )
            yield ("upstreams", name), message


def _any_origin(settings: Settings) -> Iterator[Finding]:
    if settings.auth.mode != "open" or "*" not in settings.server.cors_origins:
        return
    for name, upstream in settings.upstreams.items():
        if upstream.spends:
            problem = f"'*' lets any web page spend the key of upstreams.{name}, because auth.mode is open"
            fix = "cors_origins: [https://app.example], or auth: {mode: keys}"
            message = said(problem, fix, "server.cors_origins")
            yield ("server", "cors_origins"), message
            return


def _memory(settings: Settings) -> Iterator[Finding]:
    least = 2 * settings.server.body_limit
    if settings.server.body_memory < least:
        message = said(
            f"must be at least twice body_limit, {least:,} bytes, because a body may be compressed",
            f"max_body_memory: {least}, or a smaller body_limit",
            "server.max_body_memory",
        )
        yield ("server", "max_body_memory"), message


def _prepare(root: Mapping, written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for name, own in written.policies.items():
        policy, values = settings.policies[name], stated(root, name, written.policies)
        # If a policy states neither, the error belongs to its parent.
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
    """Return an error if a policy doesn't prepare before it compacts."""
    for kind in KINDS:
        begin, end = _lowest(policy.prepare, kind), _lowest(policy.trigger, kind)
        if begin is not None and end is not None and begin >= end:
            return said(
                f"{begin:g} ({kind}) must be below the trigger's {end:g}, so that the summary is ready in time",
                f"prepare: {{{kind}: {_below(end, 0.88)}}}, or a higher trigger",
                f"{where}.prepare",
            )
    return None


def _below(bound: float, share: float) -> str:
    """Return a figure of the same kind below a bound."""
    return f"{bound * share:.2g}" if bound <= 1 else str(max(1, int(bound * share)))


def _lowest(trigger: Trigger, kind: str) -> float | None:
    """Return the lowest bound of this kind among clauses without other parts."""
    bounds = []
    for clause in trigger:
        parts = {key: getattr(clause, key) for key in KINDS if getattr(clause, key) is not None}
        if parts.keys() == {kind}:
            bounds.append(parts[kind])
    return min(bounds, default=None)
