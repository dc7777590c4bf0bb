"""Replace old images, audio, and files with a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from proxy.compaction.format import Format
from proxy.compaction.stages.stage import Stage, StageRules, kept_as
from proxy.compaction.turn import Facts, Turn

NAME = "media"

_LABEL = "[The compaction proxy left out an old part of this message here: {kind}.{kept}]"


@dataclass(frozen=True, slots=True)
class MediaRules(StageRules):
    """Replace old images, audio, and files with labels. The user's newest message doesn't change."""

    SECTION: ClassVar[str] = NAME
    ABOUT: ClassVar[str] = "Replace old images, audio, and files; null turns this off."

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        return MediaStage(self, format, archive=archive)

    def is_costly(self, facts: Facts) -> bool:
        return facts.media


class MediaStage(Stage):
    """The stage with the rules of a policy, or with those of the fit ladder."""

    name = NAME
    spares_newest_user = True

    def __init__(self, rules: MediaRules, format: Format, *, archive: bool) -> None:
        super().__init__(rules)
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
