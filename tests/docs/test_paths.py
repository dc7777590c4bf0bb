"""The files and folders that the documents name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "design").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(path.relative_to(ROOT).as_posix() for path in PAGES)]
FOLDERS = ("bench", "deploy", "docs", "proxy", "scripts", "soak", "tests")
PACKAGES = tuple(path.name for path in (ROOT / "proxy").iterdir() if (path / "__init__.py").exists())
PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join((*FOLDERS, *PACKAGES))})/[\w./*-]*")


def paths_in(text: str) -> set[str]:
    """Return the paths in a text. Those in the project's folders are complete; others are below ``proxy``."""
    written = {path.rstrip(".") for path in PATH.findall(re.sub(r"\]\([^)]*\)", "]", text))}
    return {path for path in written if "NAME" not in path}


def exists(path: str) -> bool:
    """Return whether a path, which may be a glob, leads to a file or folder."""
    start = ROOT if path.startswith(FOLDERS) else ROOT / "proxy"
    return any(start.glob(path))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_paths_in_a_document_exist(document: str) -> None:
    paths = paths_in((ROOT / document).read_text(encoding="utf-8"))
    assert sorted(path for path in paths if not exists(path)) == []


@pytest.mark.parametrize(
    ("text", "paths", "missing"),
    [
        ("Run `scripts/test quick`.", {"scripts/test"}, []),
        (
            "Read `endpoints/paths.py`, then `proxy/nothing.py`.",
            {"endpoints/paths.py", "proxy/nothing.py"},
            ["proxy/nothing.py"],
        ),
        ("Write `proxy/dialects/NAME/`. Open /v1/models/ and a [page](docs/missing.md).", set(), []),
    ],
)
def test_a_missing_path_is_found(text: str, paths: set[str], missing: list[str]) -> None:
    assert paths_in(text) == paths
    assert [path for path in sorted(paths) if not exists(path)] == missing
