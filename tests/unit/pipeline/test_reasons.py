"""Test that the reason for a compaction names the condition that was met."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.compaction.rules import Rules
from proxy.compaction.settings import Bounds, Clause, IndexRules, UserMessageRules
from proxy.compaction.stages import ResultRules
from proxy.pipeline.job import reason_for
from proxy.telemetry.record import Reason

KEEP = Clause(messages=4)
RULES = Rules(
    trigger=(),
    keep=KEEP,
    prepare=(),
    stages=(),
    summary_tokens=1,
    user_messages=UserMessageRules(),
    index=IndexRules(),
)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (RULES, None),
        (replace(RULES, trigger=(Clause(fraction=0.5),)), Reason("fraction", 500, 900, 0.5)),
        (replace(RULES, trigger=(Clause(tokens=700),)), Reason("tokens", 700, 900)),
        (replace(RULES, trigger=(Clause(tokens=950), Clause(messages=8))), Reason("messages", 8, 10)),
        (replace(RULES, bounds=Bounds(messages=10)), Reason("messages", 10, 10)),
        (replace(RULES, bounds=Bounds(bytes=5)), Reason("bytes", 5, 6)),
        (
            replace(RULES, stages=(ResultRules((Clause(tokens=800),), KEEP),)),
            Reason("stage", 800, 900),
        ),
    ],
)
def test_the_first_condition_that_is_met(rules: Rules, reason: Reason | None) -> None:
    case = SimpleNamespace(rules=rules, budget=1_000, body=SimpleNamespace(raw=b"abcdef"))
    assert reason_for(cast(Any, case), 900, 10) == reason
