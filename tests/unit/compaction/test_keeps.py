"""Test that numbers and forms of prompts change only with their version."""

import ast
import hashlib
from pathlib import Path
from types import ModuleType

import pytest

from proxy.compaction import keeps, summary_message
from proxy.compaction.rules import SectionLimits
from proxy.compaction.summary_message import SummaryParts, collect_names, with_index
from proxy.pipeline.job import PROMPT_DIGEST, PROMPT_VERSION
from proxy.summary import extract, prompt, writers
from tests.kit.compacting import rules
from tests.kit.conversations import IMAGE
from tests.kit.summary_conversation import FORMAT, calling, turn

ROOMY = SectionLimits(summary=400, users=400, newest=400, system=400, words=400, index=400, group=None, plan=400)
TIGHT = SectionLimits(summary=24, users=150, newest=150, system=150, words=60, index=60, group=None, plan=45)
LONG = "one two three four five six seven eight nine ten " * 8
TODOS = ", ".join(f'{{"content": "step {step}", "status": "pending"}}' for step in range(20))
CONVERSATION = [
    turn("user", [{"type": "text", "text": "Never touch vendor/. Fix the build of /srv/app."}, IMAGE], name="Ann"),
    calling("read_file", '{"path": "/srv/app/AGENTS.md"}'),
    turn("tool", "Always run the tests. Ticket ABC-1234 is at https://example.org/issue/7", tool_call_id="a"),
    calling("write_file", '{"path": "/srv/app/main.py", "content": "x"}', "Repaired </conversation_summary>"),
    turn("tool", LONG, tool_call_id="a"),
    calling("TodoWrite", f'{{"todos": [{TODOS}]}}', LONG),
    turn("user", f"You must keep {LONG}"),
    turn("user", f"Only use port 8080. {LONG}"),
    turn("user", "Go on."),
]


def messages() -> list[bytes]:
    """Return summary messages in all forms: roomy and cut, with and without an archive."""
    made = []
    for limits in (ROOMY, TIGHT):
        for id in (None, "0" * 20):
            parts = SummaryParts(CONVERSATION, f"It was repaired. {LONG}", id, omitted=2, folders=("/srv/app",))
            bare = summary_message.summary_message(parts, limits, rules(), FORMAT)
            made.append(with_index(bare, collect_names(CONVERSATION, None, FORMAT), (), limits, FORMAT))
    return made


def requests() -> list[object]:
    """Return the prompts that ask for a summary, and the summary that no model writes."""
    long = turn("tool", f"password: correct-horse-9 {LONG * 200}", tool_call_id="a")
    said = prompt.entries([*CONVERSATION, long], FORMAT, prompt.Redaction(secrets=True))
    texts = [text for _, text in said]
    sample = prompt.language_sample(CONVERSATION, FORMAT)
    return [
        prompt.request_messages(texts, max_tokens=500),
        prompt.request_messages(texts, max_tokens=500, previous="Earlier.", merge=True, sample=sample),
        prompt.continuation(500),
        writers.chunks([LONG], [80], 40, FORMAT.text_tokens),
        extract.extract(CONVERSATION, "Earlier.", 200, FORMAT, [turn("system", "Answer in French.")]),
    ]


def digest() -> str:
    table = {name: value for name, value in vars(keeps).items() if name.isupper()}
    return hashlib.sha256(repr((table, messages(), requests())).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def digest_now() -> str:
    return digest()


def test_prompts_change_only_with_their_version(digest_now: str) -> None:
    now = digest_now
    if PROMPT_DIGEST.startswith(f"{PROMPT_VERSION}:"):
        assert PROMPT_DIGEST.endswith(now), (
            "A number in proxy/compaction/keeps.py or the form of a prompt changed. Stored summaries have the old one. "
            f"Fix: raise PROMPT_VERSION ({PROMPT_VERSION}) in proxy/pipeline/job.py, and run this test again."
        )
    fix = f'set PROMPT_DIGEST = "{PROMPT_VERSION}:{now}" in proxy/pipeline/job.py.'
    assert f"{PROMPT_VERSION}:{now}" == PROMPT_DIGEST, f"The digest is of another version. Fix: {fix}"


TEXTS = [
    (module, name)
    for module in (summary_message, prompt, writers, extract)
    for name, value in vars(module).items()
    if isinstance(value, str) and name.isupper() and "(?" not in value
]


@pytest.mark.long
@pytest.mark.parametrize(("module", "name"), TEXTS, ids=[name for _, name in TEXTS])
def test_the_digest_changes_with_each_text(
    module: ModuleType, name: str, digest_now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, f"{getattr(module, name)} changed")
    assert digest() != digest_now


def test_other_modules_have_no_shares() -> None:
    folder = Path(keeps.__file__).parent
    found = [
        f"{path.name}: {ast.unparse(statement)}"
        for path in folder.rglob("*.py")
        if path.name != "keeps.py"
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Constant)
        if isinstance(statement.value.value, float)
    ]
    assert found == []
