"""Expressions in a policy run on what strangers write: those that can take for ever are refused where they are read."""

from __future__ import annotations

import re
import time

import pytest

from proxy.config.faults import Faults
from proxy.config.loading import loads
from proxy.config.patterns import ALIKE, NESTED, endless

ENDLESS = {
    "(a+)+$": NESTED,
    "(?:a*)*b": NESTED,
    r"(\w+\s?)+:": NESTED,
    r"(?:x+x+)+y": NESTED,
    r"(?:a?){20}b": NESTED,
    r"([a-z]+)*\d": NESTED,
    r"(?:a+?)+b": NESTED,
    r"(?=(?:a+)+b)": NESTED,
    "(a|a)*b": ALIKE,
    "(?:a|ab|b)+c": ALIKE,
    "(?:(a)|(a))*c": ALIKE,
}

FINE = [
    "TICKET-[0-9]+",
    r"(?i)\bdo not touch\b",
    r"^#\s*pinned",
    r"(?:\w++\s)+end",
    r"(?>\w+\s)+end",
    "(?:foo|bar)+",
    r"(?:[A-Z]{2}-)+\d+",
    r"\d{1,3}(?:,\d{3})*",
    r"(?:a|b){1,3}",
    r"(?:\w|a)+!",
    r"(?P<key>[a-z]+)=(?P<value>.*)",
]


@pytest.mark.parametrize("pattern", ENDLESS)
@pytest.mark.parametrize("setting", ["pinned: ['{}']", "summary: {{redact: ['{}']}}"])
def test_it_is_refused_with_its_line(pattern: str, setting: str) -> None:
    written = f"policies:\n  default:\n    {setting.format(pattern)}\n"
    with pytest.raises(Faults) as caught:
        loads(written.encode(), {})
    (fault,) = caught.value.faults
    assert fault.line == 3
    assert ENDLESS[pattern] in fault.message


@pytest.mark.parametrize("pattern", FINE)
def test_what_is_harmless_is_taken(pattern: str) -> None:
    assert endless(pattern) is None
    loads(f"policies:\n  default:\n    pinned: ['{pattern}']\n".encode(), {})


@pytest.mark.parametrize("pattern", FINE)
def test_what_is_taken_is_quick_where_others_are_not(pattern: str) -> None:
    for text in ("a" * 200, "ab" * 100, "TICKET-" * 30, "word " * 40 + "!", "1,234" * 40, "AA-" * 70):
        began = time.process_time()
        re.search(pattern, text)
        assert time.process_time() - began < 0.5
