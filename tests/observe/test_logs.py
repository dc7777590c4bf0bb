"""The log as somebody who collects it sees it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

LOGGED = """
import structlog
from proxy.observe.logs import configure

configure()
for size in (1, 100, 10_000):
    structlog.get_logger("x").warning("said", text="y" * size)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_one_write(unbuffered: str) -> None:
    """Workers share one standard error: a line that takes two writes can be parted by another worker's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    with here, there:
        here.settimeout(30)
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        subprocess.run([sys.executable, "-c", LOGGED], stderr=there, env=environment, check=True, timeout=60)
        for size in (1, 100, 10_000):
            written = here.recv(1 << 20)
            assert written.endswith(b"\n")
            assert json.loads(written)["text"] == "y" * size
