"""The cheap stages, in the order in which they are tried.

A stage is a module with ``NAME`` and a ``stage`` that makes a ``Stage`` of the policy's rules; adding one means adding
its file and one line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.message import MessageCounter, Turn
from proxy.compaction.rules import Rules
from proxy.compaction.stages import arguments, duplicates, media, results
from proxy.compaction.stages.stage import Stage

MODULES = (duplicates, arguments, results, media)

NAMES = tuple(module.NAME for module in MODULES)
"""The names of all stages, in their order."""


def cheap_stages(rules: Rules, body: Sequence[Turn], count: MessageCounter) -> list[Stage]:
    """The stages that the policy has not switched off, cheapest first."""
    made: list[Stage | None] = [module.stage(rules, body, count) for module in MODULES]
    return [stage for stage in made if stage is not None]
