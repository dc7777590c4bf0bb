"""Check the log lines that a collector receives."""

import json
import re
import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from proxy.telemetry.logs import LEFT_OUT, as_text, words_of

LOGGED = """
import structlog
from proxy.telemetry.logs import configure

configure()
for size in (1, 100, 10_000):
    structlog.get_logger("x").warning("said", text="y" * size)
"""


def test_each_line_is_one_write() -> None:
    """Write each line at once, because workers share standard error and their lines could mix."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    with here, there:
        here.settimeout(30)
        subprocess.run([sys.executable, "-c", LOGGED], stderr=there, check=True, timeout=60)
        for size in (1, 100, 10_000):
            written = here.recv(1 << 20)
            assert written.endswith(b"\n")
            assert json.loads(written)["text"] == "y" * size


UNREAD = """
import os, sys, time, structlog
from proxy.telemetry.logs import configure
from proxy.telemetry.metrics import LOG_LINES_LOST

configure()
log, size, slowest = structlog.get_logger("x"), int(sys.argv[1]), 0.0
for number in range(1_000):
    began = time.perf_counter()
    log.warning("said", number=number, text=sys.argv[2] * size)
    slowest = max(slowest, time.perf_counter() - began)
print(round(slowest), int(LOG_LINES_LOST.collect()[0].samples[0].value), flush=True)
sys.stdin.readline()
log.warning("read again", number=-1)
"""


@pytest.mark.long
@pytest.mark.parametrize(("letter", "size"), [("y", 1), ("\u4f60", 3_000), ("y", 30_000), ("\u4f60", 30_000)])
def test_a_pipe_that_nobody_reads_loses_lines_and_blocks_nobody(size: int, letter: str) -> None:
    # moby#48890, moby#22502, supercronic#36, amplihack#899: the write of a line blocked, and the program with it.
    command = [sys.executable, "-c", UNREAD, str(size), letter]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        slowest, lost = map(int, program.stdout.readline().split())
        kept = [program.stderr.readline() for _ in range(1_000 - lost)]
        if not kept:  # a part of the first line fills the pipe
            program.stderr.read(30_000)
        program.stdin.write("\n")
        program.stdin.flush()
        *cut, again = program.stderr.read().splitlines()
    assert slowest == 0
    assert 0 < lost <= 1_000
    assert [json.loads(line)["number"] for line in kept] == list(range(1_000 - lost))
    assert '"number": -1' in again, cut


ODD = """
import logging, sys, structlog
from proxy.telemetry.logs import configure

configure("info", sys.argv[1])
odd = "a\\x9b31m\\x1b]0;t\\x07\\u202eb\\ud800\\u2028c\\ré\\u4f60"
structlog.get_logger("x").warning("said " + odd, host=odd, hosts=[odd])
logging.getLogger("uvicorn.error").warning("%s", odd)
"""


@pytest.mark.long
@pytest.mark.parametrize("form", ["json", "text"])
def test_no_line_has_characters_that_control_a_terminal(form: str) -> None:
    command = [sys.executable, "-X", "utf8", "-c", ODD, form]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=60).stderr.decode()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)  # the renderer's own colors
    assert all(char.isprintable() for char in plain.replace("\n", ""))
    assert len(shown.splitlines()) == 2
    if form == "text":
        assert shown.count("\\x9b31m") == 4
        assert shown.count("é\u4f60") == 4


LIBRARIES = """
import logging, sys, structlog
from proxy.telemetry.logs import configure

configure(*sys.argv[1:])
for name in ("uvicorn.error", "aiohttp.client"):
    logging.getLogger(name).debug("quoted")
    logging.getLogger(name).warning("%s lines", 2)
structlog.get_logger("x").debug("x.debugged")
structlog.get_logger("x").info("x.informed")
try:
    raise ValueError("SECRET".lower())  # since Python 3.13, tracebacks show these lines
except ValueError:
    logging.getLogger("uvicorn.error").exception("crashed")
    structlog.get_logger("x").exception("x.crashed")
"""


@pytest.mark.long
@pytest.mark.parametrize("form", ["json", "text"])
def test_lines_of_libraries_have_the_same_format_and_no_debug_lines(form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES, "debug", form], capture_output=True, text=True, check=True, timeout=60
    )
    assert "quoted" not in done.stderr
    assert "secret" not in done.stderr
    assert LEFT_OUT in done.stderr
    if form == "json":
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        events = ["2 lines", "2 lines", "x.debugged", "x.informed", "crashed", "x.crashed"]
        assert [line["event"] for line in lines] == events
        assert [line.get("logger") for line in lines[:2]] == ["uvicorn.error", "aiohttp.client"]
        assert lines[0].keys() == {"event", "logger", "level", "timestamp"}
        assert [line["exception"].splitlines()[-1] for line in lines[4:]] == [f"ValueError: {LEFT_OUT}"] * 2
    else:
        assert [done.stderr.count(name) for name in ("2 lines", "x.debugged", "crashed", "Traceback")] == [2, 1, 2, 0]


def test_the_words_of_a_fault_are_shown_where_they_quote_nothing() -> None:
    """Log the full message for a missing file or a wrong type, which shows the cause."""
    for error in (
        FileNotFoundError(2, "No such file", "/x.db"),
        TypeError("unhashable type: 'list'"),
        RuntimeError("a"),
    ):
        assert words_of(error) == str(error)
        assert str(error) in as_text(error)

    class Own(RuntimeError):
        pass

    for silent in (
        ValueError("secret"),
        KeyError("secret"),
        UnicodeError("secret"),
        Own("secret"),
        Exception("secret"),
    ):
        assert words_of(silent) == LEFT_OUT
        assert "secret" not in as_text(silent)
