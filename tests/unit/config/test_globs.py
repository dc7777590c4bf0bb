"""Test whether patterns overlap or cover each other."""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.globs import covers, meet

MEETING = [
    ("gpt-*", "gpt-5*", True),
    ("*", "a", True),
    ("*mini", "gpt-*", True),
    ("a*b", "b*a", False),
    ("a*c", "*b*", True),
    ("claude-*", "gpt-*", False),
    ("gpt-?", "gpt-5", True),
    ("gpt-?", "gpt-55", False),
    ("gpt-[45]", "gpt-[56]", True),
    ("gpt-[45]", "gpt-[67]", False),
    ("gpt-[!5]", "gpt-5", False),
    ("[[]x]", "?x]", True),
    ("[[]x]", "[x]", False),
    ("", "*", True),
    ("", "?", False),
    ("a" + "*a" * 30 + "b", "a" * 60, False),
    ("a" + "*a" * 100 + "b", "*c" + "a?" * 100 + "c", False),
    ("*" + "a*" * 100 + "b", "*c*" + "a?" * 100 + "*b", True),
    ("*b?", "[!b]c[a-z]", False),
    ("*b?", "[!b]b[a-z]", True),
]


@pytest.mark.parametrize(("one", "other", "meets"), MEETING)
def test_whether_two_patterns_can_match_the_same(one: str, other: str, meets: bool) -> None:
    assert meet(one, other) is meets
    assert meet(other, one) is meets


TEXTS = ["".join(letters) for length in range(7) for letters in itertools.product("abc", repeat=length)]


PATTERNS = st.lists(st.sampled_from(["a", "b", "?", "*", "[ab]", "[!a]"]), max_size=3).map("".join)


@given(PATTERNS, PATTERNS)
def test_patterns_meet_where_some_text_matches_both(one: str, other: str) -> None:
    """Two patterns of three pieces that meet do so in a text of six characters at most."""
    assert meet(one, other) is any(fnmatchcase(text, one) and fnmatchcase(text, other) for text in TEXTS)


@pytest.mark.parametrize(
    ("general", "special", "expected"),
    [
        ("*", "gpt-4o", True),
        ("gpt-*", "gpt-4*", True),
        ("gpt-4*", "gpt-*", False),
        ("gpt-?", "gpt-*", False),
        ("*mini", "gpt-*mini", True),
        ("a*b", "a*c", False),
        ("[ab]*", "a*", True),
        ("[ab]", "[ab]", True),
        ("[ab]", "[abc]", False),
        ("**", "*", True),
        ("a", "?", False),
    ],
)
def test_whether_one_pattern_covers_another(general: str, special: str, expected: bool) -> None:
    assert covers(general, special) is expected
