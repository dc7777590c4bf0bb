"""R6, R14: no client loses an answer when a signal stops or restarts the proxy."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import psutil
import pytest

from tests.kit.client import CHAT, ask, chat
from tests.kit.program import ROOT, program, write_config
from tests.kit.raw_upstream import Arrived, RawUpstream, Step, answer, chunk, stream_head
from tests.kit.waiting import until
from tests.product.http.test_drain import DONE, EVENT


def in_a_second(arrived: Arrived) -> Iterator[Step]:
    if b'"stream": true' not in arrived.body:
        yield 0.05
        yield answer(b'{"choices":[]}')
        return
    yield stream_head()
    for _ in range(15):
        yield chunk(EVENT)
        yield 0.1
    yield chunk(DONE)
    yield chunk(b"")


def workers(process: subprocess.Popen[bytes]) -> set[int]:
    """The processes below the first one that serve; one of them keeps count of resources."""
    found = set()
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


SLOW_START = """
import pathlib, sys, time
flag = pathlib.Path(__file__).with_name("slow")
if any("spawn_main" in argument for argument in sys.orig_argv) and flag.exists():
    flag.unlink()
    time.sleep(6)
"""
"""Delays one worker by more than the 5 seconds that uvicorn allows by default, as a busy machine does."""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="no such signal here")
def test_workers_are_replaced_one_after_another_and_nobody_notices(tmp_path: Path) -> None:
    """R14: SIGUSR2, while plain requests and streams come all the time, each on a connection of its own.

    An SDK that doesn't try again keeps its connections. One of the new workers starts slowly.
    """
    failed: list[str] = []
    answered: Counter[str] = Counter()
    over = threading.Event()

    def plain(url: str, streams: bool = False) -> str:
        got = ask(url, CHAT, chat(stream=streams))
        good = (got.status, got.whole) == (200, True) and (not streams or got.body.endswith(DONE))
        return "" if good else f"{got.status} {got.body[-100:]!r}"

    def streamed(url: str) -> str:
        return plain(url, streams=True)

    def by_sdk(_: str) -> str:
        sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
        return ""

    def calling(url: str, once: Callable[[str], str]) -> None:
        while not over.is_set():
            try:
                fault = once(url)
            except (OSError, http.client.HTTPException, openai.OpenAIError) as error:
                fault = repr(error)
            with lock:
                answered[once.__name__] += not fault
                failed.extend([fault] if fault else [])

    lock = threading.Lock()

    with RawUpstream(in_a_second) as upstream, ExitStack() as running:  # type: ignore[arg-type]
        config = write_config({"upstreams": {"main": {"base_url": f"{upstream.url}/v1"}}}, tmp_path)
        (tmp_path / "sitecustomize.py").write_text(SLOW_START)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        url, process, log = running.enter_context(program(config, "--workers", "2", env=environment))

        def begun() -> int:
            return log.read_text().count("Application startup complete")

        assert until(lambda: begun() >= 2, 120)
        before = workers(process)
        assert len(before) == 2
        sdk = running.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0))
        calls = (plain, by_sdk, by_sdk, streamed, streamed, streamed)
        threads = [threading.Thread(target=calling, args=(url, once)) for once in calls]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            (tmp_path / "slow").touch()
            process.send_signal(signal.SIGUSR2)
            assert until(lambda: begun() >= 4 and not workers(process) & before, 120)
            assert not (tmp_path / "slow").exists()
            time.sleep(1)
        finally:
            over.set()
            for thread in threads:
                thread.join(15)
    assert failed == [], f"{len(failed)} of {answered.total() + len(failed)} requests failed"
    assert answered.total() > 50
    assert answered["by_sdk"] > 20


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
    [(module, "1") for module in ("proxy.cli", "click", "proxy.server.run", "uvicorn", "uvloop")] + [("uvicorn", "2")],
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
