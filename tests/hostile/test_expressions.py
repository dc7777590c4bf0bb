"""Expressions in a policy run on what strangers write, and none of them takes long on anything.

The engine for ``pinned`` takes time proportional to the text. The configuration rejects patterns that it can't run.
``redact`` has Python's whole syntax and a time limit, after which the proxy redacts the whole text.
"""

import asyncio
import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from proxy.compaction.rules import Pins, search_for, whole
from proxy.config.document import Issues
from proxy.summary import prompt
from proxy.summary.prompt import REDACTED, Redaction
from tests.kit.combinations import combined
from tests.kit.configurations import loads
from tests.kit.conversations import FORMAT, turn

ENDLESS = {
    "(a+)+$": "a" * 60 + "!",
    "(?:a*)*b": "a" * 60,
    r"(\w+\s?)+:": "a" * 60,
    r"(?:x+x+)+y": "x" * 60,
    r"(?:a?){20}b": "a" * 4_000,
    r"([a-z]+)*\d": "a" * 60,
    r"(?:a+?)+b": "a" * 60,
    r"(?=(?:a+)+b)": "a" * 60,
    "(a|a)*b": "a" * 60,
    "(?:a|ab|b)+c": "ab" * 60,
    "(?:(a)|(a))*c": "a" * 60,
}
"""Patterns that can take exponential time if an engine backtracks, each with a text for it."""

SLOW = [r"\s+$", r"\w+\d", r"(?i)a.*b.*c.*d", r"\s+\s+x", r"(?:TICKET|BUG)-[\w-]+!"]
"""Patterns that take quadratic time or more if an engine backtracks."""

FINE = [
    "TICKET-[0-9]+",
    r"(?i)\bdo not touch\b",
    r"^#\s*pinned",
    "(?:foo|bar)+",
    r"(?:[A-Z]{2}-)+\d+",
    r"\d{1,3}(?:,\d{3})*",
    r"(?:a|b){1,3}",
    r"(?:\w|a)+!",
    r"(?P<key>[a-z]+)=(?P<value>.*)",
    *SLOW,
]

POSSESSIVE = [r"(?:\w++\s)+end", r"(?>\w+\s)+end"]

UNLIKE = {
    **dict.fromkeys([r"(?<!x)y", r"a(?=b)", r"(?:a(?!b)|c)"], "look-ahead and look-behind aren't supported"),
    **dict.fromkeys([r"(a)\1", r"(a)?(?(1)b|c)", r"(?P<q>a)(?P=q)"], "references to groups aren't supported"),
    **dict.fromkeys([*POSSESSIVE, r"a++"], "possessive and atomic parts aren't supported"),
    r"\<b>": "without a backslash",
    r"\\\<b": "without a backslash",
    "a{2": "repetition",
    r"a\Z": "unrecognized escape",
    r"(?a:x)": "unrecognized flag",
    r"\w{1000}": "exceeds size limit",
}

AMBIGUOUS = {"[[a]b]": "bracket", "[a&&b]": "bracket", r"id{i<=2}": "brace", "x{e}": "brace", r"\b{start}": "brace"}


def refused(setting: str, pattern: str) -> str:
    """The message with which an expression is refused; its line is asserted."""
    written = {"pinned": [pattern]} if setting == "pinned" else {"summary": {"redact": [pattern]}}
    # JSON on a line of its own is YAML.
    with pytest.raises(Issues) as caught:
        loads(f"policies:\n  default:\n    {json.dumps(written)}\n".encode(), {})
    (fault,) = caught.value.issues
    assert fault.line == 3
    return fault.message


def taken(setting: str, pattern: str) -> None:
    written = {"pinned": [pattern]} if setting == "pinned" else {"summary": {"redact": [pattern]}}
    loads(json.dumps({"policies": {"default": written}}).encode(), {})


@pytest.mark.parametrize("pattern", ENDLESS)
def test_what_can_take_for_ever_ends_within_its_time(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken("redact", pattern)
    monkeypatch.setattr(prompt, "TEXT_SECONDS", 0.05)
    monkeypatch.setattr(prompt, "ALL_SECONDS", 0.2)
    clean = Redaction(secrets=False, patterns=[pattern])
    began = time.thread_time()
    for text in (ENDLESS[pattern], *(ENDLESS[pattern] * n for n in range(2, 12))):
        clean(text)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("pattern", [pattern for pattern in ENDLESS if "(?=" not in pattern])
def test_what_can_take_for_ever_does_not_where_none_goes_back(pattern: str) -> None:
    taken("pinned", pattern)


@pytest.mark.parametrize("pattern", UNLIKE)
def test_what_the_engine_cannot_do_is_refused_with_what_to_do(pattern: str) -> None:
    message = refused("pinned", pattern)
    assert UNLIKE[pattern] in message
    assert ". Fix: " in message


@pytest.mark.parametrize("setting", ["pinned", "redact"])
@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_what_engines_read_differently_is_refused(setting: str, pattern: str) -> None:
    assert "write \\" in refused(setting, pattern)
    assert AMBIGUOUS[pattern] in refused(setting, pattern)


@pytest.mark.parametrize("setting", ["pinned", "redact"])
@pytest.mark.parametrize(
    "pattern", ["(", "[", "a**", "(?P<a>x)(?P<a>y)", "a" * 1001, "", "a*", "(?:)", "\\", "(" * 500]
)
def test_what_is_none_or_matches_everything_is_refused(setting: str, pattern: str) -> None:
    refused(setting, pattern)


@pytest.mark.parametrize("pattern", [*FINE, *POSSESSIVE, "(?<!x)y", r"(a)\1"])
def test_what_is_harmless_is_taken(pattern: str) -> None:
    taken("redact", pattern)
    if pattern in FINE:
        taken("pinned", pattern)


def pinned(pattern: str, text: str) -> bool:
    """Whether a message with this text is pinned by an expression."""
    message = {"role": "user", "content": text}
    return Pins((pattern,)).holds(turn(message), FORMAT)


MEGABYTES = [" " * 1_000_000 + "x", "a" * 1_000_000, "ab" * 500_000, "TICKET-" * 140_000, "\u3000a" * 250_000]


@pytest.mark.parametrize("pattern", combined(2, [*FINE, *(pattern for pattern in ENDLESS if "(?=" not in pattern)]))
def test_nothing_is_slow_to_search_for(pattern: str) -> None:
    # An engine that goes back takes seconds for the ends of these texts already, and hours for the whole.
    for text in (*(text[-20_000:] for text in MEGABYTES), *MEGABYTES):
        began = time.thread_time()
        pinned(pattern, text)
        assert time.thread_time() - began < 1, text[:8]


# Python's white space has four separators (U+001C to U+001F) that Unicode's has not.
texts = st.text(st.sampled_from("aAbBcxyz TICKETBUG-0179,=!#\n\téßΩж你𝔘\u3000\u0663_"), max_size=40)


@pytest.mark.parametrize("pattern", FINE)
@given(text=texts)
def test_both_engines_find_what_python_finds(pattern: str, text: str) -> None:
    assert search_for(pattern)(text) == (re.search(pattern, text) is not None)
    clean = Redaction(secrets=False, patterns=[pattern])
    assert clean(text) == re.sub(pattern, REDACTED, text)


def test_half_a_character_hides_nothing() -> None:
    assert whole("a\ud83d TICKET-7 \udc00") == "a\ufffd TICKET-7 \ufffd"
    assert pinned("TICKET-[0-9]+", "a\ud83d TICKET-7 \udc00")
    clean = Redaction(secrets=False, patterns=["TICKET-[0-9]+"])
    assert clean("\ud83d TICKET-7") == f"\ud83d {REDACTED}"


# Each takes a second or so without a bound; then a test fails, and does not hang.
HOSTILE = {SLOW[0]: " " * 20_000 + "x", SLOW[1]: "ab" * 8_000, SLOW[2]: "ab" * 1_000, SLOW[3]: " " * 1_000 + "yx"}


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_text_that_is_slow_to_black_out_is_blacked_out_whole(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = Redaction(secrets=False, patterns=[pattern, "ACME"])
    monkeypatch.setattr(prompt, "TEXT_SECONDS", 0.02)
    with capture_logs() as logs:
        assert clean(HOSTILE[pattern]) == REDACTED
        monkeypatch.setattr(prompt, "TEXT_SECONDS", 0.5)
        assert clean("what ACME does") == f"what {REDACTED} does"
        began = time.thread_time()
        longer = HOSTILE[pattern][:-2] * 50 + HOSTILE[pattern][-2:]
        assert clean(longer) == REDACTED
        assert time.thread_time() - began < 2
    told = {"event": "redaction.too_slow", "log_level": "warning"}
    assert logs == [{**told, "characters": len(text)} for text in (HOSTILE[pattern], longer)]


def test_many_slow_texts_have_one_bound_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "TEXT_SECONDS", 0.1)
    monkeypatch.setattr(prompt, "ALL_SECONDS", 0.3)
    clean = Redaction(secrets=True, patterns=[SLOW[0]])
    began = time.thread_time()
    assert {clean(HOSTILE[SLOW[0]]) for _ in range(30)} == {REDACTED}
    assert time.thread_time() - began < 2
    # The proxy doesn't show a text that it can't search any more.
    assert clean("what ACME does" * 10_000) == REDACTED
    fresh = Redaction(secrets=True, patterns=[SLOW[0]])
    assert fresh("what ACME does") == "what ACME does"


def test_a_slow_text_holds_up_no_other_work() -> None:
    clean = Redaction(secrets=False, patterns=[SLOW[0]])

    async def turns() -> int:
        working = asyncio.ensure_future(asyncio.to_thread(clean, HOSTILE[SLOW[0]]))
        count = 0
        while not working.done():
            await asyncio.sleep(0.001)
            count += 1
        return count

    assert asyncio.run(turns()) > 20
