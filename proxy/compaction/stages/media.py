"""Replace old images, audio, and files with a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.compaction.conditions import Clause, Trigger
from proxy.compaction.message import MessageCounter, Turn, decode, replace_field
from proxy.compaction.parts import MEDIA_LABELS, is_media_part, parts_of
from proxy.compaction.rules import MediaRules, Rules
from proxy.compaction.stages.stage import NO_LATER, kept_as

NAME = "media"

_LABEL = "[The compaction proxy left out an old part of this message here: {kind}.{kept}]"


class Media:
    """The stage with the rules of a policy, or with those of the fit ladder."""

    name = NAME
    spares_newest_user = True

    def __init__(self, rules: MediaRules, count: MessageCounter, *, archive: bool) -> None:
        self.trigger: Trigger = rules.trigger
        self.keep: Clause = rules.keep
        self._count = count
        self._archive = archive

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        if not turn.facts.media:
            return None
        forms = turn.facts.forms
        key = (NAME, self._archive)
        if key not in forms:
            kept = kept_as(turn, archive=self._archive)
            content = [_labelled(part, kept) for part in parts_of(decode(turn.raw))]
            forms[key] = turn.rewritten(replace_field(turn.raw, "content", content), self._count)
        return forms[key]

    def later(self) -> dict[int, int]:
        return NO_LATER


def _labelled(part: Any, kept: str) -> Any:
    """Replace a media part with a text part. Keep its ``cache_control``."""
    if not is_media_part(part):
        return part
    text = _LABEL.replace("{kind}", MEDIA_LABELS[part["type"]]).replace("{kept}", kept)
    marks = {key: part[key] for key in ("cache_control",) if key in part}
    return {"type": "text", "text": text, **marks}


def stage(rules: Rules, body: Sequence[Turn], count: MessageCounter) -> Media | None:
    """Create the stage; return ``None`` if the policy disables it."""
    return None if rules.media is None else Media(rules.media, count, archive=rules.archive)
