"""Differences between LiteLLM's table of models and the proxy's corrections."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from proxy.limits.profiles import litellm_table
from proxy.limits.profiles.corrections import limit_rule
from proxy.limits.profiles.lookup import Profiles
from proxy.limits.profiles.names import undated

Field = Literal["max_input_tokens", "max_output_tokens"]
FIELDS: tuple[Field, ...] = ("max_input_tokens", "max_output_tokens")


class Difference(NamedTuple):
    """One field of an entry in LiteLLM's table, in tokens. ``None`` means that a table has no figure.

    ``holds`` is the figure in force: the smaller one.
    """

    model: str
    field: Field
    theirs: int | None
    ours: int
    holds: int | None
    rule: str
    reason: str


def differences(names: Collection[str] = ()) -> Iterator[Difference]:
    """Return the differences, for all models or for ``names``, with or without their provider.

    Raises ``ConfigurationError`` if the table can't be read.
    """
    profiles = Profiles()
    for model, listing in sorted(litellm_table.load().items()):
        if names and not {model, model.rpartition("/")[2]} & set(names):
            continue
        rule = limit_rule(undated(model))
        for field in FIELDS:
            theirs, ours = getattr(listing, field), getattr(rule, field)
            if ours is not None and ours != theirs:
                holds = getattr(profiles.find(model), field)
                yield Difference(model, field, theirs, ours, holds, rule.name, rule.reason)
