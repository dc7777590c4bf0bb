"""The workflows, the site of the documents, and the metadata of the project are valid and fit each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.test_reference import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"^[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the PATH outside this interpreter's packages. Skip the test if it's missing."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is missing: .ci/run installs it or doesn't need it")
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
