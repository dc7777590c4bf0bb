"""Typical changes of metrics and of the recognition of overflows, made in a copy of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

changes = pytest.importorskip("tests.docs.test_changes")

WORDING = "The scroll holds 131072 glyphs; yours would unroll to 150210."

CHANGES = {
    "a metric": changes.Change(
        most=3,
        edits=[
            changes.before(
                "proxy/telemetry/metrics.py",
                "RECALLS = Counter(",
                'GREETINGS = Counter("compaction_greetings", "Visits of a page.", ["form"], registry=REGISTRY)\n',
            ),
            changes.after(
                "proxy/endpoints/landing.py",
                "from proxy import __version__\n",
                "from proxy.telemetry.metrics import GREETINGS\n",
            ),
            changes.after(
                "proxy/endpoints/landing.py",
                "    origin = _origin(request)\n",
                '    GREETINGS.labels(form="any").inc()\n',
            ),
            changes.before(
                "docs/reference.md",
                "| `compaction_tasks` |",
                "| `compaction_greetings_total` | `form`: `any` | Visits of a page. |\n",
            ),
        ],
        tests=("tests/docs/test_reference.py",),
        check="""
from starlette.testclient import TestClient
from proxy.config import Settings
from proxy.server.app import create_app

app = create_app(Settings.model_validate({"store": {"url": "sqlite://"}}))
with TestClient(app, base_url="http://localhost") as client:
    client.get("/")
    assert 'compaction_greetings_total{form="any"} 1.0' in client.get("/metrics").text
""",
    ),
    "an overflow wording": changes.Change(
        most=2,
        edits=[
            changes.before(
                "proxy/overflow/patterns.py",
                "    # General: the words of an overflow, and a number if its place shows its role.\n",
                '    row("Papyrus", r"holds <limit> glyphs\\W{1,3}yours would unroll to <counted>"),\n',
            ),
            changes.before(
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
