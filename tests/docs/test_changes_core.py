"""A typical change of the core, made in a copy of the project: another recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

changes = pytest.importorskip("tests.docs.test_changes")

TEAPOT = '''"""Send a request once more if the upstream claims to be a teapot."""

from __future__ import annotations

from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.response_start import ResponseStart


class Teapots:
    """The upstreams that claim to be teapots."""

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return the same attempt if the upstream's status is 418."""
        return attempt if start.answer.status == 418 else None
'''

CHANGES = {
    "a recovery": changes.Change(
        most=3,
        edits=[
            changes.Edit("proxy/pipeline/features/teapots.py", TEAPOT),
            changes.before(
                "proxy/pipeline/answering.py",
                "from proxy.pipeline.features.usage_feedback import",
                "from proxy.pipeline.features.teapots import Teapots\n",
            ),
            changes.before(
                "proxy/pipeline/answering.py",
                '            Recovery("usage", ',
                '            Recovery("teapot", Teapots().recover, most=1),\n',
            ),
            changes.before("docs/reference.md", "`usage` (the upstream refused `stream_options`)", "`teapot`, "),
            changes.before(
                "tests/unit/pipeline/test_answering.py",
                '    "never": Case(',
                '    "a teapot": Case(long_chat(3), [refusal("I am one.", 418), FINE], ["teapot"]),\n',
            ),
        ],
        tests=("tests/unit/pipeline/test_answering.py", "-k", "teapot"),
        check="""
import tempfile
from pathlib import Path
from tests.unit.pipeline.test_answering import FINE, Case, answered, long_chat, refusal

case = Case(long_chat(3), [refusal("I am one.", 418), FINE])
reply, _, _ = answered(case, Path(tempfile.mkdtemp()))
assert reply.run.retries == ["teapot"]
""",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_touches_few_files_and_works(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    assert len(change.files) <= change.most
    folder = changes.copied(tmp_path)
    with pytest.raises(AssertionError):
        changes.run(folder, "-c", change.check)
    for edit in change.edits:
        edit.make(folder)
    changes.run(folder, "-c", change.check)
    changes.run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *change.tests)
