"""Replace old images, audio, and files with a label."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
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

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        return MediaStage(self, format, archive=archive)

    def is_costly(self, facts: Facts) -> bool:
        return bool(facts.media)


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
            raw = labeled(turn.raw, turn, self._format, archive=self._archive)
            forms[key] = turn.rewritten(raw, self._format)
        return forms[key]


def labeled(
    raw: bytes, turn: Turn, format: Format, *, archive: bool, most: int = sys.maxsize, kinds: Container[str] = ()
) -> bytes:
    """Return a form of a message with labels for its first ``most`` media of these kinds (empty: of any)."""
    kept, left = kept_as(turn, archive=archive), most

    def label(kind: str) -> str | None:
        nonlocal left
        if not left or (kinds and kind not in kinds):
            return None
        left -= 1
        return _LABEL.replace("{kind}", kind).replace("{kept}", kept)

    return format.with_labels(raw, label)
