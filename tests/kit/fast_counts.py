"""Tell whether fastokens is installed, and wait until it's loaded."""

import threading
from importlib.util import find_spec

import pytest

INSTALLED = find_spec("fastokens") is not None
needs_fastokens = pytest.mark.skipif(not INSTALLED, reason="needs fastokens: pip install 'fastokens>=0.3.5'")


def loaded() -> None:
    """Wait until the threads that load fastokens have ended."""
    for thread in threading.enumerate():
        if thread.name == "fastokens":
            thread.join()
