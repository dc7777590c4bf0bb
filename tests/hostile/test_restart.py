"""A signal ends the proxy even while it starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.program import ROOT

EARLY = """
import importlib.abc, os, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["EARLY"] and not any("spawn_main" in argument for argument in sys.orig_argv):
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
"""
"""Sends SIGTERM to the first process as soon as it imports a module."""


@pytest.mark.parametrize(
    ("module", "workers"),
    [(module, "1") for module in ("proxy.cli", "proxy.server.run", "uvloop")] + [("uvicorn", "2")],
)
def test_a_signal_while_the_proxy_starts_ends_it(tmp_path: Path, module: str, workers: str) -> None:
    """Process 1 of a container would miss the signal without a handler, and be killed after the grace period."""
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    python_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": python_path, "EARLY": module, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "proxy", "serve", "--port", "0", "--workers", workers]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=60)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_a_signal_that_ends_another_command_is_not_a_success(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    python_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": python_path, "EARLY": "proxy.cli"}
    command = [sys.executable, "-m", "proxy", "check", str(ROOT / "config.example.yaml")]
    assert subprocess.run(command, env=environment, check=False, timeout=60).returncode == -signal.SIGTERM
