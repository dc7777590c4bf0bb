"""The cheap stages: rewrites of single messages that need no model, in the order in which they are tried.

A stage is a module with ``NAME`` and a ``reduce``; adding one means adding its file and one line here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.compaction.conditions import Clause, Trigger
from proxy.compaction.message import Form, MessageCounter, Turn
from proxy.compaction.rules import Rules
from proxy.compaction.stages import arguments, results


class Reduce(Protocol):
    """What a stage makes of the message at ``index``: a smaller form, or ``None`` where it leaves it."""

    def __call__(self, body: Sequence[Turn], index: int, count: MessageCounter) -> Form | None: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage under the rules of a policy."""

    name: str
    trigger: Trigger
    keep: Clause
    reduce: Reduce


def cheap_stages(rules: Rules, body: Sequence[Turn]) -> list[Stage]:
    """The stages that the policy has not switched off, cheapest first."""
    stages = []
    if rules.arguments is not None:
        part = rules.arguments
        stages.append(Stage(arguments.NAME, part.trigger, part.keep, arguments.stage(part)))
    if rules.results is not None:
        part_ = rules.results
        stages.append(Stage(results.NAME, part_.trigger, part_.keep, results.stage(part_, body)))
    return stages
