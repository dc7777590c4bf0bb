"""Warnings about settings that are valid but probably not intended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from proxy.compaction.triggers import lowest_level, with_step
from proxy.config.checks import Finding, below
from proxy.config.fields import condition_parts, lowest
from proxy.config.globs import covers, meet
from proxy.config.issues import Issue, issue
from proxy.config.models import RouteSettings
from proxy.config.policy import ModelOverride, Policy, Summary, WrittenPolicy
from proxy.config.settings import Settings, WrittenSettings
from proxy.config.tree import Node, Path, dotted, line_of, shown
from proxy.config.upstreams import COMPACTS
from proxy.limits.budget import budget, reserved_output
from proxy.limits.profiles import Profile, Profiles, tables
from proxy.limits.profiles.prices import below_step, price_of, provider_of, step_of

SHORTEST_RECALL = 200
"""Tokens of a result that has about one passage of a message."""

LARGE_PRICE = 0.01
"""US dollars per token or more that nobody charges. The highest price in LiteLLM's table is below 0.01."""

_TRANSCRIPTS = ("model", "prompt", "redact", "redact_secrets")
"""Settings of `summary` with which `method: auto` never continues."""


def likely_mistakes(root: Node, written: WrittenSettings, settings: Settings) -> list[Issue]:
    """Return the warnings in the order of the file."""
    findings = [
        *(_summary_models(written, settings) if settings.models else ()),
        *(_useless_globs(settings) if settings.models else ()),
        *_forbidden_summary_models(settings),
        *_unusable_native(written, settings),
        *_unreachable_routes(settings),
        *_unknown_windows(settings),
        *_price_steps(written, settings),
        *_azure_versions(settings),
        *_keyless_teams(settings),
        *_ineffective_sections(written, settings),
        *_uncounted_budgets(settings),
        *_large_prices(settings),
        *_ineffective_limits(settings),
        *_ineffective_times(settings),
    ]
    issues = [issue(line_of(root, path), problem, fix, dotted(path)) for path, problem, fix in findings]
    issues += _large_keeps(root, written, settings)
    return sorted(found._replace(message=f"warning: {found.message}") for found in issues)


def _summary_models(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    for name, own in written.policies.items():
        places: list[tuple[Path, Summary]] = [(("policies", name), own.summary)]
        places += [(("policies", name, "models", index), over.summary) for index, over in enumerate(own.models)]
        for above, summary in places:
            for key in ("model", "fallback_model"):
                model = getattr(summary, key)
                if model is not None and settings.route(model) is None:
                    problem = f"no route of 'models' matches '{shown(model)}', so it makes no summary"
                    fix = f'correct the name, or add a route: {{match: "{shown(model)}", upstream: NAME}}'
                    yield (*above, "summary", key), problem, fix


def _forbidden_summary_models(settings: Settings) -> Iterator[Finding]:
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
    overrides = [own.policy for own in whole.models if any(meet(own.match, glob) for glob in globs)]
    policies = [whole, *overrides] if policy is None else [policy]
    named = [model for one in policies for model in (one.summary.model, one.summary.fallback_model) if model]
    return [model for model in dict.fromkeys(named) if not any(fnmatchcase(model, glob) for glob in globs)]


def _unusable_native(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    """Find policies that ask for compaction by the provider, although no route of their models has it."""
    for name, own in written.policies.items():
        places: list[tuple[Path, Summary, str]] = [(("policies", name), own.summary, "*")]
        places += [
            (("policies", name, "models", index), over.summary, over.match) for index, over in enumerate(own.models)
        ]
        for above, summary, glob in places:
            met = [index for index, route in enumerate(settings.models) if summary.native and meet(glob, route.match)]
            if met and not _compacting(settings).intersection(met):
                problem = "no model of this policy has a provider that compacts, so the proxy makes all summaries"
                fix = "remove it, or set native_compaction: true in the model's profile"
                yield (*above, "summary", "native"), problem, fix


def _compacting(settings: Settings) -> set[int]:
    """Return the indexes of the routes whose providers compact conversations, or may do so."""
    named = {index: profile.native_compaction for index, _, profile in _named_models(settings)}
    found = set()
    for index, route in enumerate(settings.models):
        stated = None if route.profile is None else route.profile.native_compaction
        upstream = settings.upstreams.get(route.upstream)
        api = None if upstream is None else COMPACTS.get(upstream.provider)
        unlisted = api == "messages" and index in named and not named[index]
        if api is not None and stated is not False and not unlisted:
            found.add(index)
    return found


def _useless_globs(settings: Settings) -> Iterator[Finding]:
    for name, team in settings.teams.items():
        for index, glob in enumerate(team.models or ()):
            if not any(meet(glob, route.match) for route in settings.models):
                problem = f"no route of 'models' can match '{shown(glob)}', so it allows no model"
                fix = f'correct it, or add a route: {{match: "{shown(glob)}", upstream: NAME}}'
                yield ("teams", name, "models", index), problem, fix


def _unreachable_routes(settings: Settings) -> Iterator[Finding]:
    for index, route in enumerate(settings.models):
        first = next((n for n in range(index) if covers(settings.models[n].match, route.match)), None)
        if first is not None:
            match = shown(settings.models[first].match)
            problem = f"never reached, because models[{first}] ('{match}') comes first"
            yield ("models", index, "match"), problem, f"move this route before models[{first}], or remove it"


def _unknown_windows(settings: Settings) -> Iterator[Finding]:
    """Find models that routes name in full and whose context window neither the file nor a table has."""
    for index, _, found in _named_models(settings):
        if found.context_window is None and found.max_input_tokens is None:
            problem = f"the context window of '{shown(found.model)}' is unknown unless the upstream reports it"
            yield ("models", index), problem, "add its size in tokens, as in profile: {context_window: 128000}"


def _named_models(settings: Settings) -> Iterator[tuple[int, RouteSettings, Profile]]:
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
    for index, route, profile in _named_models(settings):
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


def _policies(
    written: WrittenSettings, settings: Settings
) -> Iterator[tuple[Path, Policy, WrittenPolicy | ModelOverride]]:
    """Yield the policies in the file and their overrides: the path, the policy in force, and the settings stated."""
    for name, own in written.policies.items():
        policy = settings.policies[name]
        yield ("policies", name), policy, own
        for index, over in enumerate(own.models):
            yield ("policies", name, "models", index), policy.models[index].policy, over


def _ineffective_sections(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    """Find sections that another setting of the policy turns off. It may be an inherited one."""
    for path, policy, stated in _policies(written, settings):
        recall, summary, own = policy.recall, policy.summary, stated.model_fields_set
        if recall.tool == "auto" and own & {"recall", "archive"} and policy.archive is None:
            problem = "has no effect without an archive, so no request gets the tool"
            yield (*path, "recall", "tool"), problem, "remove archive: null, or set recall: {tool: off}"
        elif recall.tool == "auto" and own & {"recall", "summary"} and summary.native:
            problem = "has no effect on /v1/responses and /v1/messages, because summary.native is true"
            yield (*path, "recall", "tool"), problem, "set summary: {native: false}, or recall: {tool: off}"
        if "recall" in own and recall.tool == "auto" and recall.max_tokens < SHORTEST_RECALL:
            problem = f"has no room for a passage of a message, which takes about {SHORTEST_RECALL} tokens"
            yield (*path, "recall", "max_tokens"), f"{problem} (got {recall.max_tokens})", "max_tokens: 4000"
        other = next((name for name in _TRANSCRIPTS if getattr(summary, name)), None)
        if "summary" in own and summary.method == "auto" and other is not None:
            problem = f"auto never continues, because summary.{other} applies to transcripts only"
            yield (*path, "summary", "method"), problem, f"remove summary.{other}, or set method: transcript"


def _uncounted_budgets(settings: Settings) -> Iterator[Finding]:
    """Find budgets in money of teams that may use models without a known price."""
    limited = {
        name: team.models
        for name, team in settings.teams.items()
        if team.limits is not None and team.limits.spend is not None and team.limits.spend.usd is not None
    }
    unpriced = list(_unpriced_routes(settings)) if limited else []
    for name, globs in limited.items():
        found = [match for match in unpriced if globs is None or any(meet(match, glob) for glob in globs)]
        if found:
            models = ", ".join(f"'{shown(match)}'" for match in found[:5])
            problem = f"counts nothing for {models}, because no price of these models is known"
            yield ("teams", name, "limits", "spend", "usd"), problem, "state prices, or a budget in tokens"


def _unpriced_routes(settings: Settings) -> Iterator[str]:
    """Yield the globs of routes whose models all have no price."""
    for _, route, profile in _named_models(settings):
        if price_of(settings.prices, profile.model, profile.price) is None:
            yield route.match
    listed = {provider_of(listing.provider) for listing in tables.load().values() if listing.price is not None}
    routes = settings.models or (RouteSettings(match="*", upstream=next(iter(settings.upstreams))),)
    for route in routes:
        upstream, named = settings.upstreams.get(route.upstream), route.model or route.match
        if upstream is None or not set("*?[") & set(named) or upstream.provider in listed:
            continue
        if not any(meet(named, glob) for glob in settings.prices):
            yield route.match


def _large_prices(settings: Settings) -> Iterator[Finding]:
    """Find prices for a million tokens, which the table states for one."""
    for model, fields in settings.prices.items():
        for name, value in fields.items():
            if isinstance(value, Mapping) or value < LARGE_PRICE:
                continue
            problem = f"means {value * 1e6:,.0f} US dollars for a million tokens, because prices are for one token"
            yield ("prices", model, name), problem, f"{name}: {value / 1e6:.12f}".rstrip("0")


def _ineffective_limits(settings: Settings) -> Iterator[Finding]:
    if settings.limits.on_store_failure == "refuse" and settings.store.kind != "redis":
        problem = "has no effect without a store on Redis, because each process counts its own requests"
        yield ("limits", "on_store_failure"), problem, "remove it, or set store: {url: redis://HOST}"


def _ineffective_times(settings: Settings) -> Iterator[Finding]:
    server, metrics = settings.server, settings.metrics.address
    if server.keepalive >= server.deadline:
        problem = f"isn't below server.deadline ({server.deadline:g}), so no heartbeat is sent"
        yield (
            ("server", "keepalive"),
            f"{problem} (got {server.keepalive:g})",
            f"keepalive: {min(10, server.deadline / 2):g}",
        )
    if metrics is not None and metrics[1] == server.port and _overlap(metrics[0], server.host):
        problem = f"is the server's own address, port {server.port}, so the proxy can't start"
        yield ("metrics", "listen"), problem, "use another port, as in listen: 127.0.0.1:9090, or remove it"


def _overlap(one: str, other: str) -> bool:
    """Return whether two listeners on the same port would conflict."""
    names = {"localhost": "127.0.0.1"}
    everywhere = any(set(address) <= {*"0.:"} for address in (one, other))
    return everywhere or names.get(one, one) == names.get(other, other)


def _large_keeps(root: Node, written: WrittenSettings, settings: Settings) -> Iterator[Issue]:
    for path, found, stated_here in _policies(written, settings):
        key = next((key for key in ("keep", "trigger") if key in stated_here.model_fields_set), None)
        ((kind, kept),) = condition_parts(found.keep).items()
        bound = lowest(found.trigger, kind)
        if key is not None and bound is not None and kept >= bound:
            problem = f"{kept:g} ({kind}) isn't below the trigger's {bound:g}, so a compaction can keep all messages"
            fix = f"keep: {{{kind}: {below(bound, 0.2)}}}"
            yield issue(line_of(root, (*path, key)), problem, fix, dotted((*path, "keep")))
