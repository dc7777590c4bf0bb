"""Arguments of old tool calls: long strings inside the JSON are cut; the JSON keeps its shape."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from proxy.compaction.conditions import Clause
from proxy.compaction.message import Form, MessageCounter, Turn, decode, replace_field
from proxy.compaction.rules import ArgumentRules

NAME = "arguments"

# Values under these keys say what a call was about; a model needs them to know what it did, so they stay whole.
KEPT_KEYS = frozenset(
    {"path", "file_path", "filename", "file", "paths", "url", "id", "command", "cmd", "query", "pattern"}
)

# Of a string that is cut this many characters stay, as in DeepAgents, where it is 20.
KEPT_CHARACTERS = 120

# For the fit ladder, which has no use for a tail that stays.
NO_KEEP = Clause(messages=1)


_SURROGATE = re.compile("[\ud800-\udfff]")


class _Arguments:
    """The stage under one policy's rules."""

    def __init__(self, rules: ArgumentRules) -> None:
        self._rules = rules
        self._key = (NAME, (rules.max_length, rules.truncation_text, rules.tools))

    def __call__(self, body: Sequence[Turn], index: int, count: MessageCounter) -> Form | None:
        turn = body[index]
        if not turn.facts.calls or len(turn.raw) <= self._rules.max_length:
            return None
        forms = turn.facts.forms
        if self._key not in forms:
            forms[self._key] = self._reduced(turn, count)
        return forms[self._key]

    def _reduced(self, turn: Turn, count: MessageCounter) -> Form | None:
        message = decode(turn.raw)
        raw = turn.raw
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            changed = [self._call(call, "function") for call in calls]
            if changed != calls:
                raw = replace_field(raw, "tool_calls", changed)
        legacy = self._call(message, "function_call")
        if legacy is not message and isinstance(legacy, dict):
            raw = replace_field(raw, "function_call", legacy["function_call"])
        tokens = turn.facts.tokens if raw is turn.raw else count(decode(raw))
        return Form(raw, tokens) if tokens < turn.facts.tokens else None

    def _call(self, call: Any, key: str) -> Any:
        """The call with its long arguments cut; the very same object where there is nothing to cut."""
        function = call.get(key) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not self._applies(function.get("name")):
            return call
        arguments = function.get("arguments")
        if not isinstance(arguments, str) or len(arguments) <= self._rules.max_length:
            return call
        shorter = self._shorter(arguments)
        return call if shorter is None else {**call, key: {**function, "arguments": shorter}}

    def _shorter(self, arguments: str) -> str | None:
        """The arguments with long strings cut; ``None`` where there are none, or where it is not JSON."""
        try:
            parsed = json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
            cut = self._cut(parsed)
            if cut == parsed:
                return None
            text = json.dumps(cut, ensure_ascii=False)
        except (ValueError, RecursionError):
            return None
        # Half of a surrogate pair must stay an escape: it is no UTF-8.
        return json.dumps(cut) if _SURROGATE.search(text) else text

    def _applies(self, name: object) -> bool:
        return "*" in self._rules.tools or (isinstance(name, str) and name in self._rules.tools)

    def _cut(self, value: Any, key: str | None = None) -> Any:
        if isinstance(value, str):
            if key in KEPT_KEYS or len(value) <= self._rules.max_length:
                return value
            cut = value[:KEPT_CHARACTERS] + self._rules.truncation_text
            return cut if len(cut) < len(value) else value
        if isinstance(value, list):
            return [self._cut(item, key) for item in value]
        if isinstance(value, dict):
            return {name: self._cut(item, name) for name, item in value.items()}
        return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    return _refuse(number) if math.isinf(value) else value


def stage(rules: ArgumentRules) -> _Arguments:
    """The stage's ``reduce`` under these rules."""
    return _Arguments(rules)
