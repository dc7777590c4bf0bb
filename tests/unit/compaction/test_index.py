"""Test the index: its choice of names, its form, and its size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compaction.identifiers import Access, Names, SourceText, collect
from proxy.compaction.index import index
from tests.kit.conversations import text_tokens

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
