"""mypy finds a misspelled setting at each place that reads one."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SETTINGS = (
    *("allow_header", "keep_newest", "overflow_retries", "rate_limit_as_limit", "reserve_output", "self_compacting"),
    *("exclude", "keep_first", "max_length", "max_replaced", "max_tokens_per_tool", "min_length", "truncation_text"),
    *("fallback_model", "max_rounds", "redact_secrets", "trim_tokens_to_summarize"),
    *("on_store_failure", "queue_timeout", "summary_tokens_per_day"),
)
"""Names that only settings have: those of a policy, of its stages, of its other sections, and of the process."""

_FOUND = re.compile(r'^(.+?):(\d+): error: .* has no attribute "(\w+)"', re.MULTILINE)


def plant(file: Path) -> set[tuple[int, str]]:
    """Remove the last letter of each setting that a module reads. Return the lines and the misspelled names."""
    text = file.read_text(encoding="utf-8")
    lines, planted = text.split("\n"), set[tuple[int, str]]()
    reads = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr in SETTINGS]
    for node in sorted(reads, key=lambda node: node.end_col_offset or 0, reverse=True):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        line = lines[node.end_lineno - 1]
        lines[node.end_lineno - 1] = line[: node.end_col_offset - 1] + line[node.end_col_offset :]
        planted.add((node.end_lineno, node.attr[:-1]))
    file.write_text("\n".join(lines), encoding="utf-8")
    return planted


@pytest.mark.full
@pytest.mark.long
def test_mypy_finds_each_misspelled_setting(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proxy", tmp_path / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = sorted(tmp_path.glob("proxy/**/*.py"))
    planted = {(str(file.relative_to(tmp_path)), *read) for file in files for read in plant(file)}
    assert {name for _, _, name in planted} == {name[:-1] for name in SETTINGS}
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    output = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    found = {(file, int(line), name) for file, line, name in _FOUND.findall(output)}
    assert planted <= found
