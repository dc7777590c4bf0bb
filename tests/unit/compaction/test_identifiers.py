"""Test the collection of paths, URLs, and identifiers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.identifiers import MOST, PIECE, Access, identifiers, index
from proxy.compaction.summary_message import fenced
from proxy.summary import prompt as transcript
from proxy.summary.quality import Written, checked
from tests.kit.conversations import FORMAT, result, text_tokens, turn


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("see https://example.org/a?b=1#c.", "url", ["https://example.org/a?b=1#c"]),
        ('"http://localhost:8080/x", then', "url", ["http://localhost:8080/x"]),
        ("open /etc/hosts and ~/notes/todo", "path", ["/etc/hosts", "~/notes/todo"]),
        ("in src/app/main.py:42, ../lib/util.ts", "path", ["src/app/main.py"]),
        ("from '../lib/util.ts'", "import", ["../lib/util.ts"]),
        ("./run/me now; read/write and/or", "path", ["./run/me"]),
        ("fix ABC-123 and X2-9, not AB-12-34", "ticket", ["ABC-123", "X2-9"]),
        (
            "E1234, ERR_NO_FILE, HTTP-404, UTF-8, TS2345, E12345x, ERRORS-1",
            "error",
            ["E1234", "ERR_NO_FILE", "HTTP-404", "UTF-8", "TS2345"],
        ),
        ("E1234, HTTP-404, UTF-8, TS2345", "ticket", []),
        ("book 4WQ150, FACT-7QX2A (ORD-8F-3K2)", "code", ["4WQ150", "FACT-7QX2A", "ORD-8F-3K2"]),
        ("not 123456, CONSTANT, UTF-8, x4WQ150, 4WQ150y or A1B2", "code", []),
        ("id 123e4567-e89b-12d3-a456-426614174000!", "uuid", ["123e4567-e89b-12d3-a456-426614174000"]),
        ("commit 0123456789abcdef, deadbeefcafe", "hash", ["0123456789abcdef"]),
        ("nothing at all here, 2024, a-b, I/O", "path", []),
    ],
)
def test_what_is_found(text: str, kind: str, found: list[str]) -> None:
    assert identifiers([text])[kind] == found


def test_each_stands_once_in_the_order_of_its_last_mention() -> None:
    earlier = identifiers(["/a/one /a/two"])
    assert identifiers(["/a/three then /a/one"], earlier)["path"] == ["/a/two", "/a/three", "/a/one"]


def test_of_very_many_the_newest_are_kept() -> None:
    found = identifiers([" ".join(f"AB-{n}" for n in range(MOST + 50))])["ticket"]
    assert (len(found), found[0], found[-1]) == (MOST, "AB-50", f"AB-{MOST + 49}")


def test_the_index_puts_files_under_their_folder_and_takes_the_newest_first() -> None:
    found = identifiers(["/src/a.py /src/b.py /lib/c.py AB-1 https://example.org/x"])
    assert index(found, 500, text_tokens).split("\n") == [
        "- AB-1",
        "- https://example.org/x",
        "- /src/: a.py b.py",
        "- /lib/: c.py",
    ]
    few = index(identifiers([" ".join(f"/src/file{n}.py" for n in range(100))]), 30, text_tokens)
    assert "file99.py" in few
    assert "file0.py" not in few


def test_files_that_calls_wrote_or_read_come_first_and_noise_last() -> None:
    read: list[tuple[Access, str]] = [("read", "/src/a.py"), ("read", "/lib/c.py"), ("read", "notes.md")]
    written: list[tuple[Access, str]] = [("written", "/src/a.py"), ("written", "/src/b.py"), ("read", "/src/a.py")]
    texts = ["AB-1 E1234 ../x/y.ts /src/a.py https://example.org/x ERR_GONE ORD-8F-3K2 /etc/hosts"]
    found = identifiers(texts, identifiers([], None, read), [*written, ("file", "/srv/data"), ("file", "/lib/c.py")])
    assert index(found, 500, text_tokens).split("\n") == [
        "- /src/ (written): b.py a.py",
        "- ./ (read): notes.md",
        "- /lib/ (read): c.py",
        "- AB-1",
        "- https://example.org/x",
        "- /srv/: data",
        "- ORD-8F-3K2",
        "- /etc/: hosts",
        "- ../x/: y.ts",
        "- E1234, ERR_GONE",
    ]


def test_rare_identifiers_have_room_beside_many_files() -> None:
    files: list[tuple[Access, str]] = [
        (access, f"/{access}/part{n}/file{n}.py") for n in range(400) for access in ("written", "read")
    ]
    listed = index(identifiers(["AB-1 https://example.org/x"], None, files), 400, text_tokens)
    for last in ("/written/ (written): ", "part399/file399.py", "/read/ (read): ", "- AB-1", "- https://example.org/x"):
        assert last in listed
    assert listed.count("(written)") == listed.count("(read)") == 1


def test_names_with_spaces_are_quoted() -> None:
    files: list[tuple[Access, str]] = [("read", "/a/b.py"), ("read", "/a/two words.md")]
    assert index(identifiers([], None, files), 500, text_tokens) == '- /a/ (read): b.py "two words.md"'


@pytest.mark.parametrize("limit", [0, 50, 400, 2_000])
def test_long_names_of_shared_folders_stay_in_the_limit(limit: int) -> None:
    folders = [f"/{n % 90}/{'long-name-' * 9}{n}" for n in range(300)]
    files: list[tuple[Access, str]] = [("read", f"{folder}/{n} {n}.py") for n in range(3) for folder in folders]
    assert text_tokens(index(identifiers([], None, files), limit, text_tokens)) <= limit


def test_small_folders_share_the_line_of_their_parent() -> None:
    paths = "/a/b/one.py /a/b/two.py /a/c/three.py /a/d/1.py /a/d/2.py /a/d/3.py /a/d/4.py /e/f/5.py"
    assert index(identifiers([paths]), 500, text_tokens).split("\n") == [
        "- /a/: b/one.py b/two.py c/three.py",
        "- /a/d/: 1.py 2.py 3.py 4.py",
        "- /e/f/: 5.py",
    ]


@pytest.mark.parametrize("folders", [1, 7, 400])
def test_the_index_uses_its_tokens_up(folders: int) -> None:
    found = identifiers([" ".join(f"/src/part{n % folders}/file{n}.py" for n in range(400))])
    listed = index(found, 400, text_tokens)
    assert 330 < text_tokens(listed) <= 400
    # The newest are listed, and none that is older than an omitted one.
    there = [f"file{n}.py" in listed for n in range(400)]
    assert there == sorted(there)


@pytest.mark.parametrize("before", range(PIECE - 60, PIECE + 10, 7))
def test_nothing_is_missed_where_a_long_text_is_parted(before: int) -> None:
    text = (
        "w" * (before % 50) + " word" * (before // 5) + " https://example.org/a/rather/long/address.html\n/a/b.py AB-1 "
    )
    found = identifiers([text + "word " * 9000])
    assert found["url"] == ["https://example.org/a/rather/long/address.html"]
    assert (found["path"], found["ticket"]) == (["/a/b.py"], ["AB-1"])


words = st.sampled_from(("/a/b", "src/x.py", "AB-1", "https://e.org/", "0123456789abcdef", "日本/語.txt", "x" * 90))


@given(st.lists(st.tuples(words, st.integers(0, 999)), max_size=200), st.integers(0, 400))
def test_the_index_takes_no_more_than_its_tokens(items: list[tuple[str, int]], limit: int) -> None:
    files: list[tuple[Access, str]] = [(("written", "read", "file")[n % 3], f"{word}{n % 7}") for word, n in items[::2]]
    found = identifiers((f"{word}{number}" for word, number in items), None, files)
    assert text_tokens(index(found, limit, text_tokens)) <= limit


LENGTH = 1 << 18
"""Characters. Quadratic time would be minutes at this length, and linear time is milliseconds."""

HOSTILE = (
    "a", "/", "a/", "A-", "1", "0a", " ", "<", "< ", "@", "@/", "+a", "./", "~/", "a/.", "https://a", "data:a;base64,",
    "QUJD", "a" * 399 + " ", "a" * 63 + "-", "日", "12345678-1234-", "< /user_message",
)  # fmt: skip


def regex_users() -> dict[str, Callable[[str], object]]:
    def refusal(text: str) -> object:
        return checked(Written(text, "stop"), source_tokens=10**9, max_tokens=10**9, count=len)

    return {
        "artefacts": lambda text: identifiers([text]),
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
