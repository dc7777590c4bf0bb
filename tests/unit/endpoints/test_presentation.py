"""Test the texts about a request's prompt: its window, its summary's sections, and what isn't stored."""

import json
import time
from typing import Any

from proxy.compaction.summary_message import INDEX_TITLE, USERS_TITLE, sections_of
from proxy.config.settings import Settings
from proxy.constants import DAY
from proxy.endpoints import presentation as shown
from proxy.pipeline.changes import ChangedPrompt, Message
from proxy.telemetry.record import RequestRecord, UpstreamCall

POLICY = Settings().policies["default"]


def record(days: float = 0, **fields: Any) -> RequestRecord:
    stated = {"verdict": "compacted", "policy": "default", "calls": [UpstreamCall("accepted")], **fields}
    return RequestRecord("0" * 24, time.time() - days * DAY, **stated)


def test_a_bar_has_all_parts_also_of_a_prompt_that_is_too_large() -> None:
    window = {"size": 100, "instructions": 0, "tools": 20, "summary": 30, "messages": 150, "answer": 0, "free": 0}
    assert list(shown.window_parts(window)) == [
        ("tools", 20, 0, 100),
        ("summary", 30, 100, 150),
        ("messages", 150, 250, 750),
    ]
    assert "exceed it by 100." in shown.window_title(window)
    unknown = shown.window_title({**window, "size": None, "free": None})
    assert unknown == "The prompt had 200 tokens, as the proxy counts. It doesn't know the model's limits."


def test_sections_are_split_at_the_proxys_own_headings_only() -> None:
    users = "<user_message>\nRead this:\n\n## Summary\nmine\n</user_message>"
    notes = "Notes\n\n## Next\nGo on."
    parts = [("Paths, URLs, and identifiers", "- a.py"), ("Summary", notes)]
    text = f"<conversation_summary>\nHello.\n\n## {USERS_TITLE}\n{users}" + "".join(
        f"\n\n## {t}\n{s}" for t, s in parts
    )
    found = sections_of(f"{text}\n</conversation_summary>\nThe client asks for answers in JSON.")
    assert found == [("", "Hello."), (USERS_TITLE, users), (INDEX_TITLE, "- a.py"), ("Summary", notes)]
    assert sections_of("Another text") == [("", "Another text")]


def test_a_missing_archive_entry_has_a_reason_and_a_fix() -> None:
    assert "stores messages for 30 days" in shown.why_unknown(record(days=31), POLICY)
    assert "The archive has no entry for this request." in shown.why_unknown(record(days=1), POLICY)
    assert "The archive has no entry for this request." in shown.why_unknown(record(), None), "the policy was removed"
    assert "callers without a key" in shown.why_unknown(record(tenant="nobody"), POLICY)
    assert shown.why_unknown(record(calls=[]), POLICY) == "The proxy didn't send this request to an upstream."
    assert shown.policy_of(record(), Settings()) == POLICY
    assert shown.policy_of(RequestRecord("", 0.0, policy="gone"), Settings()) is None


def test_messages_without_sizes_or_texts_are_counted_only() -> None:
    reading = {"function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    call = json.dumps({"role": "assistant", "content": "Reading.", "tool_calls": [reading]}).encode()
    messages = [
        Message("kept", 0, "system", 7),
        Message("summarized", 1, "assistant", 20, call),
        Message("summarized", 2, "result", 80),
        Message("shortened", 3, "result", 900, b'{"role": "tool", "content": "long"}', 90, b'{"content": "lo"}'),
        Message("left out", 4),
    ]
    prompt = ChangedPrompt(messages, Message("added", sent_size=40), "0" * 20)
    assert list(shown.left_prompt(prompt, record(), None)) == [
        "2 messages (numbers 2 to 3, 100 tokens) left the prompt. A summary of 40 tokens replaces them.",
        "1 message (number 4, 900 tokens) became shorter, and took 90 tokens.",
        "1 message (number 5) left the prompt without a replacement.",
        "The archive no longer has 1 of them.",
        "The originals are in the archive.",
        f"With its own key, the client gets them from /compaction/archive/{'0' * 20}",
    ]
    found = [(fate, [shown.sizes(one) for one in group]) for fate, _, group in shown.runs(prompt)]
    assert found == [("kept", ["7"]), ("summarized", ["20", "80"]), ("shortened", ["900 → 90"]), ("left out", [""])]
    assert shown.start(messages[1]) == ("assistant", 'Reading. read {"path": "a.py"}')
    assert shown.text_of(call, messages[1]) == "Reading.\nread\n  path: a.py"
    assert shown.text_of(call, messages[1], 10) == "Reading.\nr… (26 characters)"
    assert shown.start(messages[2]) == ("tool", "")
    lines = list(shown.text_lines(None, prompt, texts=True))
    assert {"\n    1 system, 7 tokens, kept", "\n    5 left out"} <= set(lines)
