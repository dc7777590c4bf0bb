"""Read toy answers: ``{"reply": {"says": "…"}, "why": "done", "used": {"in": 1, "out": 2}}``, and their events.

Each event of a stream is ``{"says": "…"}``. The last one has ``why`` and ``used``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from proxy.dialects.answers import NO_ROOM, Answers, Object, Verdict, deltas


class ToyAnswers(Answers):
    """See ``dialects.answers.Answers``."""

    USUAL = frozenset({None, "done", "asks", "length"})
    REASON = re.compile(r'"why"\s*:\s*"([^"\\]{1,64})"')
    TEXTS = deltas("says|with")

    def judge(self, event: Any) -> Verdict | None:
        if not isinstance(event, dict) or self.has_content(event):
            return "content"
        return "content" if event.get("why") not in (None, *NO_ROOM) else None

    def reason(self, event: Object) -> str | None:
        reason = event.get("why")
        return reason if isinstance(reason, str) else None

    def has_content(self, event: Object) -> bool:
        reply = event.get("reply", event)
        return isinstance(reply, dict) and bool(reply.get("says") or reply.get("asks"))

    def stated_usage(self, part: Object) -> object:
        used = part.get("used")
        return {"input_tokens": used.get("in"), "output_tokens": used.get("out")} if isinstance(used, dict) else None

    def strings(self, answer: Object) -> Iterator[str]:
        reply = answer.get("reply")
        says = reply.get("says") if isinstance(reply, dict) else None
        if isinstance(says, str):
            yield says

    def gives_up(self, body: bytes) -> bool:
        return False
