"""Resolve policies that extend others, and list the settings in force with their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import yaml

from proxy.config.fields import Section
from proxy.config.issues import Issue, Issues, issue, near
from proxy.config.policy import ForModels, ModelOverride, Policy, WrittenPolicy, complete, stages
from proxy.config.tree import Node, empty, find, line_of, plain


def _is_section(annotation: object) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, Section) for kind in (annotation, *get_args(annotation)))


@cache
def _merging() -> frozenset[str]:
    """Return the sections, which merge with the parent's. Every other setting (a trigger, a list) replaces it."""
    fields = complete(ModelOverride).model_fields
    return frozenset(name for name, field in fields.items() if _is_section(field.annotation))


def effective(root: Node, written: Mapping[str, WrittenPolicy]) -> dict[str, Policy]:
    """Return every policy in force, ``default`` first. Raises ``Issues`` for unknown or circular parents."""
    issues = [*_unknown_parents(root, written), *_circles(root, written)]
    if issues:
        raise Issues(issues)
    names = ["default", *(name for name in written if name != "default")]
    return {name: _policy(name, stated(root, name, written)) for name in names}


def stated(root: Node, name: str, written: Mapping[str, WrittenPolicy]) -> Node:
    """Return the settings of a policy and its parents, as nodes with their lines."""
    if name not in written:
        return empty(root.line)
    own, parent = root.settings["policies"].settings[name], written[name].extends
    if parent is None:
        return own
    above = stated(root, parent, written)
    merged = _merged(above, own, _merging())
    if "models" in above.settings and "models" in own.settings:
        models = own.settings["models"]
        merged.settings["models"] = replace(models, value=[*models.items, *above.settings["models"].items])
    return merged


def overrides(policy: Node) -> list[tuple[str, Node]]:
    """Return the globs of a policy's overrides, each with all settings for these models, as nodes."""
    base = _without(policy, "models")
    entries = policy.settings.get("models", empty(0)).items
    return [
        (str(entry.settings["match"].value), _merged(base, _without(entry, "match"), _merging())) for entry in entries
    ]


def _policy(name: str, stated: Node) -> Policy:
    policy = _built(name, stated)
    own = tuple(ForModels(match=match, policy=_built(name, values)) for match, values in overrides(stated))
    return policy.model_copy(update={"models": own}) if own else policy


def _built(name: str, stated: Node) -> Policy:
    return Policy.build(
        name, {key: plain(node) for key, node in _without(stated, "extends", "models").settings.items()}
    )


def _without(node: Node, *keys: str) -> Node:
    return replace(node, value={key: value for key, value in node.settings.items() if key not in keys})


def _merged(base: Node, over: Node, deep: frozenset[str]) -> Node:
    """Return the settings of ``over`` added to those of ``base``. The sections in ``deep`` are merged likewise."""
    merged = dict(base.settings)
    for key, node in over.settings.items():
        known = merged.get(key)
        is_section = known is not None and isinstance(known.value, dict) and isinstance(node.value, dict)
        merged[key] = _merged(known, node, frozenset()) if known and is_section and key in deep else node
    return replace(over, value=merged)


def _unknown_parents(root: Node, written: Mapping[str, WrittenPolicy]) -> list[Issue]:
    known = {"default", *written}
    return [
        _issue(root, name, f"there is no policy '{policy.extends}'", near(policy.extends, known))
        for name, policy in written.items()
        if policy.extends is not None and policy.extends not in known
    ]


def _circles(root: Node, written: Mapping[str, WrittenPolicy]) -> list[Issue]:
    issues = []
    seen: set[str] = set()
    for name in written:
        chain: list[str] = []
        current: str | None = name
        while current is not None and current in written and current not in seen:
            seen.add(current)
            chain.append(current)
            current = written[current].extends
        if current is not None and current in chain:
            circle = " → ".join([*chain[chain.index(current) :], current])
            issues.append(_issue(root, current, f"goes in a circle ({circle})", "remove one extends"))
    return issues


def _issue(root: Node, name: str, problem: str, fix: str) -> Issue:
    return issue(line_of(root, ("policies", name, "extends")), problem, fix, f"policies.{name}.extends")


Row = tuple[str, str, str]


def effective_values(policy: Policy, values: Node, place: Callable[[int], str]) -> Iterator[Row]:
    """Return each setting of a policy, its value, and its source: a file and line, or another setting.

    ``values`` contains the settings in the files. ``place`` returns the file and line of a line number.
    """
    for name, value in policy.model_dump(mode="json", exclude={"name", "models"}).items():
        is_section = isinstance(value, dict) and isinstance(getattr(policy, name), Section)
        paths = {(name, key): inner for key, inner in value.items()} if is_section else {(name,): value}
        for path, inner in paths.items():
            yield ".".join(path), _text(inner), _origin(path, values, policy, place)


def _origin(path: tuple[str, ...], values: Node, policy: Policy, place: Callable[[int], str]) -> str:
    node, found = find(values, path)
    if path == ("prepare",) and (found != path or not policy.trigger):
        return "follows from trigger" if "trigger" in values.settings else "default"
    if found == path:
        return place(node.line)
    if path[0] in stages() and path[-1] in ("trigger", "keep") and path[-1] in values.settings:
        return f"follows from {path[-1]}"
    return "default"


def _text(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()
