"""The sections of a policy, each declared next to its feature, and checks of several sections together.

To add a section, declare it in the module of its feature and list it here. `config` imports this module by name when it
first builds the model of a policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from proxy.compaction.settings import IndexRules, UserMessageRules
from proxy.compaction.stages import STAGES
from proxy.config.checks import Finding, policies_of
from proxy.config.policy import ARCHIVE, UNKNOWN_MODEL, ArchiveSettings
from proxy.config.sections import PolicySection, engine_section
from proxy.config.settings import Settings, WrittenSettings
from proxy.dialects.responses import state
from proxy.recall import tool
from proxy.recall.tool import RecallSettings
from proxy.summary import settings as summary


def _ineffective_recall(written: WrittenSettings, settings: Settings) -> Iterator[Finding]:
    """Find tools for the archive that another section of the policy turns off. It may be an inherited one."""
    for path, policy, stated in policies_of(written, settings):
        recall, own = policy.section(RecallSettings), stated.model_fields_set
        if recall.tool == "auto" and own & {"recall", "archive"} and policy.optional(ArchiveSettings) is None:
            problem = "has no effect without an archive, so no request gets the tool"
            yield (*path, "recall", "tool"), problem, "remove archive: null, or set recall: {tool: off}"


SECTIONS: tuple[PolicySection[Any], ...] = (
    state.SECTION,
    summary.SECTION,
    *map(engine_section, STAGES),
    replace(ARCHIVE, warnings=_ineffective_recall),
    tool.SECTION,
    engine_section(UserMessageRules),
    engine_section(IndexRules),
    UNKNOWN_MODEL,
)
"""All sections, in the order of a policy."""
