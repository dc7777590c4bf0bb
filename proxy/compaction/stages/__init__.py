"""The cheap stages, in the order in which the planner tries them.

A stage is a module with a ``NAME`` and a function ``stage`` that creates a ``Stage`` from the policy's rules. To add a
stage, add its module and list it in ``MODULES``.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.format import Format
from proxy.compaction.rules import Rules
from proxy.compaction.stages import arguments, duplicates, media, results
from proxy.compaction.stages.stage import Stage
from proxy.compaction.turn import Turn

MODULES = (duplicates, arguments, results, media)

NAMES = tuple(module.NAME for module in MODULES)
"""The names of all stages, in order."""


def cheap_stages(rules: Rules, body: Sequence[Turn], format: Format) -> list[Stage]:
    """Return the stages that the policy enables, cheapest first."""
    made: list[Stage | None] = [module.stage(rules, body, format) for module in MODULES]
    return [stage for stage in made if stage is not None]
