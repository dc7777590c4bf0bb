"""List the settings in force of a policy, with the file and line that set each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from proxy.config.fields import Section
from proxy.config.policy import Policy, stages
from proxy.config.tree import Node, find

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
