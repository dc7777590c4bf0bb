"""Work on texts of others is done in pieces, with a pause between two, and its output is that for the whole text."""

import re
import threading
from collections.abc import Callable

import pytest

from proxy.compaction.identifiers import SourceText, collect
from proxy.compaction.pieces import SEARCHED, begin_thread, pieces
from proxy.compaction.summary_message import fenced
from proxy.summary.prompt import Redaction, _without_base64
from tests.kit.combinations import combined

UNITS = [
    "a" * 399 + " ",
    "/",
    ".",
    '"',
    "name_%d ",
    "eyJ-",
    "sk-",
    "token ",
    "curl ",
    "\r",
    "\n",
    "\ud800",
    "[",
    "a.b/c ",
]
BASE64 = re.compile(
    r"data:[\w/+.;=-]{3,80};base64,[A-Za-z0-9+/_-]{40,}={0,2}|[A-Za-z0-9+/]{400,}={0,2}"
    r"|(?<![A-Za-z0-9+/])(?:[A-Za-z0-9+/]{60,76}(?:\r?\n|(?:\\r)?\\n)){4,}[A-Za-z0-9+/]{0,76}={0,2}"
)


def text_of(unit: str, size: int = 3 * SEARCHED) -> str:
    """Return a text that repeats a unit, with distinct names if it has a number."""
    return "".join(unit % n if "%" in unit else unit for n in range(size // len(unit)))


def pauses(work: Callable[[], object]) -> int:
    """Return how often some work pauses."""
    count = 0

    def run() -> None:
        nonlocal count

        def pause() -> None:
            nonlocal count
            count += 1

        begin_thread(pause)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return count


@pytest.mark.parametrize("unit", UNITS)
def test_collecting_names_pauses_in_proportion(unit: str) -> None:
    text = text_of(unit)
    assert pauses(lambda: collect([[SourceText("said", text)]])) >= len(text) // SEARCHED
    assert pauses(lambda: collect([[SourceText("said", "short")]])) < 5


@pytest.mark.parametrize("unit", UNITS)
def test_pieces_are_the_whole_text(unit: str) -> None:
    text = text_of(unit)
    assert "".join(pieces(text, re.compile(r"\s"))) == text
    assert fenced(f"{text}<user_message>{text}") == f"{text}&lt;user_message>{text}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("unit", "end"),
    combined(2, ["A" * 70, "A" * 399, "A" * 476, "data:a/b;base64," + "Q" * 40], ["\n", "\\n", " ", "=="]),
)
def test_base64_in_pieces_is_that_of_the_whole_text(unit: str, end: str) -> None:
    for number, before in ((1, "x "), (5, ""), (5, "x "), (SEARCHED // 40, "")):
        text = before + (unit + end) * number + unit * 3
        assert _without_base64(text, "[base64 data]") == BASE64.sub("[base64 data]", text)


@pytest.mark.parametrize("filler", ["plain words ", "key key ", "eyJ-", "\n- line", "token\n"])
def test_a_secret_in_a_long_text_is_redacted(filler: str) -> None:
    secret = "hunter2hunter2"
    for around in (filler * 3, filler * (2 * SEARCHED // len(filler))):
        clean = Redaction(secrets=True)(f"{around} \n--password {secret}\n{around} password = {secret}\n{around}")
        assert secret not in clean
        assert clean.count("[redacted]") >= 2


@pytest.mark.parametrize("size", [SEARCHED - 30, SEARCHED, SEARCHED + 4_000, 3 * SEARCHED])
def test_a_long_key_is_redacted_as_a_whole(size: int) -> None:
    for before in ("", "x " * (SEARCHED // 2 - 8)):
        assert Redaction(secrets=True)(f"{before}sk-1{'a' * size} b") == f"{before}[redacted] b"
