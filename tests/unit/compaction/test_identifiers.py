"""Test the collection of names, their ranking, and their index."""

from __future__ import annotations

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
    argument_text,
    collect,
    index,
    parsed,
    ranking,
    search_in,
)
from proxy.compaction.summary_message import fenced
from proxy.summary import prompt as transcript
from proxy.summary.quality import Written, checked
from tests.kit.conversations import FORMAT, result, text_tokens, turn


def in_results(*texts: str, files: list[tuple[Access, str]] | None = None) -> Names:
    return collect(([("result", text)] for text in texts), None, files or [])


def listing(found: Names, tokens: int = 500, shown: str = "") -> list[str]:
    return index(found, shown, tokens, text_tokens).split("\n")


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("see https://example.org/a?b=1#c.", "url", ["https://example.org/a?b=1#c"]),
        ('"http://localhost:8080/x", then', "url", ["http://localhost:8080/x"]),
        ("open /etc/hosts and ~/notes/todo", "path", ["/etc/hosts", "~/notes/todo"]),
        ("in src/app/main.py:42, ../lib/util.ts", "path", ["src/app/main.py", "../lib/util.ts"]),
        ("./run/me now; read/write and/or", "path", ["./run/me"]),
        ("see main.go, a.test.ts, and fmt.Println", "file", ["main.go", "a.test.ts"]),
        ("fix ABC-123 and X2-9, not AB-12-34; closes #4711", "ticket", ["ABC-123", "X2-9", "#4711"]),
        (
            "E1234, HTTP-404, UTF-8, TS2345, E12345x, ERRORS-1",
            "error",
            ["E1234", "HTTP-404", "UTF-8", "TS2345"],
        ),
        ("book 4WQ150, FACT-7QX2A (ORD-8F-3K2)", "code", ["4WQ150", "FACT-7QX2A", "ORD-8F-3K2"]),
        ("order #W2378156, and half of it", "code", ["#W2378156"]),
        ("not 123456, CONSTANT, UTF-8, x4WQ150, 4WQ150y or A1B2", "code", []),
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
        ("Yusuf paid us. He is happy, is He? Paid in full.", "proper", ["Yusuf"]),
        ("nothing at all here, 2024, a-b, I/O", "path", []),
    ],
)  # fmt: skip
def test_what_is_found(text: str, kind: str, names: list[str]) -> None:
    assert [name for name, mention in in_results(text).items() if mention.kind == kind] == names


def test_mentions_are_counted_by_their_place_and_added_to_earlier_ones() -> None:
    first = collect([[("said", "getUser? getUser!"), ("call", "getUser")], [("result", "getUser")]])
    assert first == {"getUser": Mention("name", 4, 3, 1, 1, 1)}
    both = collect([[("result", "getUser other_name")]], first, start=2)
    assert both == {"getUser": Mention("name", 5, 4, 1, 1, 2), "other_name": Mention("name", 1, 1, 0, 0, 2)}
    assert first["getUser"].count == 4


def test_escapes_in_embedded_json_are_no_part_of_names() -> None:
    assert list(in_results(r'{"text": "call\n\tgetUser\nthen"}')) == ["getUser"]
    arguments = r'{"edits": [{"old": "\tgetUser\n", "count": 12345}], "ok": true, "none": null}'
    assert argument_text(parsed(arguments)).split() == ["edits", "ok", "none", "old", "count", "getUser", "12345"]
    assert argument_text(parsed("not JSON")) == "not JSON"
    assert argument_text(parsed("[" * 100_000)) == "[" * 100_000


def test_names_that_calls_and_messages_mention_come_first() -> None:
    found = collect([
        [("result", "inResult inResult")],
        [("call", "inCall")],
        [("said", "inText")],
        [("result", "often often_named often_named often_named FACT-7QX2A Word")],
    ])  # fmt: skip
    assert ranking(found) == ["FACT-7QX2A", "inCall", "inText", "often_named", "inResult", "Word"]


def test_of_very_many_the_likeliest_are_kept() -> None:
    found = in_results("wanted_name " * 90 + " ".join(f"AB-{n}" for n in range(MOST + 50)))
    assert (len(found), "wanted_name" in found) == (MOST, True)


def test_files_that_calls_wrote_or_read_come_first() -> None:
    read: list[tuple[Access, str]] = [("read", "/src/a.py"), ("read", "/lib/c.py"), ("read", "notes.md")]
    written: list[tuple[Access, str]] = [("written", "/src/a.py"), ("written", "/src/b.py"), ("read", "/src/a.py")]
    files: list[tuple[Access, str]] = [*read, *written, ("file", "/srv/data"), ("file", "/lib/c.py")]
    assert listing(in_results("/src/a.py ../x/y.ts /etc/hosts", files=files)) == [
        "- /src/ (written): b.py a.py",
        "- /lib/ (read): c.py",
        "- ./ (read): notes.md",
        "- /srv/: data",
        "- ../x/: y.ts",
        "- /etc/: hosts",
    ]


def test_a_folder_that_many_lines_share_is_named_once() -> None:
    root = "/home/ann/projects/shop"
    files = [f"{root}/{folder}/{name}.py" for folder in ("api", "web/views", "db") for name in ("a1", "b2", "c3", "d4")]
    assert listing(in_results(" ".join([*files, "/etc/hosts"]))) == [
        f"- in {root}/:",
        "  - api/: a1.py b2.py c3.py d4.py",
        "  - db/: a1.py b2.py c3.py d4.py",
        "  - web/views/: a1.py b2.py c3.py d4.py",
        "- /etc/: hosts",
    ]


def test_a_relative_path_is_the_same_file_as_the_longer_one() -> None:
    found = collect([[("call", "/home/ann/shop/api/a1.py"), ("result", "api/a1.py ./api/a1.py a1.py a2.py")]])
    assert listing(found) == ["- /home/ann/shop/api/: a1.py", "- ./: a2.py"]


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


words = st.sampled_from(
    ("/a/b", "src/x.py", "AB-1", "https://e.org/", "0123456789abcdef", "日本/語.txt", "x" * 90, "aName")
)


@given(st.lists(st.tuples(words, st.integers(0, 999)), max_size=200), st.integers(0, 400))
def test_the_index_takes_no_more_than_its_tokens(items: list[tuple[str, int]], limit: int) -> None:
    files: list[tuple[Access, str]] = [(("written", "read", "file")[n % 3], f"{word}{n % 7}") for word, n in items[::2]]
    found = in_results(*(f"{word}{number}" for word, number in items), files=files)
    assert text_tokens(index(found, "", limit, text_tokens)) <= limit


LENGTH = 1 << 18
"""Characters. Quadratic time would be minutes at this length, and linear time is milliseconds."""

HOSTILE = (
    "a", "/", "a/", "A-", "1", "0a", " ", "<", "< ", "@", "@/", "+a", "./", "~/", "a/.", "https://a", "data:a;base64,",
    "QUJD", "a" * 399 + " ", "a" * 63 + "-", "日", "12345678-1234-", "< /user_message",
)  # fmt: skip


def regex_users() -> dict[str, Callable[[str], object]]:
    def refusal(text: str) -> object:
        return checked(Written(text, "stop"), transcript="", source_tokens=10**9, max_tokens=10**9, count=len)

    return {
        "artefacts": lambda text: in_results(text),
        "summary fence": fenced,
        "transcript fence": transcript.fenced,
        "base64": lambda text: transcript.entries([turn(result("a", text))], FORMAT),
        "refusal": lambda text: refusal("x" + text),
    }


@pytest.mark.timeout(10)
@pytest.mark.parametrize("block", HOSTILE, ids=lambda block: repr(block[:12]))
@pytest.mark.parametrize("name", regex_users())
def test_expressions_are_linear(name: str, block: str) -> None:
    """Match a long text of near matches."""
    text = (block * (LENGTH // len(block) + 1))[:LENGTH]
    regex_users()[name](text)


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
