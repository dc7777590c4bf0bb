"""Test that any file gives settings or an error with a line."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import Settings
from proxy.config.issues import Issue, Issues
from proxy.config.loading import loads

NAMES = [
    "server",
    "store",
    "upstreams",
    "models",
    "policies",
    "teams",
    "default",
    "trigger",
    "keep",
    "tokens",
    "fraction",
    "extends",
    "match",
    "upstream",
    "headers",
    "keys",
    "main",
    "port",
    "url",
    "summary",
    "prompt",
]
SCALARS = [
    "null",
    "true",
    "off",
    "0x_",
    "0b",
    "0b_",
    "1:30",
    "010",
    "1_0",
    ".5",
    "1.",
    "-.inf",
    ".nan",
    "2024-10-21",
    "=",
    "<<",
    "${A}",
    "${",
    "$${",
    "${N:-1}",
    "~",
    "0.5",
    "7",
    "-1",
    "1e5",
    "\\",
    "é",
]
MARKS = [
    ": ",
    ":",
    "\n",
    "\n  ",
    "\n    ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ", ",
    "'",
    '"',
    "&a ",
    "*a",
    "!!str ",
    "!x ",
    "| ",
]
MARKS += ["> ", "? ", "#", "%", "---\n", "\t", "\x00", "\x85", "\u2028", "\ufeff"]


def outcome(content: bytes) -> Settings | list[Issue]:
    try:
        return loads(content, {"A": "x"})
    except Issues as found:
        return found.issues


def judge(content: bytes) -> None:
    found = outcome(content)
    if isinstance(found, Settings):
        assert "default" in found.policies
        return
    breaks = ("\n", "\r", "\x85", "\u2028")
    lines = sum(content.decode("utf-8", "replace").count(character) for character in breaks) + 1
    assert found
    for fault in found:
        assert 1 <= fault.line <= lines + 1
        assert fault.message.isprintable()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(NAMES + SCALARS + MARKS), max_size=25).map("".join))
def test_any_text_is_settings_or_an_error_with_a_line(text: str) -> None:
    judge(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_settings_or_an_error_with_a_line(content: bytes) -> None:
    judge(content)


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, -1, 5000, 0.5, 1.5, "x", "", "*", "default", "keys", "sha256:" + "a" * 64])
    | st.integers()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_any_structure_is_settings_or_an_error_with_a_line(value: object) -> None:
    judge(json.dumps(value).encode())
