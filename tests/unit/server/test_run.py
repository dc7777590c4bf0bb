"""Test the settings of the interpreter in each process that serves."""

import sys

import pytest

from proxy.config import Settings
from proxy.server import run


def test_threads_get_the_interpreter_lock_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's own interval, a busy event loop keeps the threads of the store waiting for seconds."""
    monkeypatch.setattr(run, "Proxy", lambda *_: None)
    monkeypatch.setattr(run, "exempt_from_collection", lambda: None)
    before = sys.getswitchinterval()
    try:
        run._application(Settings(), None)
        assert sys.getswitchinterval() == pytest.approx(run.SWITCH_SECONDS)
    finally:
        sys.setswitchinterval(before)
    assert before > run.SWITCH_SECONDS
