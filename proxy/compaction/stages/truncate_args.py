"""Shorten arguments of old tool calls: cut long strings inside the JSON and keep its structure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.compaction import keeps
from proxy.compaction.format import Format
from proxy.compaction.named_files import WRITING_TOOLS, decoded
from proxy.compaction.stages.stage import Stage, StageRules, kept_as
from proxy.compaction.turn import Facts, Turn

NAME = "truncate_args"

# Values of these keys identify a call. The model needs them to understand its earlier calls, so they aren't cut.
KEPT_KEYS = frozenset(
    {"path", "file_path", "filename", "file", "paths", "url", "uri", "id", "command", "cmd", "query", "pattern"}
)
# The text that an edit replaced. The file doesn't have it anymore, so the model hardly needs it.
REPLACED_KEYS = frozenset({"old_string", "oldString", "old_str", "oldStr", "old_text", "oldText"})

_KEPT_ENDINGS = ("_path", "_url", "_id", "_file")

_NOTE = (
    " [The compaction proxy left out {characters} characters of this old argument here. This note is not part of the "
    "value.{kept}]"
)

# Levels of arrays and objects. Deeper arguments stay as they are. Python's own limit depends on its version and on the
# depth of the call stack, so the result would, too.
DEEPEST = 200

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ArgumentRules(StageRules):
    """Cut long strings in the arguments of old tool calls. The JSON keeps its structure."""

    SECTION: ClassVar[str] = NAME

    max_length: int = 2000
    truncation_text: str | None = None
    tools: tuple[str, ...] = WRITING_TOOLS
    max_replaced: int = 400

    @property
    def least(self) -> int:
        """Return the characters up to which no string is cut."""
        return min(self.max_length, self.max_replaced)

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Arguments:
        return Arguments(self, format, archive=archive)

    def is_costly(self, facts: Facts) -> bool:
        return facts.kind != "result" and bool(facts.calls) and facts.tokens > self.least // 8


class Arguments(Stage):
    """The stage with the rules of a policy, or with those of the fit ladder.

    With ``every_key``, the values of ``KEPT_KEYS`` are cut too.
    """

    name = NAME

    def __init__(self, rules: ArgumentRules, format: Format, *, archive: bool, every_key: bool = False) -> None:
        super().__init__(rules)
        self._rules = rules
        self._least = rules.least
        self._format = format
        self._archive = archive
        self.every_key = every_key
        self._key = (
            NAME,
            (rules.max_length, rules.max_replaced, rules.truncation_text, rules.tools, archive, every_key),
        )

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        # With every key, the arguments of the provider's calls are cut, too.
        if not (turn.facts.calls or self.every_key) or len(turn.raw) <= self._least:
            return None
        forms = turn.facts.forms
        if self._key not in forms:
            forms[self._key] = self._reduced(turn)
        return forms[self._key]

    def _reduced(self, turn: Turn) -> Turn | None:
        note = self._note(turn)

        def rewrite(name: str, arguments: str) -> str | None:
            applies = "*" in self._rules.tools or name in self._rules.tools
            return self._shorter(arguments, note) if applies and len(arguments) > self._least else None

        raw = self._format.with_arguments(turn.raw, rewrite)
        return None if raw is turn.raw else turn.rewritten(raw, self._format)

    def _note(self, turn: Turn) -> str:
        if self._rules.truncation_text is not None:
            return self._rules.truncation_text.replace("{id}", turn.facts.id)
        return _NOTE.replace("{kept}", kept_as(turn, archive=self._archive))

    def _shorter(self, arguments: str, note: str) -> str | None:
        """Return the arguments with long strings cut; ``None`` if there are none or if they aren't JSON."""
        try:
            value = decoded(arguments, parse_constant=_refuse, parse_float=_finite)
            cut = self._cut(value, note)
            if cut == value:
                return None
            text = json.dumps(cut, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        # A lone surrogate isn't valid UTF-8, so it must remain an escape.
        return json.dumps(cut) if _SURROGATE.search(text) else text

    def _cut(self, value: Any, note: str, key: str = "", depth: int = 0) -> Any:
        if isinstance(value, str):
            stays = not self.every_key and (key in KEPT_KEYS or key.endswith(_KEPT_ENDINGS))
            most = self._least if key in REPLACED_KEYS else self._rules.max_length
            if stays or len(value) <= most:
                return value
            cut = value[: keeps.KEPT_CHARACTERS] + note.replace("{characters}", str(len(value) - keeps.KEPT_CHARACTERS))
            return cut if len(cut) < len(value) else value
        if depth >= DEEPEST and isinstance(value, list | dict):
            raise ValueError("too deep")
        if isinstance(value, list):
            return [self._cut(item, note, key, depth + 1) for item in value]
        if isinstance(value, dict):
            return {name: self._cut(item, note, name, depth + 1) for name, item in value.items()}
        return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} isn't valid JSON")


def _finite(number: str) -> float:
    value = float(number)
    return _refuse(number) if math.isinf(value) else value
