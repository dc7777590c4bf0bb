"""Checks across sections: settings that are valid alone but not together, and warnings.

Warnings are about settings that are valid but probably not intended. Some depend on more than the file: on the day, and
on the address that the proxy listens on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from proxy.compaction.settings import lowest_level, with_step
from proxy.config.document import Issue, Node, Path, dotted, error_text, issue, line_of, near, shown
from proxy.config.fields import KINDS, condition_parts, lowest
from proxy.config.policy import ModelOverride, Policy, WrittenPolicy
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.upstreams import SPEAKS_OPENAI, RouteSettings, resolve_transport
from proxy.errors import ConfigurationError
from proxy.http.headers import LOOPBACK
from proxy.limits import tables
from proxy.limits.budget import budget, reserved_output
from proxy.limits.prices import below_step, price_of, provider_of, step_of
from proxy.limits.profiles import Profile, Profiles, spelling
from proxy.litellm_package import providers

if TYPE_CHECKING:
    from proxy.config.loading import Loaded

LEAST_CACHE = 16_000_000
"""The least bytes of ``server.cache_memory``. A conversation of a million tokens has several megabytes."""

SHORTEST_RECALL = 200  # tokens of a result of the tool for the archive that has about one passage of a message
Finding = tuple[Path, str, str]  # the path of a setting, the problem, and its fix


def cross_check(root: Node, written: WrittenSettings, settings: Settings) -> list[Issue]:
    findings = [
        *_routes(settings),
        *_unknown_providers(settings),
        *_teams(settings),
        *_shared_keys(settings),
        *_auth(settings),
        *_any_origin(settings),
        *_memory(settings),
        *_redaction(written, settings),
    ]
    return sorted([*_issues(root, findings), *_missing_addresses(root, settings), *_prepare(root, written, settings)])


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
        if upstream.provider not in providers():
            hint = near(upstream.provider, providers() | SPEAKS_OPENAI.keys())
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
    if settings.server.cache_memory < LEAST_CACHE:
        problem = f"must be at least {LEAST_CACHE:,} bytes, or a conversation's own messages displace each other"
        yield ("server", "cache_memory"), problem, "cache_memory: 256MB"


def _prepare(root: Node, written: WrittenSettings, settings: Settings) -> Iterator[Issue]:
    """Find policies that don't prepare a summary before they compact."""
    for path, policy, own in policies_of(written, settings):
        # If a policy states neither, the error belongs to its parent. If it does, inherited overrides are checked here.
        key = next((key for key in ("prepare", "trigger") if key in own.model_fields_set), None)
        if key is None:
            continue
        inherited = policy.models[len(own.models) :] if isinstance(own, WrittenPolicy) else ()
        for where, found in [("", policy), *((f".models ({over.match})", over.policy) for over in inherited)]:
            for kind in KINDS:
                begin, end = lowest(found.prepare, kind), lowest(found.trigger, kind)
                if begin is not None and end is not None and begin >= end:
                    problem = f"{begin:g} ({kind}) must be below the trigger's {end:g}, "
                    problem += "so that the summary is ready in time"
                    fix = f"prepare: {{{kind}: {below(end, 0.88)}}}, or a higher trigger"
                    yield issue(line_of(root, (*path, key)), problem, fix, f"{dotted(path)}{where}.prepare")
                    break


def below(bound: float, share: float) -> str:
    return f"{bound * share:.2g}" if bound <= 1 else str(max(1, int(bound * share)))


LARGE_PRICE = 0.01
"""US dollars per token or more that nobody charges. The highest price in LiteLLM's table is below 0.01."""


def likely_mistakes(root: Node, written: WrittenSettings, settings: Settings) -> list[Issue]:
    findings = [
        *_unknown_windows(settings),
        *_price_steps(written, settings),
        *_azure_versions(settings),
        *_keyless_teams(settings),
        *(_unrouted(written, settings) if settings.models else ()),
        *_forbidden(settings),
        *_recall(written, settings),
        *_uncounted_spending(settings),
        *_estimated_streams(settings),
        *_large_prices(settings),
        *_ineffective(settings),
    ]
    issues = [*_issues(root, findings), *_large_keeps(root, written, settings)]
    return sorted(found._replace(message=f"warning: {found.message}") for found in issues)


def _issues(root: Node, findings: Iterable[Finding]) -> list[Issue]:
    return [issue(line_of(root, path), problem, fix, dotted(path)) for path, problem, fix in findings]


def overlap(one: str, other: str) -> bool:
    """Return whether one glob matches the other as a text. That's so if they're nested, not if they only overlap."""
    return fnmatchcase(one, other) or fnmatchcase(other, one)


def _unknown_windows(settings: Settings) -> Iterator[Finding]:
    """Find models that routes name in full and whose context window neither the file nor a table has."""
    for index, _, found in named_models(settings):
        if found.context_window is None and found.max_input_tokens is None:
            problem = f"the context window of '{shown(found.model)}' is unknown unless the upstream reports it"
            yield ("models", index), problem, "add its size in tokens, as in profile: {context_window: 128000}"


def named_models(settings: Settings) -> Iterator[tuple[int, RouteSettings, Profile]]:
    """Yield the routes that name their model in full, with their index and the model's profile."""
    profiles: Profiles | None = None
    for index, route in enumerate(settings.models):
        model = route.model or route.match
        upstream = settings.upstreams.get(route.upstream)
        if upstream is None or set("*?[") & set(model):
            continue
        if profiles is None:
            profiles = Profiles()
            profiles.load()
        found = profiles.find(model, provider=upstream.provider, override=route.profile, address=upstream.base_url)
        yield index, route, replace(found, model=model)


def _price_steps(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    """Find triggers above the size over which a model costs more."""
    for index, route, profile in named_models(settings):
        price = price_of(settings.prices, profile.model, profile.price)
        step = step_of(price)
        for name in written.policies or ("default",) if step is not None else ():
            policy = settings.policies[name].for_model(route.match)
            room = budget(profile, reserved_output(profile, None, policy.reserve_output), None)
            level = lowest_level(with_step(policy.trigger, below_step(price)), room)
            if level is None or step is None or level <= step:
                continue
            stated = name in written.policies and "trigger" in written.policies[name].model_fields_set
            path: Path = ("policies", name, "trigger") if stated else ("models", index)
            problem = f"'{shown(profile.model)}' costs more over {step:,} tokens, but '{name}' compacts at {level:,}"
            yield path, problem, "add a condition, as in trigger: [{price_step: true}, {fraction: 0.85}]"


def _azure_versions(settings: Settings) -> Iterator[Finding]:
    for name, upstream in settings.upstreams.items():
        is_newer = (upstream.base_url or "").endswith("/v1")
        if upstream.provider == "azure" and upstream.api_version is None and not is_newer:
            fix = 'add api_version: "2024-10-21", or end base_url in /openai/v1'
            yield ("upstreams", name), "Azure requires api_version with this base_url", fix


def _keyless_teams(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        if not team.keys:
            fix = f"add the lines that this command prints: compaction-proxy keys new --team {name}"
            yield ("teams", name), "no caller belongs to this team, because it lists no key", fix


def policies_of(
    written: WrittenSettings, settings: Settings
) -> Iterator[tuple[Path, Policy, WrittenPolicy | ModelOverride]]:
    """Yield the policies in the file and their overrides: the path, the policy in force, and the settings stated."""
    for name, own in written.policies.items():
        policy = settings.policies[name]
        yield ("policies", name), policy, own
        for index, over in enumerate(own.models):
            yield ("policies", name, "models", index), policy.models[index].policy, over


def _redaction(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for path, policy, _ in policies_of(written, settings):
        if policy.summary.method == "continue" and policy.summary.redacts:
            problem = "continue sends the conversation as it is, so redact and redact_secrets have no effect"
            yield (*path, "summary", "method"), problem, "method: transcript, or no redaction"


def _unrouted(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    """Find models for summaries that no route has."""
    for path, _, stated in policies_of(written, settings):
        for key in ("model", "fallback_model"):
            model: str | None = getattr(stated.summary, key)
            if model is not None and settings.route(model) is None:
                problem = f"no route of 'models' matches '{shown(model)}', so it makes no summary"
                fix = f'correct the name, or add a route: {{match: "{shown(model)}", upstream: NAME}}'
                yield (*path, "summary", key), problem, fix


def _forbidden(settings: Settings) -> Iterator[Finding]:
    """Find teams whose policy names a model for summaries that they may not use."""
    for name, team in settings.teams.items():
        for model in forbidden_summary_models(settings, name):
            if (route := settings.route(model)) is None:
                continue
            problem = (
                f"policy '{team.policy}' names '{shown(model)}' at upstream '{route.upstream}' for summaries, which "
                f"team '{name}' may not use, so the proxy doesn't send this model the team's conversations"
            )
            yield (
                ("teams", name, "models"),
                problem,
                f'add "{shown(model)}", or give the team a policy with another one',
            )


def forbidden_summary_models(settings: Settings, team: str, policy: Policy | None = None) -> list[str]:
    """Return the models that a team's policy names for summaries and that the team may not use.

    ``policy`` is the one for a model; without it, all that may apply to the team's models count.
    """
    globs = settings.teams[team].models
    if not globs:
        return []
    whole = settings.policies[settings.teams[team].policy]
    overrides = [own.policy for own in whole.models if any(overlap(own.match, glob) for glob in globs)]
    policies = [whole, *overrides] if policy is None else [policy]
    named = [model for one in policies for model in one.summary.models]
    return [model for model in dict.fromkeys(named) if not any(fnmatchcase(model, glob) for glob in globs)]


def _recall(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    """Find tools for the archive that can't return anything. An inherited section may turn the archive off."""
    for path, policy, stated in policies_of(written, settings):
        recall, own = policy.recall, stated.model_fields_set
        if recall.tool != "auto":
            continue
        if own & {"recall", "archive"} and policy.archive is None:
            problem = "has no effect without an archive, so no request gets the tool"
            yield (*path, "recall", "tool"), problem, "remove archive: null, or set recall: {tool: off}"
        if "recall" in own and recall.max_tokens < SHORTEST_RECALL:
            problem = f"has no room for a passage of a message, which takes about {SHORTEST_RECALL} tokens"
            yield (*path, "recall", "max_tokens"), f"{problem} (got {recall.max_tokens})", "max_tokens: 4000"


def _uncounted_spending(settings: Settings) -> Iterator[Finding]:
    """Find spending limits in US dollars of teams that may use models without a known price."""
    limited = {
        name: team.models
        for name, team in settings.teams.items()
        if team.limits is not None and team.limits.spend is not None and team.limits.spend.usd is not None
    }
    unpriced = list(_unpriced_routes(settings)) if limited else []
    for name, globs in limited.items():
        found = [match for match in unpriced if globs is None or any(overlap(match, glob) for glob in globs)]
        if found:
            models = ", ".join(f"'{shown(match)}'" for match in found[:5])
            problem = f"refuses {models}, because no price of these models is known"
            fix = f"prices: {{{found[0]}: {{input_cost_per_token: 0.000001, output_cost_per_token: 0.000004}}}}"
            yield ("teams", name, "limits", "spend", "usd"), problem, f"{fix}, or a budget in tokens"


def _estimated_streams(settings: Settings) -> Iterator[Finding]:
    """Find teams without a budget whose policy leaves their requests alone, although the file states prices."""
    for name, team in settings.teams.items():
        spend = None if team.limits is None else team.limits.spend
        if settings.prices and spend is None and settings.policies[team.policy].mode == "off":
            problem = "the prices of this team's streams of chat completions are estimates, because with mode: off the "
            problem += "proxy doesn't ask for their usage"
            yield ("teams", name), problem, "give the team a policy with mode: shadow, or a budget"


def _unpriced_routes(settings: Settings) -> Iterator[str]:
    """Yield the globs of routes whose models all have no price, as far as the table lists them."""
    for _, route, profile in named_models(settings):
        if price_of(settings.prices, profile.model, profile.price) is None:
            yield route.match
    listed = defaultdict[str, set[str]](set)
    for name, listing in tables.load().items():
        provider, spelled = provider_of(listing.provider), spelling(name)
        if listing.price is not None:
            listed[provider] |= {name, spelled, f"{provider}/{spelled}", name.removeprefix(f"{provider}/")}
    routes = settings.models or (RouteSettings(match="*", upstream=next(iter(settings.upstreams))),)
    for route in routes:
        upstream, named = settings.upstreams.get(route.upstream), route.model or route.match
        known = () if upstream is None else listed[upstream.provider]
        if upstream is None or not set("*?[") & set(named) or any(fnmatchcase(name, named) for name in known):
            continue
        if not any(overlap(named, glob) for glob in settings.prices):
            yield route.match


def _large_prices(settings: Settings) -> Iterator[Finding]:
    """Find prices for a million tokens, which the table states for one."""
    for model, fields in settings.prices.items():
        for name, value in fields.items():
            if isinstance(value, Mapping) or value < LARGE_PRICE:
                continue
            problem = f"means {value * 1e6:,.0f} US dollars for a million tokens, because prices are for one token"
            yield ("prices", model, name), problem, f"{name}: {value / 1e6:.12f}".rstrip("0")


def _ineffective(settings: Settings) -> Iterator[Finding]:
    server, metrics = settings.server, settings.metrics.address
    if settings.limits.on_store_failure == "refuse" and settings.store.kind != "redis":
        problem = "has no effect without a store on Redis, because each process counts its own requests"
        yield ("limits", "on_store_failure"), problem, "remove it, or set store: {url: redis://HOST}"
    if server.keepalive >= server.deadline:
        problem = f"isn't below server.deadline ({server.deadline:g}), so no heartbeat is sent"
        fix = f"keepalive: {min(10, server.deadline / 2):g}"
        yield ("server", "keepalive"), f"{problem} (got {server.keepalive:g})", fix
    if metrics is not None and metrics[1] == server.port:
        hosts = [{"localhost": "127.0.0.1"}.get(host, host) for host in (metrics[0], server.host)]
        # Two listeners conflict if one of them takes all addresses.
        if hosts[0] == hosts[1] or any(set(host) <= {*"0.:"} for host in hosts):
            problem = f"is the server's own address, port {server.port}, so the proxy can't start"
            yield ("metrics", "listen"), problem, "use another port, as in listen: 127.0.0.1:9090, or remove it"


def _large_keeps(root: Node, written: WrittenSettings, settings: Settings) -> Iterator[Issue]:
    for path, found, stated_here in policies_of(written, settings):
        key = next((key for key in ("keep", "trigger") if key in stated_here.model_fields_set), None)
        ((kind, kept),) = condition_parts(found.keep).items()
        bound = lowest(found.trigger, kind)
        if key is not None and bound is not None and kept >= bound:
            problem = f"{kept:g} ({kind}) isn't below the trigger's {bound:g}, so a compaction can keep all messages"
            fix = f"keep: {{{kind}: {below(bound, 0.2)}}}"
            yield issue(line_of(root, (*path, key)), problem, fix, dotted((*path, "keep")))


def advice(loaded: Loaded, today: date) -> list[str]:
    """Return a line for each expired key. ``today`` is the day in UTC."""
    expired = [
        (("teams", name, "keys", index), f"expired on {key.expires} (UTC) and is refused", "remove it")
        for name, team in loaded.settings.teams.items()
        for index, key in enumerate(team.keys)
        if key.expires is not None and key.expires <= today
    ]
    return _lines(expired, loaded)


def exposure(settings: Settings, loaded: Loaded | None) -> list[str]:
    """Return the warnings about listening on more than loopback.

    ``settings`` hold the effective host, which the command may override. ``loaded`` is the file they come from.
    """
    return _lines(_exposed(settings), loaded)


def _lines(findings: Iterable[Finding], loaded: Loaded | None) -> list[str]:
    texts = [(path, f"warning: {error_text(problem, fix, dotted(path))}") for path, problem, fix in findings]
    if loaded is None:
        return [text for _, text in texts]
    return loaded.sources.located(Issue(line_of(loaded.root, path), text) for path, text in texts)


def _exposed(settings: Settings) -> Iterator[Finding]:
    host = settings.server.host
    if host in LOOPBACK:
        return
    name = next((name for name, upstream in settings.upstreams.items() if upstream.spends), None)
    if settings.auth.mode == "open" and name is not None:
        problem = f"anyone who can reach {host} can spend the credentials of upstream '{name}'"
        yield ("auth", "mode"), problem, "auth: {mode: keys}, or publish the port to trusted callers only"
    if settings.store.kind != "memory" and settings.store.encryption.key is None:
        fix = (
            'store: {encryption: {key: "${COMPACTION_STORE_KEY}"}}. '
            "To store no originals, policies: {default: {archive: null}}"
        )
        problem = "the store holds the prompts of other machines' users unencrypted"
        yield ("store", "encryption", "key"), problem, fix
