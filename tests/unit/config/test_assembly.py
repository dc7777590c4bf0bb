"""Test files that include others, and their sources."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from proxy.config import load, read
from tests.kit.configurations import check

HASH = "sha256:" + "ab" * 32


def laid_out(folder: Path, files: dict[str, str]) -> Path:
    """The files in a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return folder


def complaints(entry: Path, below: Path) -> list[str]:
    """Return the output of ``check``, with paths relative to a folder."""
    return [line.replace(f"{below}/", "") for line in check(entry, {})]


MAIN = """
    include: ["teams/*.yaml", extra.yaml]
    upstreams: {main: {}}
    policies:
      default: {keep: {messages: 4}}
"""


SEARCH = f"""
    policies:
      careful: {{extends: default, trigger: {{tokens: 5000}}}}
    teams:
      search: {{keys: ["{HASH}"], policy: careful}}
"""


def test_included_files_join(tmp_path: Path) -> None:
    laid_out(tmp_path, {"main.yaml": MAIN, "teams/search.yaml": SEARCH, "extra.yaml": "policies: {more: {}}\n"})
    (tmp_path / "teams" / ".hidden.yaml").write_text("nonsense: [")
    (tmp_path / "teams" / "note.txt").write_text("nonsense: [")
    found = load(tmp_path / "main.yaml", {})
    assert list(found.policies) == ["default", "careful", "more"]
    assert found.policies["careful"].keep == found.policies["default"].keep
    assert found.teams["search"].policy == "careful"


def test_a_folder_is_its_files_and_those_of_policies(tmp_path: Path) -> None:
    files = {
        "10-upstreams.yaml": "upstreams: {main: {}}\n",
        "20-policies.yaml": "policies: {default: {keep: {messages: 4}}}\n",
        "policies/search.yaml": SEARCH,
        "policies/deeper/other.yaml": "nonsense: 1\n",
        "other/third.yaml": "nonsense: 1\n",
    }
    loaded = read(laid_out(tmp_path, files), {})
    assert [str(source.path.relative_to(tmp_path)) for source in loaded.sources.files] == [
        "10-upstreams.yaml",
        "20-policies.yaml",
        "policies/search.yaml",
    ]
    assert loaded.settings.teams["search"].policy == "careful"
    assert loaded.warnings == ()


WRONG: dict[str, tuple[dict[str, str], list[str]]] = {
    "another section": (
        {"main.yaml": MAIN, "extra.yaml": "\n\nserver: {port: 1}\n"},
        ["extra.yaml:1: server: this file may only hold 'policies' and 'teams'. Fix: move it to the file that"],
    ),
    "a section that is nearly one": (
        {"main.yaml": MAIN, "extra.yaml": "teams: {}\npolcies: {}\n"},
        ["extra.yaml:2: polcies: this file may only hold 'policies' and 'teams'. Fix: did you mean 'policies'?"],
    ),
    "a value": (
        {"main.yaml": MAIN, "extra.yaml": "policies:\n  a:\n    keep: {fraction: 2}\n"},
        ["extra.yaml:3: policies.a.keep.fraction: must be over 0"],
    ),
    "an unknown parent": (
        {"main.yaml": MAIN, "extra.yaml": "policies:\n  a:\n    extends: defualt\n"},
        ["extra.yaml:3: policies.a.extends: there is no policy 'defualt'. Fix: did you mean 'default'?"],
    ),
    "a circle through two files": (
        {"main.yaml": MAIN + "      b: {extends: c}\n", "extra.yaml": "policies:\n  c: {extends: b}\n"},
        ["main.yaml:5: policies.b.extends: goes in a circle (b → c → b)"],
    ),
    "a file that is not there": (
        {"main.yaml": MAIN},
        ["main.yaml:1: include: there is no file 'extra.yaml' in"],
    ),
    "a number for a file": (
        {"main.yaml": "include:\n  - 7\n"},
        ["main.yaml:2: include[0]: must be text (got '7', which YAML reads as a number)"],
    ),
    "a variable that is not set": (
        {"main.yaml": MAIN, "extra.yaml": "teams:\n  t: {policy: '${NOWHERE}'}\n"},
        ["extra.yaml:2: ${NOWHERE} isn't set"],
    ),
    "a list of policies": (
        {"main.yaml": MAIN, "extra.yaml": "policies: [a]\n"},
        ["extra.yaml:1: policies: must be a section"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_its_file_and_line(name: str, tmp_path: Path) -> None:
    files, expected = WRONG[name]
    found = complaints(laid_out(tmp_path, files) / "main.yaml", tmp_path)
    assert len(found) == len(expected), found
    for said, wanted in zip(found, expected, strict=True):
        assert said.startswith(wanted)


def test_what_is_wrong_in_a_folder(tmp_path: Path) -> None:
    files = {
        "a.yaml": "server: {port: 1}\npolicies: {p: {}}\n",
        "b.yaml": "\nauth: {}\nserver: {port: 2}\n",
        "policies/c.yaml": "auth: {}\n",
        "policies/d.yaml": "policies: {p: {}}\n",
    }
    # The first line of b.yaml is empty.
    laid_out(tmp_path, files)
    (tmp_path / "b.yaml").write_text("\nauth: {}\nserver: {port: 2}\n")
    assert complaints(tmp_path, tmp_path) == [
        "b.yaml:3: server: is also in another file (a.yaml:1). Fix: keep it in one of them",
        "policies/c.yaml:1: auth: this file may only hold 'policies' and 'teams'. Fix: move it to a file next to the "
        "folder policies/",
        "policies/d.yaml:1: policies.p: is also in another file (a.yaml:2). Fix: keep one of them, or rename one",
    ]


def test_a_file_that_is_found_twice_is_read_once(tmp_path: Path) -> None:
    files = {"main.yaml": 'include: ["*.yaml", "./*.yaml"]\nserver: {port: 1}\n', "a.yaml": "policies: {a: {}}\n"}
    laid_out(tmp_path, files)
    os.symlink(tmp_path / "a.yaml", tmp_path / "b.yaml")
    loaded = read(tmp_path / "main.yaml", {})
    assert len(loaded.sources.files) == 2
    assert loaded.sources.stamp() == loaded.sources.stamp_as_read


def test_a_file_with_another_ending_is_told(tmp_path: Path) -> None:
    laid_out(tmp_path, {"a.yaml": "server: {}\n", "policies/b.yml": "policies: {}\n"})
    (said,) = read(tmp_path, {}).warnings
    assert (
        said
        == f"{tmp_path}/policies/b.yml: warning: not read, because its name doesn't end in .yaml. Fix: mv b.yml b.yaml"
    )


def test_what_changes_when_a_file_does(tmp_path: Path) -> None:
    laid_out(
        tmp_path,
        {
            "main.yaml": 'include: ["teams/*.yaml", extra.yaml]\n',
            "teams/search.yaml": "teams: {search: {}}\n",
            "extra.yaml": "policies: {more: {}}\n",
        },
    )
    sources = read(tmp_path / "main.yaml", {}).sources
    seen = [sources.stamp_as_read]
    assert sources.stamp() == seen[0]

    def now() -> None:
        assert sources.stamp() not in seen
        seen.append(sources.stamp())

    (tmp_path / "teams" / "new.yaml").write_text("teams: {}\n")
    now()
    (tmp_path / "teams" / "search.yaml").unlink()
    now()
    (tmp_path / "extra.new").write_text("policies: {m0re: {}}\n")
    os.replace(tmp_path / "extra.new", tmp_path / "extra.yaml")
    now()
    (tmp_path / "main.yaml").unlink()
    now()
    (tmp_path / "teams" / "note.txt").write_text("x")
    assert sources.stamp() == seen[-1]


@pytest.mark.parametrize(("name", "reason"), [("none.yaml", "No such file"), (".", "this folder has no *.yaml file")])
def test_a_file_that_cannot_be_read_is_said(name: str, reason: str, tmp_path: Path) -> None:
    (message,) = check(tmp_path / name, {})
    assert message.startswith(str(tmp_path / name))
    assert reason in message
