"""Test leaving out the middle of a text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.shorten import LEAST_BASE64, keep_ends, middle_cut, without_base64
from tests.kit.conversations import text_of_size, text_tokens

MARKER = "\n[{tokens} tokens, {characters} characters, {lines} lines]\n"
FILLED = re.compile(r"\n\[(\d+) tokens, (\d+) characters, (\d+) lines\]\n")


def test_both_ends_stay_on_whole_lines_and_the_marker_says_what_is_gone() -> None:
    lines = [f"line {n} of the output" for n in range(400)]
    text = "\n".join(lines)
    cut = middle_cut(text, 200, text_tokens, MARKER)
    head, tokens, characters, gone, tail = FILLED.split(cut)
    kept = head.splitlines(), tail.splitlines()
    assert lines[: len(kept[0])] == kept[0]
    assert lines[-len(kept[1]) :] == kept[1]
    assert len(kept[0]) > len(kept[1]) > 3
    assert int(gone) == len(lines) - len(kept[0]) - len(kept[1])
    assert int(characters) == len(text) - len(head) - len(tail)
    assert abs(int(tokens) - int(characters) / 4) < 5
    assert 150 < text_tokens(cut) <= 200


@given(st.integers(0, 6), st.integers(1, 3000), st.integers(20, 600))
def test_the_outcome_is_never_longer_than_allowed(flavour: int, size: int, limit: int) -> None:
    """This includes scripts with about one token per character, such as Chinese, and emoji."""
    text = text_of_size(size, flavour, size)
    cut = middle_cut(text, limit, text_tokens, MARKER)
    assert text_tokens(cut) <= limit
    assert (cut == text) == (text_tokens(text) <= limit)
    if cut != text:
        head, *_, tail = FILLED.split(cut)
        assert text.startswith(head)
        assert text.endswith(tail)


@pytest.mark.parametrize("characters", range(8, 60))
def test_a_surrogate_pair_is_never_parted(characters: int) -> None:
    """Texts from other runtimes may contain surrogate pairs as two characters."""
    text = "\ud83d\ude42" * 50
    head, *_, tail = FILLED.split(keep_ends(text, characters, 100, MARKER))
    assert len(head) % 2 == len(tail) % 2 == 0


BASE64 = re.compile(rf"(?:data:[\w/+.-]{{3,60}};base64,)?[A-Za-z0-9+/]{{{LEAST_BASE64},}}={{0,2}}")
PIECES = st.one_of(
    st.sampled_from(["data:image/png;base64,", "data:", ";base64,", "=", "===", ":", " ", "\n", "-", "é"]),
    st.sampled_from([1, 5, 199, 200, 201, 399, 400, 401, 600, 1000]).map(lambda length: "aB0+/"[length % 5] * length),
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_base64_is_found_as_one_expression_would_find_it(text: str) -> None:
    expected = BASE64.sub(lambda match: f"<{len(match.group()):,}>", text)
    assert without_base64(text, "<{characters}>") == expected
