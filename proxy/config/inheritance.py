"""Resolve policies that extend others."""

from __future__ import annotations

from collections.abc import Mapping as ByName

from proxy.config.faults import Issue, Issues, near, said
from proxy.config.policy import ForModels, Policy, WrittenPolicy
from proxy.config.tree import Mapping, Node, Path, Sequence, find, plain

# Sections that merge with the parent's section. Every other setting (a trigger, a list) replaces the parent's.
_MERGED = ("summary", "truncate_args", "evict_results", "user_messages", "index", "unknown_model")
_OVERRIDES = "models"


def effective(root: Mapping, written: ByName[str, WrittenPolicy]) -> dict[str, Policy]:
    """Return every policy in force, ``default`` first. Raises ``Issues`` for unknown or circular parents."""
    faults = [*_unknown_parents(root, written), *_circles(root, written)]
    if faults:
        raise Issues(faults)
    names = ["default", *(name for name in written if name != "default")]
    return {name: _policy(name, stated(root, name, written)) for name in names}


def stated(root: Mapping, name: str, written: ByName[str, WrittenPolicy]) -> Mapping:
    """Return the settings of a policy and its parents, as nodes with their lines."""
    if name not in written:
        return Mapping(root.line)
    own, _, _ = find(root, ("policies", name))
    assert isinstance(own, Mapping)  # noqa: S101 - the file has been checked
    parent = written[name].extends
    return own if parent is None else _extended(stated(root, parent, written), own)


def overrides(policy: Mapping) -> list[tuple[str, Mapping]]:
    """Return the globs of a policy's overrides, each with all settings for these models, as nodes."""
    base = _without(policy, _OVERRIDES)
    found = []
    models = policy.items.get(_OVERRIDES)
    for entry in models.items if isinstance(models, Sequence) else ():
        assert isinstance(entry, Mapping)  # noqa: S101 - the file has been checked
        found.append((str(plain(entry.items["match"])), _merged(base, _without(entry, "match"), _MERGED)))
    return found


def _policy(name: str, stated: Mapping) -> Policy:
    policy = Policy.build(name, _values(stated))
    own = tuple(
        ForModels(match=match, policy=Policy.build(name, _values(values))) for match, values in overrides(stated)
    )
    return policy.model_copy(update={_OVERRIDES: own}) if own else policy


def _extended(parent: Mapping, own: Mapping) -> Mapping:
    """Return a policy's settings merged over its parent's. Its own overrides for models come first."""
    merged = _merged(parent, own, _MERGED)
    above, below = parent.items.get(_OVERRIDES), own.items.get(_OVERRIDES)
    if isinstance(above, Sequence) and isinstance(below, Sequence):
        merged.items[_OVERRIDES] = Sequence(below.line, (*below.items, *above.items))
    return merged


def _without(node: Mapping, key: str) -> Mapping:
    return Mapping(node.line, {name: value for name, value in node.items.items() if name != key}, node.lines)


def _merged(base: Mapping, over: Mapping, deep: tuple[str, ...]) -> Mapping:
    items = dict(base.items)
    for key, value in over.items.items():
        items[key] = _over(items.get(key), value) if key in deep else value
    return Mapping(over.line, items, base.lines | over.lines)


def _over(base: Node | None, over: Node) -> Node:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return _merged(base, over, ())
    return over


def _values(node: Mapping) -> dict[str, object]:
    return {key: plain(value) for key, value in node.items.items() if key not in ("extends", _OVERRIDES)}


def _line(root: Mapping, name: str) -> int:
    path: Path = ("policies", name, "extends")
    return find(root, path)[1]


def _unknown_parents(root: Mapping, written: ByName[str, WrittenPolicy]) -> list[Issue]:
    known = {"default", *written}
    return [
        Issue(
            _line(root, name),
            said(f"there is no policy '{policy.extends}'", near(policy.extends, known), f"policies.{name}.extends"),
        )
        for name, policy in written.items()
        if policy.extends is not None and policy.extends not in known
    ]


def _circles(root: Mapping, written: ByName[str, WrittenPolicy]) -> list[Issue]:
    faults = []
    seen: set[str] = set()
    for name in written:
        way: list[str] = []
        current: str | None = name
        while current is not None and current in written and current not in seen:
            seen.add(current)
            way.append(current)
            current = written[current].extends
        if current is not None and current in way:
            circle = [*way[way.index(current) :], current]
            message = said(
                f"goes in a circle ({' → '.join(circle)})", "remove one extends", f"policies.{current}.extends"
            )
            faults.append(Issue(_line(root, current), message))
    return faults
