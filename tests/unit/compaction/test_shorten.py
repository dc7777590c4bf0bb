"""Test shortening a text, with and without loss."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.shorten import LEAST_BASE64, keep_ends, middle_cut, without_base64
from proxy.compaction.stages import evict_results as forms
from proxy.compaction.stages.evict_results import compact_json, grouped, lossless, without_colors, without_numbers
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


LINE = st.sampled_from(
    ["", " ", "a", "ok: done", "src/a.py:3:x", "src/a.py-4-y", "src/b.py:1:", " 12:x", "  7\tx", "9→"]
)
TEXT = st.lists(LINE | st.text(max_size=12), max_size=40).map("\n".join)

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
RAW = st.sampled_from(
    ["1.0", "1e400", "-0", "9" * 40, '"\\u00e9\\ud83d"', '"a  b\\n"', '{"k" : 1 ,\n "k" : 2}', "[ ]", "{ }"]
)
TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def parsed(text: str) -> Any:
    """Return the values of a JSON text with the text of its numbers, and all pairs of an object."""
    return json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=tuple)


def with_numbers(text: str) -> str:
    """Undo ``without_numbers``."""
    lines, made = text.split("\n"), []
    while lines:
        note = forms._NUMBERS_LINE.fullmatch(line := lines.pop(0))
        first = forms._NUMBERED.fullmatch(note[2]) if note else None
        if note is None or first is None:
            made.append(line)
            continue
        form, number = forms._numbers(first)
        made += [form % n + line for n, line in enumerate(lines[: int(note[1])], number)]
        del lines[: int(note[1])]
    return "\n".join(made)


def ungrouped(text: str) -> str:
    """Undo ``grouped``."""
    note, *lines = text.split("\n")
    if note != forms._GROUPS:
        return text
    made: list[str] = []
    path, inside = "", False
    for line in lines:
        match = forms._GROUPED.match(line)
        if match and not inside:
            path = made.pop()[:-1]
        inside = match is not None
        made.append(f"{path}{match[2]}{line[1:]}" if match else line)
    return "\n".join(made)


@given(VALUE, st.lists(RAW, max_size=3), st.integers(0, 8))
def test_json_keeps_its_tokens(value: Any, raws: list[str], indent: int) -> None:
    inner = json.dumps(value, indent=indent, ensure_ascii=bool(indent % 2))
    text = "[ " + " ,\n\t".join([inner, *raws]) + " ]\n"
    compact = compact_json(text)
    assert compact is not None
    assert len(compact) < len(text)
    assert TOKENS.findall(compact) == TOKENS.findall(text)
    assert parsed(compact) == parsed(text)
    assert lossless(text) == compact


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1',
        "{'a': 1}",
        "[1,\u00a02]",
        '["a\nb", 1]',
        "[1, 2] x",
        "plain, text: here",
        "[" * 300 + " " + "]" * 300,
        "",
    ],
)
def test_text_that_is_not_json_stays(text: str) -> None:
    assert compact_json(text) is None


@given(TEXT, st.integers(0, 99_990), st.integers(0, 6), st.sampled_from(["→", "\t", "|", "| "]), st.booleans())
def test_line_numbers_can_be_restored(text: str, first: int, width: int, sign: str, zeros: bool) -> None:
    pad = "0" if zeros else " "
    lines = text.split("\n")
    numbered = "\n".join(f"{str(first + n).rjust(width, pad)}{sign}{line}" for n, line in enumerate(lines))
    whole = f"head\n{numbered}\n\n{text}"
    assert with_numbers(without_numbers(whole)) == whole
    if len(lines) >= 8 and not zeros:
        assert "numbers of the next" in without_numbers(whole)


@given(
    st.lists(
        st.tuples(st.sampled_from(["src/a.py", "src/a.py-1", "b/c-2-d.go", "./x y.txt"]), st.integers(1, 99),
                  st.sampled_from(":-"), st.text(alphabet="ab:-1 ", max_size=8)),
        max_size=20,
    )
)  # fmt: skip
def test_search_results_of_similar_paths_can_be_restored(found: list[tuple[str, int, str, str]]) -> None:
    text = "\n".join(f"{path}{sign}{line}{sign}{rest}" for path, line, sign, rest in found)
    assert ungrouped(grouped(text)) == text


def test_search_results_are_grouped_by_file() -> None:
    text = (
        "src/a.py-2-before\nsrc/a.py:3:found\nsrc/a.py:9:again\n--\nsrc/b.py:1:other\n12:30:45 a time\n12:30:46 a time"
    )
    notes, *lines = grouped(text).split("\n")
    assert notes == forms._GROUPS
    assert lines == [
        "src/a.py:", " 2-before", " 3:found", " 9:again", "--", "src/b.py:1:other", "12:30:45 a time",
        "12:30:46 a time",
    ]  # fmt: skip


@given(TEXT)
def test_all_forms_together_can_be_restored(text: str) -> None:
    if not {"\r", "\x1b"} & set(text) and compact_json(text) is None:
        assert with_numbers(ungrouped(lossless(text))) == text


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows, for texts with colors, carriage returns, and erased lines."""
    shown = []
    for line in text.split("\n"):
        cells: list[str] = []
        column = 0
        for part in re.findall(r"\x1b\[[\d;]*[mK]|.", line, re.DOTALL):
            if part.endswith("K") and len(part) > 1:
                cells = [] if part == "\x1b[2K" else cells[:column]
                cells += [" "] * (column - len(cells))
            elif part == "\r":
                column = 0
            elif len(part) == 1:
                cells[column : column + 1] = [part]
                column += 1
        shown.append("".join(cells).rstrip())
    return shown


PART = st.sampled_from(
    ["10%", "100%", "#", "█▌", "done", " ", "\r", "\r", "\n", "\x1b[31m", "\x1b[0m", "\x1b[K", "\x1b[2K"]
)


@given(st.lists(PART, max_size=200).map("".join))
def test_a_terminal_shows_the_same(text: str) -> None:
    shown = without_colors(text)
    assert screen(shown) == screen(text)
    assert len(shown) <= len(text)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "\\' + '"\\' * 400_000, '{"a": ' + '"\\' * 400_000, "[" * 400_000 + ", ", '{"a": "' + "\\\\" * 400_000],
    ids=["open strings", "quotes", "depth", "open string"],
)
def test_what_only_looks_like_json_is_left_at_once(text: str) -> None:
    """With one search for the end of each string, these texts would take hours."""
    assert lossless(text) == text


def test_a_json_text_with_too_many_tokens_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MOST_TOKENS", 10)
    assert compact_json("[1, 2]") == "[1,2]"
    assert compact_json("[1, 2, 3, 4, 5, 6, 7]") is None


@pytest.mark.parametrize("end", ["", "\r", "\n", "\r\n[exit code 0]"])
def test_carriage_returns_stay(end: str) -> None:
    text = "\r".join(f"{number:3}% [{'#' * (number // 4):25}]" for number in range(100)) + end
    assert lossless(text) == text
