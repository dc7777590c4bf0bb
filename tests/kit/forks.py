"""Processes of the program that start at once, as forks of one that has imported it. The imports take seconds of CPU.

A fork runs ``proxy.__main__`` with its own arguments, environment, folder, and output. The process of the tests adopts
it, so it's a child as any other.
"""

import atexit
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
ADOPT = 36
"""``PR_SET_CHILD_SUBREAPER``: orphans among the descendants become children of this process, not of process 1."""
MESSAGE = 1_000_000
"""Bytes of a request, at most."""
READY = b"adopted"
AT_START = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
WHEN_IMPORTED = ("PROMETHEUS_", "SSL_CERT_")
"""Beginnings of variables that modules read when they are imported."""


class Fork:
    """A process with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)
        self._end = select.poll()
        self._end.register(self._ended, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.wait()

    def poll(self) -> int | None:
        """Return the exit status, or the negative number of the signal that ended the process."""
        if self.returncode is None and self._end.poll(0):
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self._end.poll(None if timeout is None else timeout * 1_000):
            raise subprocess.TimeoutExpired("proxy", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, files: Sequence[int], umask: int = -1
) -> Fork | None:
    """Start the program with these files as input, output, and errors.

    Return ``None`` if forks aren't possible, or if a variable matters to the interpreter or to imports.
    """
    own = {(name, value) for name, value in environment.items() if name.startswith("PYTHON")}
    other = own - AT_START.items() - {("PYTHONPATH", str(ROOT))}
    if sys.platform != "linux" or other or any(name.startswith(WHEN_IMPORTED) for name in environment):
        return None
    with _LOCK:
        parent = _parent()
        libc = ctypes.CDLL(None)
        libc.prctl(ADOPT, 1, 0, 0, 0)
        try:
            request = json.dumps([[*arguments], dict(environment), str(folder), umask]).encode()
            socket.send_fds(parent, [request], [*files])
            pid = int(parent.recv(20))
            assert parent.recv(20) == READY
            return Fork(pid)
        finally:
            libc.prctl(ADOPT, 0, 0, 0, 0)


_LOCK = threading.Lock()


@functools.cache
def _parent() -> socket.socket:
    """Start the process that has imported the program. It ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.kit.forks", str(theirs.fileno())]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", *WHEN_IMPORTED))}
        environment = {**kept, **AT_START, "PYTHONPATH": str(ROOT)}
        started = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )

    def end() -> None:
        ours.close()
        started.wait()

    atexit.register(end)
    return ours


def _next(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Return the arguments in a fork, and ``None`` at the end."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not message:
            return None
        between = os.fork()
        if not between:
            pid = os.fork()
            if pid:
                requests.send(str(pid).encode())
                os._exit(0)
            break
        os.waitpid(between, 0)
        requests.send(READY)
        for file in files:
            os.close(file)
    arguments, environment, folder, umask = json.loads(message)
    requests.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    if umask >= 0:
        os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    return [*arguments]


if __name__ == "__main__":
    import proxy.server.run  # noqa: F401 - takes most of the time
    from proxy.__main__ import main

    gc.collect()
    given = _next(socket.socket(fileno=int(sys.argv[1])))
    if given is not None:
        sys.argv[1:] = given
        main()
