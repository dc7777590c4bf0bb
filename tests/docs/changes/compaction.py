"""Changes of the compaction: a setting with behavior, and a stage."""

from __future__ import annotations

from tests.kit.changes import Change, Edit, after, before


def documented(name: str) -> tuple[str, ...]:
    """Return the tests of the documents of settings, for settings whose path contains a name."""
    files = "tests/unit/config/test_schema.py", "tests/docs/test_documents.py", "tests/docs/test_reference.py"
    return (*files, "-k", f"documented or values_in_the_table or schema_is_the_one or states_as_defaults or {name}")


STAGE = '''"""Collapse runs of empty lines in old tool results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from proxy.compaction.format import Format
from proxy.compaction.stages.stage import Stage, StageRules
from proxy.compaction.turn import Turn

NAME = "empty_lines"


@dataclass(frozen=True, slots=True)
class EmptyLineRules(StageRules):
    """Collapse runs of empty lines in old tool results."""

    SECTION: ClassVar[str] = NAME
    ABOUT: ClassVar[str] = "Collapse empty lines of old tool results; null turns this off."

    min_lines: Annotated[int, "Minimum empty lines of a run."] = 3

    def stage(self, body: Sequence[Turn], format: Format, *, archive: bool) -> Stage:
        return EmptyLines(self, format)


class EmptyLines(Stage):
    """The stage with the rules of a policy."""

    name = NAME

    def __init__(self, rules: EmptyLineRules, format: Format) -> None:
        super().__init__(rules)
        self._runs = re.compile(f"\\n{{{rules.min_lines},}}")
        self._format = format

    def reduce(self, index: int, turn: Turn) -> Turn | None:
        text = self._format.replaceable_text(turn.raw) if turn.facts.kind == "result" else None
        if not text or (short := self._runs.sub("\\n", text)) == text:
            return None
        return turn.rewritten(self._format.with_text(turn.raw, short), self._format)
'''

CHANGES = {
    "a setting with behavior": Change(
        most=3,
        edits=[
            before(
                "proxy/compaction/stages/truncate_args.py",
                "    def stage(self, body: Sequence[Turn]",
                '    kept_characters: Annotated[int, "Characters of a cut string."] = keeps.KEPT_CHARACTERS\n\n',
            ),
            Edit(
                "proxy/compaction/stages/truncate_args.py",
                "kept = self._rules.kept_characters\n"
                '            cut = value[:kept] + note.replace("{characters}", str(len(value) - kept))',
                "cut = value[: keeps.KEPT_CHARACTERS] + "
                'note.replace("{characters}", str(len(value) - keeps.KEPT_CHARACTERS))',
            ),
            after(
                "config.example.yaml",
                "      max_length: 2000                        # characters\n",
                "      kept_characters: 120\n",
            ),
        ],
        generators=["tests.docs.reference"],
        tests=documented("kept_characters"),
        check="""
from proxy.config import Policy
from proxy.pipeline.rules import rules_for
from tests.kit.conversations import FORMAT, assistant, call, turns

def cut(**stated):
    policy = Policy.build("p", {"truncate_args": {"tools": ["*"], **stated}})
    body = turns([assistant(None, call("a", "write_file", content="x" * 9_000))])
    for stage in rules_for(policy, window_known=True).applied_to(body, FORMAT):
        if stage.name == "truncate_args":
            return stage.reduce(0, body[0]).raw.count(b"x")

assert cut() - cut(kept_characters=7) == 113, (cut(), cut(kept_characters=7))
""",
    ),
    "a compaction stage": Change(
        most=4,
        edits=[
            Edit("proxy/compaction/stages/empty_lines.py", STAGE),
            after(
                "proxy/compaction/stages/__init__.py",
                "from proxy.compaction.stages.duplicates import DuplicateRules\n",
                "from proxy.compaction.stages.empty_lines import EmptyLineRules\n",
            ),
            Edit("proxy/compaction/stages/__init__.py", "MediaRules, EmptyLineRules)\n", "MediaRules)\n"),
            before(
                "docs/configuration.md",
                "\n`evict_results.lossless` first",
                "| `empty_lines` | collapses empty lines |\n",
            ),
            before(
                "config.example.yaml",
                "    archive:                                  # store the originals",
                "    empty_lines:\n      trigger: {fraction: 0.85}\n      keep: {fraction: 0.10}\n      min_lines: 3\n",
            ),
        ],
        generators=["tests.docs.reference"],
        tests=documented("empty_lines"),
        check="""
from proxy.config import Policy
from proxy.pipeline.rules import rules_for
from tests.kit.compacting import send
from tests.kit.conversations import assistant, call, result, turns, user

off = dict.fromkeys(("duplicates", "truncate_args", "evict_results", "media"))
policy = Policy.build("p", {**off, "trigger": {"tokens": 1_000}, "keep": {"messages": 2}})
body = turns([
    user("go"), assistant(None, call("a", "t")), result("a", "a " + "\\n" * 4_000 + "b " * 200),
    assistant(None, call("b", "t")), result("b", "done"), user("thanks"),
])
sent = send(body, rules_for(policy, window_known=True), 8_000)
assert sent.steps == ("empty_lines",), sent.steps
""",
    ),
}
