"""Nothing that reports fails what it reports on: the log can't be written, and neither can the store or the records."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog.testing

from proxy.pipeline.recorder import Recorder
from proxy.server.loopback import serve
from proxy.telemetry.record import RequestRecord
from tests.kit.client import CHAT, JSON, Got, ask
from tests.kit.program import ROOT, Program, program, write_config
from tests.kit.scripted import PROFILE, chat, key_hash
from tests.kit.upstream import Reply, StandIn, is_summary_request
from tests.kit.waiting import until

REQUESTS = 180
OFTEN = """
import sys
from proxy.cli.commands import main
from proxy.server import maintenance

maintenance.EVERY = 0.1
main(sys.argv[4:], prog_name="proxy")
"""
"""Runs the command that follows, with rounds of maintenance all the time."""

REPLACED = {
    "full disk": 'exec "$@" 2>/dev/full',
    "closed pipe": 'exec "$@" 2> >(exit)',
    "closed": 'exec "$@" 2>&-',
    "read-only": 'exec "$@" 2</dev/null',
    "all of it": 'exec "$@" >/dev/full 2>/dev/full',
}
UNREAD = 'exec 2> >(exec sleep 60); timeout 2 head -c 65536 /dev/zero >&2; exec "$@"'
"""A full pipe that nobody reads."""
FEW, MORE = ["full disk", "nobody reads"], ["closed", "closed pipe", "read-only", "all of it"]
"""Those of every run, and those of ``--full``."""

BODIES: dict[str, dict[str, Any]] = {
    "small": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "summary": {"model": "m", "messages": chat(30, 300)},
    "overflow": {"model": "wide", "messages": chat(30, 300)},
    "stream": {"model": "broken", "messages": [{"role": "user", "content": "hi"}], "stream": True},
    "missing": {"model": "missing", "messages": [{"role": "user", "content": "hi"}]},
    "down": {"model": "down", "messages": [{"role": "user", "content": "hi"}]},
}
"""One body for each kind of line: warnings of the summary, retries, interrupted streams, and failed requests."""


def respond(body: Mapping[str, Any]) -> Reply:
    if is_summary_request(body):
        return Reply(status=500, error={"error": {"message": "no", "type": "server_error"}})
    error = {"error": {"message": "no such model", "type": "invalid_request_error"}}
    replies = {"broken": Reply(content="word " * 9, break_after=3), "missing": Reply(status=404, error=error)}
    return replies.get(body["model"], Reply(content="fine"))


def settings(upstream: str, key: str) -> dict[str, Any]:
    return {
        "auth": {"mode": "keys"},
        "log": {"requests": "all"},
        "upstreams": {
            "main": {"base_url": f"{upstream}/v1", "api_key": "sk-upstream"},
            "down": {"base_url": "http://127.0.0.1:1/v1", "api_key": "sk-upstream"},
        },
        "models": [
            {"match": "down", "upstream": "down", "profile": PROFILE},
            {"match": "wide", "upstream": "main", "profile": {**PROFILE, "context_window": 400_000}},
            {"match": "*", "upstream": "main", "profile": PROFILE},
        ],
        "teams": {"blue": {"keys": [key_hash(key)]}},
    }


def sent(url: str, kind: str, key: str) -> Got:
    return ask(url, CHAT, json.dumps(BODIES[kind]).encode(), (JSON, ("authorization", f"Bearer {key}")))


def accepted(url: str, key: str) -> bool:
    return sent(url, "small", key).status == 200


def outcome(got: Got) -> tuple[object, ...]:
    """Return the part of a response that doesn't depend on the load."""
    ends = got.body.rstrip().endswith(b"[DONE]"), b'"error"' in got.body
    return got.status, got.header("x-compaction"), got.whole, *ends


def fill_disk(server: Program) -> None:
    """Let the processes write no further byte to a file."""
    for process in (own := psutil.Process(server.process.pid), *own.children(recursive=True)):
        process.rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))


@pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.full)])
def test_requests_reloads_and_maintenance_go_on_without_log_and_store(names: list[str], tmp_path: Path) -> None:
    upstream = StandIn(responder=respond, summariser=respond)
    with serve(upstream.app) as address:
        expected = {}
        with program(write_config(settings(address, "sk-one"), tmp_path)) as server:
            for kind in BODIES:
                expected[kind] = outcome(sent(server.url, kind, "sk-one"))
        assert {one[0] for one in expected.values()} == {200, 404, 502}
        for name in names:
            folder = tmp_path / name.replace(" ", "-")
            folder.mkdir()
            config = write_config(settings(address, "sk-one"), folder)
            within = ("bash", "-c", {**REPLACED, "nobody reads": UNREAD}[name], "-", sys.executable, "-c", OFTEN)
            with program(config, within=within) as server, ThreadPoolExecutor(16) as clients:
                fill_disk(server)
                kinds = [kind for kind in BODIES for _ in range(REQUESTS // len(BODIES) // (len(REPLACED) + 1))]
                got = clients.map(partial(sent, server.url, key="sk-one"), kinds)
                for number, (kind, seen) in enumerate(zip(kinds, map(outcome, got), strict=True)):
                    assert seen == expected[kind], (name, kind, number)
                    if number == len(kinds) // 2:
                        write_config({"auth": 5}, folder)  # an invalid configuration is logged, too
                        server.process.send_signal(signal.SIGHUP)
                for key, former in (("sk-two", "sk-one"), ("sk-three", "sk-two")):
                    write_config(settings(address, key), folder)
                    assert until(partial(accepted, server.url, key), 60), name
                    assert sent(server.url, "small", former).status == 401, name
                metrics = ask(server.url, "/metrics", None).body.decode()
            (lost,) = (line for line in metrics.splitlines() if line.startswith("compaction_log_lines_lost_total "))
            assert float(lost.split()[1]) > len(kinds), name


def test_a_sink_that_fails_costs_neither_the_other_sinks_nor_the_response() -> None:
    """A record reaches the ledger even if a metric, a span, or a log line of it can't be made."""
    seen: list[str] = []

    def fails(record: RequestRecord) -> None:
        raise ValueError("secret")

    with structlog.testing.capture_logs() as logs:
        recorder = Recorder(None, lambda: 60.0, [fails, lambda record: seen.append(record.id)])
        recorder.add(RequestRecord("a", 0.0))
    assert seen == ["a"]
    assert [(line["event"], line["error"]) for line in logs] == [("records.sink_failed", "ValueError")]


@pytest.mark.parametrize("name", ["full disk", *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_program_ends_with_its_own_status_without_log(name: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "proxy", "run", "--", sys.executable, "-c", "raise SystemExit(7)"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = {**buffered, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", REPLACED[name], "-", *program], cwd=ROOT, env=environment, check=False, timeout=60
    )
    assert done.returncode == 7
