"""Typical changes, made in a copy of the project: each touches few files and works.

A change is a list of edits and a script that checks it. To add one, add a row to ``CHANGES``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("proxy", "tests", "docs", "scripts", "pyproject.toml", "config.example.yaml", "README.md", "CHANGELOG.md")
GENERATED = ("proxy/config/schema.json",)


@dataclass(frozen=True)
class Edit:
    """One edit of a file: ``old``, which must be there exactly once, becomes ``new``. Without ``old``, a new file."""

    path: str
    new: str
    old: str | None = None

    def make(self, folder: Path) -> None:
        """Edit the file in a copy of the project."""
        file = folder / self.path
        if self.old is None:
            assert not file.exists(), f"{self.path} exists"
            file.write_text(self.new, encoding="utf-8")
            return
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.path} has {text.count(self.old)} times: {self.old}"
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")


def before(path: str, old: str, new: str) -> Edit:
    """Return an edit that inserts a text before another one."""
    return Edit(path, new + old, old)


def after(path: str, old: str, new: str) -> Edit:
    """Return an edit that inserts a text after another one."""
    return Edit(path, old + new, old)


@dataclass(frozen=True)
class Change:
    """A change: its edits, the most files that it may touch, and a script that fails without it.

    ``generators`` are modules that write generated files. ``tests`` are tests that must pass, with pytest's selection.
    """

    most: int
    edits: Sequence[Edit]
    check: str
    generators: Sequence[str] = ()
    tests: Sequence[str] = ()

    @property
    def files(self) -> set[str]:
        """Return the files that it touches, without tests and generated files."""
        return {edit.path for edit in self.edits if not edit.path.startswith("tests/") and edit.path not in GENERATED}


def documented(name: str) -> tuple[str, ...]:
    """Return the tests of the documents of settings, for settings whose path contains a name."""
    files = "tests/unit/config/test_schema.py", "tests/docs/test_documents.py"
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

    NAME: ClassVar[str] = NAME
    SECTION: ClassVar[str] = "empty_lines"
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
        most=4,
        edits=[
            before(
                "proxy/compaction/stages/arguments.py",
                "    def stage(self, body: Sequence[Turn]",
                '    kept_characters: Annotated[int, "Characters that stay of a cut string."] = KEPT_CHARACTERS\n\n',
            ),
            Edit(
                "proxy/compaction/stages/arguments.py",
                "kept = self._rules.kept_characters\n"
                '            cut = value[:kept] + note.replace("{characters}", str(len(value) - kept))',
                'cut = value[:KEPT_CHARACTERS] + note.replace("{characters}", str(len(value) - KEPT_CHARACTERS))',
            ),
            before(
                "docs/configuration.md",
                "| `policies.NAME.truncate_args.tools` |",
                "| `policies.NAME.truncate_args.kept_characters` | sets how much of a cut string stays | characters | "
                "`120` |\n",
            ),
            after(
                "config.example.yaml",
                "      max_length: 2000                        # characters\n",
                "      kept_characters: 120\n",
            ),
        ],
        generators=["proxy.config.schema"],
        tests=documented("kept_characters"),
        check="""
from proxy.config import Policy
from proxy.pipeline.rules import rules_for
from tests.kit.conversations import FORMAT, assistant, call, turns

def cut(**stated):
    policy = Policy.build("p", {"truncate_args": {"tools": ["*"], **stated}})
    body = turns([assistant(None, call("a", "write_file", content="x" * 9_000))])
    for stage in rules_for(policy, window_known=True).applied_to(body, FORMAT):
        if stage.name == "arguments":
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
                "### `policies.NAME.archive`\n",
                "### `policies.NAME.empty_lines`\n\nIts step is `empty_lines`.\n\n"
                "| setting | what it does | unit or values | default |\n"
                "|---|---|---|---|\n"
                "| `policies.NAME.empty_lines.trigger` | sets when this stage runs | trigger | the policy's own |\n"
                "| `policies.NAME.empty_lines.keep` | sets what this stage doesn't change | keep | the policy's own |\n"
                "| `policies.NAME.empty_lines.min_lines` | sets the shortest run | lines | `3` |\n\n",
            ),
            before(
                "config.example.yaml",
                "    archive:                                  # store the originals",
                "    empty_lines:\n      trigger: {fraction: 0.85}\n      keep: {fraction: 0.10}\n      min_lines: 3\n",
            ),
        ],
        generators=["proxy.config.schema"],
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


def copied(folder: Path) -> Path:
    """Return a copy of the project."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    return folder


def run(folder: Path, *arguments: str) -> None:
    """Run Python in a copy of the project."""
    command = [sys.executable, "-P", *arguments]
    environment = {"PYTHONPATH": str(folder), "PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments[:2]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_touches_few_files_and_works(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    assert len(change.files) <= change.most
    folder = copied(tmp_path)
    with pytest.raises(AssertionError):
        run(folder, "-c", change.check)
    for edit in change.edits:
        edit.make(folder)
    for generator in change.generators:
        run(folder, "-m", generator)
    run(folder, "-c", change.check)
    if change.tests:
        run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *change.tests)
