"""Replace old images, audio, and files with a label."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.compaction.format import Format
from proxy.compaction.rules import MediaRules, Rules
from proxy.compaction.stages.stage import NO_LATER, kept_as
from proxy.compaction.triggers import Clause, Trigger
from proxy.compaction.turn import Turn

NAME = "media"

_LABEL = "[The compaction proxy left out an old part of this message here: {kind}.{kept}]"


class MediaStage:
    """The stage with the rules of a policy, or with those of the fit ladder."""

    name = NAME
    spares_newest_user = True

    def __init__(self, rules: MediaRules, format: Format, *, archive: bool) -> None:
        self.trigger: Trigger = rules.trigger
        self.keep: Clause = rules.keep
        self._format = format
        self._archive = archive

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        if not turn.facts.media:
            return None
        forms = turn.facts.forms
        key = (NAME, self._archive)
        if key not in forms:
            kept = kept_as(turn, archive=self._archive)
            raw = self._format.with_labels(
                turn.raw, lambda kind: _LABEL.replace("{kind}", kind).replace("{kept}", kept)
            )
            forms[key] = turn.rewritten(raw, self._format)
        return forms[key]

    def later(self) -> dict[int, int]:
        return NO_LATER


def stage(rules: Rules, body: Sequence[Turn], format: Format) -> MediaStage | None:
    """Create the stage; return ``None`` if the policy disables it."""
    return None if rules.media is None else MediaStage(rules.media, format, archive=rules.archive)
