"""Test which files belong to a configuration, and whether they have changed."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from proxy.config import read
from tests.kit.configurations import check


def laid_out(folder: Path, files: dict[str, str]) -> Path:
    """The files in a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return folder


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
