"""A further API for conversations. Its modules are in ``toy``, with the check."""

from __future__ import annotations

from pathlib import Path

from tests.kit.changes import Change, Edit, after

TOY = Path(__file__).parent / "toy"
FOLDER = "proxy/dialects/toy"
TABLE = "proxy/dialects/apis.py"

ROW = """TOY = Dialect(
    name="toy",
    path="/toy",
    errors="openai",
    request=ToyRequest,
    counters=ToyCounter,
    evidence=ToyEvidence(),
    answers=ToyAnswers(),
)

"""

IMPORTS = """from proxy.dialects.toy.answers import ToyAnswers
from proxy.dialects.toy.counting import ToyCounter, ToyEvidence
from proxy.dialects.toy.request import ToyRequest
"""


def module(name: str) -> Edit:
    """Return the edit that adds a module of the API."""
    text = (TOY / f"{name}.py").read_text(encoding="utf-8")
    return Edit(f"{FOLDER}/{name}.py", text.replace("tests.docs.changes.toy", "proxy.dialects.toy"))


CHANGES = {
    "an API": Change(
        most=5,
        edits=[
            *map(module, ("request", "units", "counting", "answers")),
            after(TABLE, "from proxy.dialects.responses.rounds import ResponsesTool\n", IMPORTS),
            Edit(TABLE, f"{ROW}DIALECTS:", "DIALECTS:"),
            Edit(TABLE, "(CHAT, RESPONSES, MESSAGES, TOY)", "(CHAT, RESPONSES, MESSAGES)"),
            after(TABLE, 'unit.get("role") or unit.get("type")', ' or unit.get("who")'),
        ],
        tests=("tests/unit/dialects/test_seam.py",),
        check="from tests.docs.changes.toy.check import check; check()",
    ),
}
