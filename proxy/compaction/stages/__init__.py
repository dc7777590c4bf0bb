"""The cheap stages, in the order in which the planner tries them.

A stage is a module with its settings (``StageRules``) and its ``Stage``. To add one, add its module and list its
settings in ``STAGES``.
"""

from __future__ import annotations

from proxy.compaction.stages.duplicates import DuplicateRules
from proxy.compaction.stages.evict_results import ResultRules
from proxy.compaction.stages.media import MediaRules
from proxy.compaction.stages.stage import StageRules
from proxy.compaction.stages.truncate_args import ArgumentRules

STAGES: tuple[type[StageRules], ...] = (DuplicateRules, ArgumentRules, ResultRules, MediaRules)

NAMES = tuple(stage.SECTION for stage in STAGES)  # the names of all stages, in order
