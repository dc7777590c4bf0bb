"""Changes around a request: a recovery, a writer of summaries, a metric, and the wording of an overflow."""

from __future__ import annotations

from tests.docs.changes.compaction import documented
from tests.kit.changes import Change, Edit, after, before

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

OUTLINE = '''"""Write summaries without a model: an outline of the messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from proxy.summary.extract import extract
from proxy.summary.writer import SummaryTask, SummaryTry, SummaryWriter


class OutlineWriter(SummaryWriter):
    """Outlines of the messages."""

    async def tries(self, task: SummaryTask) -> Sequence[SummaryTry]:
        """Return one try, which can't fail."""
        return (SummaryTry(("outline",), partial(_write, task)),)


async def _write(task: SummaryTask) -> str:
    return await asyncio.to_thread(extract, task.turns, task.previous, task.max_tokens, task.format)
'''

OUTLINE_TEST = '''"""Test summaries without a model."""

from __future__ import annotations

import asyncio

from proxy.summary.writer import SummaryTask
from proxy.summary.writers import WRITERS
from tests.kit.summary_conversation import FORMAT, calling


def test_it_names_the_calls() -> None:
    (writer,) = WRITERS["outline"]
    task = SummaryTask([calling("read_file", "main.py")], FORMAT, None, 100, None, None)
    (attempt,) = asyncio.run(writer(None).tries(task))
    assert "called read_file(main.py)" in asyncio.run(attempt.write())
'''

WORDING = "The scroll holds 131072 glyphs; yours would unroll to 150210."

CHANGES = {
    "a recovery": Change(
        most=2,
        edits=[
            Edit("proxy/pipeline/features/teapots.py", TEAPOT),
            before(
                "proxy/pipeline/answering.py",
                "from proxy.pipeline.features.usage_feedback import",
                "from proxy.pipeline.features.teapots import Teapots\n",
            ),
            before(
                "proxy/pipeline/answering.py",
                '            Recovery("roles", ',
                '            Recovery("teapot", Teapots().recover, most=1),\n',
            ),
            before(
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
    "a way to write summaries": Change(
        most=2,
        edits=[
            Edit("proxy/summary/outline.py", OUTLINE),
            before(
                "proxy/summary/writers.py",
                "from proxy.summary.quality import SummaryRejected\n",
                "from proxy.summary.outline import OutlineWriter\n",
            ),
            after("proxy/summary/writers.py", 'Literal["transcript", "continue"', ', "outline"'),
            after(
                "proxy/summary/writers.py",
                '    "continue": (NotesWriter, TranscriptWriter),\n',
                '    "outline": (OutlineWriter,),\n',
            ),
            Edit("tests/unit/summary/test_outline.py", OUTLINE_TEST),
        ],
        generators=["tests.docs.reference"],
        tests=("tests/unit/summary/test_outline.py", *documented("summary")),
        check="""
import tempfile
from pathlib import Path
from tests.unit.pipeline.test_answering import FINE, Case, answered, long_chat

case = Case(long_chat(40), [FINE], policy={"summary": {"method": "outline"}})
reply, script, _ = answered(case, Path(tempfile.mkdtemp()))
assert reply.sent.outcome.summary.origin == "made"
assert any(b"extracted these notes" in bytes(message) for message in reply.sent.outcome.messages)
assert len(script.sent) == 1
""",
    ),
    "a metric": Change(
        most=2,
        edits=[
            before(
                "proxy/telemetry/metrics.py",
                "RECALLS = _counter(",
                'GREETINGS = _counter("compaction_greetings", "Visits of a page.", {"form": "`any`"})\n\n',
            ),
            after(
                "proxy/endpoints/status.py",
                "from proxy.store.guarded import READ_SECONDS\n",
                "from proxy.telemetry.metrics import GREETINGS\n",
            ),
            after(
                "proxy/endpoints/status.py",
                "    settings = service.settings\n",
                '    GREETINGS.labels(form="any").inc()\n',
            ),
        ],
        generators=["tests.docs.reference"],
        tests=("tests/docs/test_reference.py",),
        check="""
from starlette.testclient import TestClient
from proxy.config import Settings
from proxy.server.app import create_app

app = create_app(Settings.model_validate({"store": {"url": "sqlite://"}}))
with TestClient(app, base_url="http://localhost") as client:
    client.get("/compaction/status")
    assert 'compaction_greetings_total{form="any"} 1.0' in client.get("/metrics").text
""",
    ),
    "an overflow wording": Change(
        most=2,
        edits=[
            before(
                "proxy/overflow/patterns.py",
                "    # General: the words of an overflow, and a number if its place shows its role.\n",
                '    row("Papyrus", r"holds <limit> glyphs\\W{1,3}yours would unroll to <counted>"),\n',
            ),
            before(
                "tests/unit/overflow/test_recognize.py",
                '    ("prompt is too long: 209353 tokens > 199999 maximum", too_long(199999, 209353)),\n',
                f'    ("{WORDING}", too_long(131072, 150210)),\n',
            ),
        ],
        tests=("tests/unit/overflow/test_recognize.py", "-k", "scroll"),
        check=f"""
import json
from proxy.overflow import recognise

found = recognise(400, json.dumps({{"error": {{"message": "{WORDING}"}}}}).encode())
assert (found.limit, found.counted) == (131072, 150210)
assert recognise(400, json.dumps({{"error": {{"message": "The scroll holds glyphs."}}}}).encode()) is None
""",
    ),
}
