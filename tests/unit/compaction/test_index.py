"""Test the names of a conversation: their collection, ranking, index, and retention."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.identifiers import (
    MOST,
    PIECE,
    Access,
    Mention,
    Names,
    SourceText,
    collect,
    is_program,
    ranking,
    search_in,
)
from proxy.compaction.index import index
from proxy.compaction.named_files import argument_text, parsed, portable
from proxy.compaction.summary_message import MOST_NAMES, fenced, retention, target
from proxy.compaction.summary_message import parts_by_file as parts
from proxy.summary import prompt as transcript
from proxy.summary.quality import Written, checked
from tests.kit.conversations import FORMAT, result, text_tokens, turn

Files = list[tuple[Access, str]]


def in_results(*texts: str, file: str = "", files: Files | None = None) -> Names:
    used = [(access, name, position) for position, (access, name) in enumerate(files or [])]
    return collect(([SourceText("result", text, file)] for text in texts), None, used)


def listing(found: Names, tokens: int = 500, shown: str = "") -> list[str]:
    return index(found, shown, tokens, text_tokens).split("\n")


def test_names_that_cannot_be_guessed_are_listed_even_if_they_occurred_once() -> None:
    often = [SourceText("call", f"{name}Common src/{name}.py") for name in "abcdefghijklmnopqrst"]
    once = [SourceText("result", "AB-1 in load_123 of /a/b456/once.py"), SourceText("result", "load_789", "src/a.py")]
    listed = " ".join(listing(collect([once, often, often]), 60)).split()
    # A word of a file can be read again there, and the digits of a folder don't make a file rare.
    assert [name in listed for name in ("AB-1", "load_123", "load_789", "once.py")] == [True, True, False, False]


def test_the_same_file_of_windows_is_listed_once_below_its_folder() -> None:
    root = r"D:\home\ann\projects\shop"
    files: Files = [("read", rf"{root}\api\a1.go"), ("written", f"{root.replace(chr(92), '/')}/api/b2.go")]
    text = rf"{root}\api\b2.go {root}\my web\c3.go api/a1.go {root}\web\d4.go {root}\db\e5.go"
    assert listing(in_results(text, files=files)) == [
        rf"- in {root}{chr(92)}:",
        "  - api/ (written): b2.go",
        "  - api/ (read): a1.go",
        "  - db/: e5.go",
        "  - web/: d4.go",
        "- ./: c3.go",
    ]


def test_a_relative_path_is_the_same_file_as_the_longer_one() -> None:
    whole = "/home/ann/shop/api/a1.py"
    found = collect(
        [[SourceText("call", whole), SourceText("result", "api/a1.py ./api/a1.py a1.py a2.py ../shop/api/a1.py")]]
    )
    assert listing(found) == ["- /home/ann/shop/api/: a1.py", "- ./: a2.py"]
    imports = [
        SourceText("result", "import '../lib/a2' './b3.js'", "src/a1.ts"),
        SourceText("call", "'../c4.js'", "src/a1.ts"),
    ]
    others = [SourceText("call", "run ./d5.js", "./d5.js"), SourceText("said", "../e6.js")]
    assert listing(collect([imports, others])) == [
        "- ../: e6.js", "- ./: d5.js",
    ]  # fmt: skip


def test_names_with_spaces_are_quoted() -> None:
    files: Files = [("read", "/a/b.py"), ("read", "/a/two words.md")]
    assert listing(in_results("", files=files)) == ['- /a/ (read): "two words.md" b.py']


@pytest.mark.parametrize("limit", [0, 50, 400, 2_000])
def test_long_names_of_shared_folders_stay_in_the_limit(limit: int) -> None:
    folders = [f"/{n % 90}/{'long-name-' * 9}{n}" for n in range(300)]
    files: Files = [("read", f"{folder}/{n} {n}.py") for n in range(3) for folder in folders]
    assert text_tokens(index(in_results("", files=files), "", limit, text_tokens)) <= limit


def test_small_folders_share_the_line_of_their_parent() -> None:
    paths = "/a/b/one.py /a/b/two.py /a/c/three.py /a/d/1.py /a/d/2.py /a/d/3.py /a/d/4.py /e/f/5.py"
    assert sorted(listing(in_results(paths))) == [
        "- /a/: b/one.py b/two.py c/three.py",
        "- /a/d/: 1.py 2.py 3.py 4.py",
        "- /e/f/: 5.py",
    ]


@pytest.mark.parametrize("folders", [1, 7, 400])
def test_the_index_uses_its_tokens_up(folders: int) -> None:
    found = in_results(" ".join(f"/src/part{n % folders}/file{n}.py some_name{n}" for n in range(400)))
    assert 300 < text_tokens(index(found, "", 400, text_tokens)) <= 400


words = st.sampled_from(
    ("/a/b", "src/x.py", "AB-1", "https://e.org/", "0123456789abcdef", "日本/語.txt", "x" * 90, "aName")
)


@given(st.lists(st.tuples(words, st.integers(0, 999)), max_size=200), st.integers(0, 400))
def test_the_index_takes_no_more_than_its_tokens(items: list[tuple[str, int]], limit: int) -> None:
    files: Files = [(("written", "read", "file")[n % 3], f"{word}{n % 7}") for word, n in items[::2]]
    found = in_results(*(f"{word}{number}" for word, number in items), files=files)
    assert text_tokens(index(found, "", limit, text_tokens)) <= limit


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("see https://example.org/a?b=1#c.", "url", ["https://example.org/a?b=1#c"]),
        ('"http://localhost:8080/x", then', "url", ["http://localhost:8080/x"]),
        ("open /etc/hosts.d and ~/notes/to.do", "path", ["/etc/hosts.d", "~/notes/to.do"]),
        ("in src/app/main.py:42, .github/a.yml; read/write and/or", "path", ["src/app/main.py", ".github/a.yml"]),
        ("/dev/null /usr/bin/env /etc/hosts /api/users ./run/me ../lib/util.ts", "path", []),
        (r'"C:\\Users\\ann\\a.go", D:\proj\b.go:12 or D:\proj', "path", ["C$/Users/ann/a.go", "D$/proj/b.go"]),
        ("see main.go, a.test.ts, fmt.Println, and console.log", "file", ["main.go", "a.test.ts"]),
        ("fix ABC-123 and X2-9, not AB-12-34; closes #4711", "ticket", ["ABC-123", "X2-9", "#4711"]),
        (
            "E1234, HTTP-404, UTF-8, TS2345, E12345x, ERRORS-1",
            "error",
            ["E1234", "HTTP-404", "UTF-8", "TS2345"],
        ),
        ("book 4WQ150, FACT-7QX2A (ORD-8F-3K2)", "code", ["4WQ150", "FACT-7QX2A", "ORD-8F-3K2"]),
        ("order #W2378156, and half of it", "code", ["#W2378156"]),
        ("not 123456, CONSTANT, UTF-8, x4WQ150, 4WQ150y or A1B2", "code", []),
        ("331MB at 2026-03-05T10:22:31.4264424Z, 20260305T102231Z", "code", []),
        ("due 2026-03-05T10:22:31Z, not 2026-03-05", "date", ["2026-03-05"]),
        ("id 123e4567-e89b-12d3-a456-426614174000!", "uuid", ["123e4567-e89b-12d3-a456-426614174000"]),
        ("commit 0123456789abcdef, deadbeefcafe, 1a2b3c4", "hash", ["0123456789abcdef", "1a2b3c4"]),
        ("getUser(HttpClient, MAX_SIZE, plain, Title)", "name", ["getUser", "HttpClient", "MAX_SIZE"]),
        ("a snake_case name, URLs and $homeDir", "name", ["snake_case", "homeDir"]),
        ("call client.sendRequest", "name", ["sendRequest"]),
        ("run it with --no-verify -n --x", "flag", ["--no-verify"]),
        ("write to ann.lee@example.org.", "email", ["ann.lee@example.org"]),
        ("it costs $1,234.50 or € 99, due 2026-03-05", "amount", ["$1,234.50", "€ 99"]),
        ("it costs $1,234.50, due 2026-03-05 at v1.22.0", "date", ["2026-03-05"]),
        ("item 1151293680, zip 19122, line 42", "number", ["1151293680", "19122"]),
        ('{"name": "Yusuf Rossi", "state": "Paid in full. Please go"}', "proper", ["Yusuf", "Rossi"]),
        ("nothing at all here, 2024, a-b, I/O", "path", []),
    ],
)  # fmt: skip
def test_what_is_found(text: str, kind: str, names: list[str]) -> None:
    assert [name for name, mention in in_results(text).items() if mention.kind == kind] == names


def test_mentions_are_counted_by_their_place_and_added_to_earlier_ones() -> None:
    first = collect(
        [[SourceText("said", "getUser? getUser!"), SourceText("call", "getUser")], [SourceText("result", "getUser")]]
    )
    assert first == {"getUser": Mention("name", 4, 3, 1, 1, 1)}
    both = collect([[SourceText("result", "getUser other_name")]], first, start=2)
    assert both == {"getUser": Mention("name", 5, 4, 1, 1, 2), "other_name": Mention("name", 1, 1, 0, 0, 2)}
    assert first["getUser"].count == 4


def test_capitals_at_the_start_of_a_sentence_make_no_name() -> None:
    said = "Please ask Yusuf Rossi. Stop! Total: 5\nIt was Maria, we go on. Is Ann here?"
    assert list(collect([[SourceText("said", said)], [SourceText("result", "Saved by Olga. Done with Piotr")]])) == [
        "Yusuf", "Rossi", "Maria",
    ]  # fmt: skip


def test_escapes_in_embedded_json_are_no_part_of_names() -> None:
    assert list(in_results(r'{"text": "call\n\tgetUser\nthen"}')) == ["getUser"]
    assert list(in_results(r'{"html": "\u003egetUser\u003c", "road": "via_Z\u00fcrich"}')) == ["getUser", "via_Zürich"]
    arguments = r'{"edits": [{"old": "\tgetUser\n", "count": 12345}], "ok": true, "none": null}'
    assert argument_text(parsed(arguments)).split() == ["edits", "ok", "none", "old", "count", "getUser", "12345"]
    assert argument_text(parsed("not JSON")) == "not JSON"
    assert argument_text(parsed("[" * 100_000)) == "[" * 100_000


def test_words_of_a_file_come_before_others_and_its_figures_last() -> None:
    text = "inFile https://example.org/x 12345 AB-123"
    found = collect([[SourceText("result", text, "src/a.py"), SourceText("result", "inLog src/b.py AB-124")]])
    assert ranking(found) == ["AB-124", "inFile", "src/b.py", "inLog", "AB-123", "https://example.org/x", "12345"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\n\ndef load_table(name):\n", True),
        ("     1\u2192package main\n     2\u2192func loadTable() error {", True),
        ("failed to read config: no such file\nthis is a text about it", False),
        ("", False),
    ],
)
def test_a_program_defines_names(text: str, expected: bool) -> None:
    assert is_program(text) == expected


def test_of_very_many_the_likeliest_are_kept() -> None:
    found = in_results("wanted_name " * 90 + " ".join(f"AB-{n}" for n in range(MOST + 50)))
    assert (len(found), "wanted_name" in found) == (MOST, True)


@pytest.mark.parametrize("before", range(PIECE - 60, PIECE + 10, 7))
def test_nothing_is_missed_where_a_long_text_is_parted(before: int) -> None:
    text = (
        "w" * (before % 50) + " word" * (before // 5) + " https://example.org/a/rather/long/address.html\n/a/b.py AB-1 "
    )
    assert list(in_results(text + "word " * 9000)) == [
        "/a/b.py",
        "AB-1",
        "https://example.org/a/rather/long/address.html",
    ]


LENGTH = 1 << 16
"""Characters. Quadratic time would be minutes at this length, and linear time is milliseconds."""

HOSTILE = (
    "a", "/", "a/", "A-", "1", "0a", " ", "<", "< ", "@", "@/", "+a", "./", "~/", "a/.", "https://a", "data:a;base64,",
    "QUJD", "a" * 399 + " ", "a" * 63 + "-", "日", "12345678-1234-", "< /user_message",
    "C:\\", "a b\\", "C:\\a b c ", "\n", "\na b", "\nab cd (", "a.go:1:\n", "a.go-",
    "\na/a.a/", "a.a.", ", Ab", "\n1:", "a\\",
)  # fmt: skip


def regex_users() -> dict[str, Callable[[str], object]]:
    def refusal(text: str) -> object:
        return checked(Written(text, "stop"), transcript="", source_tokens=10**9, max_tokens=10**9, count=len)

    return {
        "artefacts": lambda text: in_results(text, file="a.py"),
        "lines": lambda text: parts("result", f"a:1: {text}"),
        "targets": lambda text: target("run", {}, text[:2000]),
        "paths of Windows": portable,
        "proper names": lambda text: collect([[SourceText("said", text)]]),
        "summary fence": fenced,
        "transcript fence": transcript.fenced,
        "base64": lambda text: transcript.entries([turn(result("a", text))], FORMAT),
        "refusal": lambda text: refusal(f"x{text}x"),
    }


@pytest.mark.long
@pytest.mark.timeout(10)
@pytest.mark.parametrize("block", HOSTILE, ids=lambda block: repr(block[:12]))
def test_expressions_are_linear(block: str) -> None:
    """Match a long text of near matches."""
    text = (block * (LENGTH // len(block) + 1))[:LENGTH]
    for search in regex_users().values():
        search(text)


LONG = ("", f"{'x' * 299}Y", f"{'x' * 299}Yz", f"{'x' * 290}Y{'z' * 20}")


@given(st.text("aB9_./-é漢→ \n(", max_size=30), st.sampled_from(LONG), st.sampled_from(("é ", "漢 ", "→ ")))
def test_words_are_the_same_next_to_other_scripts(text: str, long: str, other: str) -> None:
    """Texts in ASCII are split in another way."""
    assert in_results(f"{other}{text} {long} see_this") == in_results(f"{text} {long} see_this")


@given(
    st.lists(st.sampled_from(["ab", "abc", "b", "a b", "é", "/", "."]), max_size=12), st.sampled_from([" ", "\n", ""])
)
def test_a_name_is_in_a_text_like_any_part_of_it(words: list[str], between: str) -> None:
    text = between.join(words)
    is_in = search_in(text)
    for name in ("ab", "bc", "a b", "b ab", "abc/", "é.", "x", ""):
        assert is_in(name) == (name in text)


TEXT = "src/app/main.py calls loadUserTable and save_user_table for order 4711223, raises ParseError and TS2304"


def test_names_are_counted_by_kind() -> None:
    names = collect([[SourceText("result", TEXT)]])
    prompt = ["- src/app/: main.py", "saveIt, ParseError, order 4711223, and loadUserTable"]
    assert retention([names], prompt, archived=True) == {
        "files": (1, 0, 0),
        "identifiers": (1, 1, 0),
        "numbers": (1, 0, 0),
        "errors": (1, 1, 0),
    }
    assert retention([names], [], archived=False) == {
        "files": (0, 0, 1),
        "identifiers": (0, 0, 2),
        "numbers": (0, 0, 1),
        "errors": (0, 0, 2),
    }


def test_the_likeliest_names_count_once() -> None:
    often = {f"often_{number}": Mention("name", 9, 9, 9, 9, 1) for number in range(MOST_NAMES - 1)}
    once = {f"once_{number}": Mention("name", 1, 1, 0, 0, 1) for number in range(50)}
    assert retention([once, often, dict(often)], list(often), archived=False) == {"identifiers": (MOST_NAMES - 1, 0, 1)}


def test_nothing_is_counted_without_names() -> None:
    assert retention([], ["any text"], archived=True) == {}
