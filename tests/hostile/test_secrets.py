"""S13, S22, S5: secrets that the proxy must never write, and names that mustn't become series or files."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

from proxy.cli.commands import main
from proxy.config import Settings
from proxy.pipeline.runtime import Runtime
from proxy.server.app import Proxy
from proxy.telemetry.metrics import REGISTRY, exposition
from proxy.upstream.connections import Connections
from proxy.upstream.transport import Answer
from tests.conftest import settings_for
from tests.kit.client import CHAT, JSON, Got, StartProxy, ask, chat, connected, request_bytes
from tests.kit.program import ROOT, Program, relaying
from tests.kit.raw_upstream import Arrived, End, RawUpstream, Stage, Step, answer, chunk, stream_head
from tests.kit.watched import CONTENT, POLICY, ROLE, talk

OPERATOR = "sk-canary-operator-5ec4e7"
CALLER = "sk-canary-caller-5ec4e7"
PROMPT = "canary-prompt-5ec4e7"
ANSWER = "canary-answer-5ec4e7"
HEADER = "canary-header-5ec4e7"
SUMMARY = "canary-summary-5ec4e7"
SECRETS = (OPERATOR, CALLER, PROMPT, ANSWER, HEADER, SUMMARY)


def script(arrived: Arrived) -> Sequence[Step]:
    if b"<transcript>" in arrived.body:
        return [answer(json.dumps({"choices": [{"message": {"content": f"Goal: {SUMMARY}."}}]}).encode())]
    said = json.dumps({"error": {"message": f"no: {ANSWER}", "type": "invalid_request_error"}}).encode()
    found = re.search(rb'"model": "([^"]*)"', arrived.body)
    steps: dict[str, Sequence[Step]] = {
        "well": [answer(json.dumps({"choices": [{"message": {"content": ANSWER}}]}).encode())],
        "400": [answer(said, "400 Bad Request")],
        "401": [answer(said, "401 Unauthorized")],
        "500": [answer(said, "500 Internal Server Error")],
        "no http": [f"{ANSWER}\r\n\r\n".encode(), End.CLOSE],
        "cut": [stream_head(), chunk(ROLE + CONTENT.replace(b"hi", ANSWER.encode())), 0.01, End.RESET],
        "silent": [End.SILENCE],
    }
    return steps.get(found[1].decode() if found else "", steps["well"])


MODELS = ("well", "400", "401", "500", "no http", "cut", "silent", f"tell me {PROMPT}")
"""The log has models' names, but not prose that a client sends as one."""


@pytest.fixture
def debugged(tmp_path: Path) -> Iterator[tuple[Program, RawUpstream]]:
    """The program itself with everything logged that anything in it would log."""
    (tmp_path / "sitecustomize.py").write_text(
        "import logging\nlogging.basicConfig(level=logging.DEBUG)\nlogging.debug('on')\n"
    )
    with pytest.MonkeyPatch.context() as patch, RawUpstream(script) as upstream:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PYTHONASYNCIODEBUG", "1")
        with relaying(upstream.url, tmp_path, deadline=1) as server:
            yield server, upstream


def test_nothing_secret_is_logged_or_answered(debugged: tuple[Program, RawUpstream]) -> None:
    """Success, refusals, failures, timeouts and damaged requests, with all logging on."""
    server, _ = debugged
    headers = [JSON, ("authorization", f"Bearer {CALLER}"), ("x-note", HEADER)]
    answers: list[Got] = []
    for model in MODELS:
        answers += [ask(server.url, CHAT, chat(PROMPT, model=model, stream=on), headers) for on in (False, True)]
    answers.append(ask(server.url, "/v1/embeddings", json.dumps({"input": PROMPT}).encode(), headers))
    answers.append(ask(server.url, CHAT, b'{"model": ' + PROMPT.encode(), headers))
    answers.append(ask(server.url, CHAT, PROMPT.encode(), [*headers, ("content-encoding", "gzip")]))
    answers.append(ask(server.url, f"/v1/../{PROMPT}", b"{}", headers))
    answers.append(ask(server.url, f"/{PROMPT}", None, headers))
    answers.append(ask(server.url, CHAT, chat(PROMPT), [*headers, ("x-compaction", PROMPT)]))
    metrics = ask(server.url, "/metrics", None)
    with connected(server.url) as connection:
        connection.sendall(request_bytes(chat(PROMPT, model="silent"), headers=headers))
    server.process.terminate()
    assert server.process.wait(10) == 0
    log = server.log.read_text()
    assert {got.status for got in answers} >= {200, 400, 401, 404, 415, 500, 502, 504}
    assert "DEBUG:root:on" in log, "all logging is on"
    for secret in SECRETS:
        assert secret not in log, secret
        assert secret not in metrics.body.decode()
    own = [got for got in answers if got.status in (404, 415, 502, 504)]
    for got in own:
        assert not any(secret in f"{got.headers}{got.body!r}" for secret in SECRETS), got
    for got in answers:
        assert OPERATOR not in f"{got.headers}{got.body!r}"
        assert "Traceback" not in got.body.decode()


def test_a_crash_shows_nothing() -> None:
    """A fault of the proxy's own, anywhere on the way: the log has its place and none of its values."""
    program = """
import sys
import structlog
from proxy.telemetry.logs import configure
configure()
def broken(prompt, key):
    words = prompt * 2
    raise RuntimeError("something broke")
try:
    broken(*sys.argv[1:])
except RuntimeError as error:
    structlog.get_logger("x").exception("request.crashed", error=type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program, PROMPT, CALLER], capture_output=True, check=True, text=True)
    shown = done.stderr + done.stdout
    assert "something broke" in shown
    assert "request.crashed" in shown
    assert PROMPT not in shown
    assert CALLER not in shown


BROKEN = """
import asyncio
from proxy.endpoints.reply import send_answer
from proxy.endpoints import conversations as chat
from proxy.upstream import connections

Chunks, send = connections._Chunks, chat.send_answer


class Odd(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.add_note("noted: " + text)


class BrokenChunks(Chunks):
    seen = b""
    async def __anext__(self):
        if b"in the middle" in self.seen:
            raise ValueError(repr(self.seen))
        self.seen = await super().__anext__()
        return self.seen


async def broken_send(to, opening, *rest, **named):
    if opening.answer.status == 299:
        held = {}
        async def apart():
            raise KeyError(held["authorization"])
        async def apart_too():
            try:
                {}[str(opening)]
            except KeyError as error:
                raise ExceptionGroup(str(opening), [ValueError(str(opening)), Odd(str(opening))]) from error
        held["authorization"] = str(opening.answer.headers)
        asyncio.ensure_future(apart())
        asyncio.ensure_future(apart_too())
        await asyncio.sleep(0.01)
        raise Odd(str(opening) + held["authorization"])
    await send(to, opening, *rest, **named)

connections._Chunks, chat.send_answer = BrokenChunks, broken_send
"""


def broken_script(arrived: Arrived) -> Sequence[Step]:
    if b'"model": "middle"' in arrived.body:
        parts: list[Step] = [
            stream_head(),
            chunk(ROLE + CONTENT.replace(b"hi", f"{ANSWER} in the middle".encode())),
            0.2,
        ]
        return [*parts, chunk(b"data: [DONE]\n\n"), chunk(b"")]
    said = json.dumps({"choices": [{"message": {"content": ANSWER}}]}).encode()
    return [answer(said, "299 Odd", [("x-answered", HEADER)])]


def test_no_fault_of_the_program_shows_what_it_was_working_on(tmp_path: Path) -> None:
    """On the way of a request, in the middle of an answer, and in tasks of their own: the place, and not the values."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch, RawUpstream(broken_script) as upstream:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
        patch.setenv("PYTHONASYNCIODEBUG", "1")
        with relaying(upstream.url, tmp_path) as server:
            headers = [JSON, ("authorization", f"Bearer {CALLER}"), ("x-note", HEADER)]
            got = ask(server.url, CHAT, chat(PROMPT), headers)
            assert (got.status, got.error["code"]) == (500, "proxy_error")
            assert not any(secret in f"{got.headers}{got.body!r}" for secret in SECRETS)
            ask(server.url, CHAT, chat(PROMPT, model="middle", stream=True), headers)
            assert ask(server.url, "/livez", None).status == 200
            server.process.terminate()
            assert server.process.wait(10) == 0
    log = server.log.read_text()
    for secret in SECRETS:
        assert secret not in log, secret
    for shown in ("request.crashed", "broken_send", "__anext__", "Odd", "KeyError", "ValueError", "apart_too"):
        assert shown in log, shown


def settings_with_secrets(tmp_path: Path) -> Settings:
    upstream = {"api_key": OPERATOR, "headers": {"x-secret": HEADER}}
    return settings_for("http://127.0.0.1:1", tmp_path, {"upstreams": {"main": upstream}})


def test_no_key_is_in_what_settings_and_services_say_of_themselves(tmp_path: Path) -> None:
    """S13: ``repr``, ``str``, dumps, schema and errors of a configuration with keys in it."""
    settings = settings_with_secrets(tmp_path)
    shown = [repr(settings), str(settings), settings.model_dump_json(), repr(settings.model_dump())]

    async def service() -> str:
        made = Runtime(settings)
        transport = await made.configuration.upstreams.transport("main")
        caller = made.configuration.teams.authenticate([(b"authorization", f"Bearer {CALLER}".encode())])
        said = f"{made!r} {vars(made)!r} {transport!r} {caller!r} "
        said += f"{made.configuration.teams!r} {vars(made.configuration)!r}"
        await made.aclose()
        return said

    shown.append(asyncio.run(service()))
    for wrong in ({"api_key": [OPERATOR]}, {"headers": OPERATOR}, {"api_key": f"{OPERATOR}\n"}):
        with pytest.raises(ValidationError) as caught:
            Settings.model_validate({"upstreams": {"main": {"headers": {"x": HEADER}, **wrong}}})
        shown.append(f"{caught.value!r} {caught.value}")
    for text in shown:
        for secret in (OPERATOR, CALLER, HEADER):
            assert secret not in text


COMMANDS = {
    "check": ["--team", "search"],
    "check --model": ["--model", "m"],
    "models": ["m"],
    "explain": ["request.json"],
    "forget": ["--team", "search"],
}


@pytest.mark.parametrize("wrong", ["", "upstreams.main.api_key", "store.encryption.key", "headers"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str) -> None:
    """The configuration is valid, or wrong in one field. The commands run in this process, and one in its own."""
    store_key = "5ec4e7" * 10 + "abcd"
    headers: Any = {"x-secret": HEADER}
    configured: dict[str, Any] = {
        "upstreams": {"main": {"api_key": OPERATOR, "headers": headers}},
        "store": {"url": f"sqlite:///{tmp_path}/a.db", "encryption": {"key": store_key}},
        "teams": {"search": {"keys": ["sha256:" + hashlib.sha256(CALLER.encode()).hexdigest()]}},
    }
    if wrong == "upstreams.main.api_key":
        configured["upstreams"]["main"]["api_key"] = [OPERATOR]
    elif wrong == "headers":
        configured["upstreams"]["main"]["headers"] = [HEADER, OPERATOR]
    elif wrong:
        configured["store"]["encryption"]["key"] = store_key + OPERATOR
    (tmp_path / "a.db").touch()
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(configured))
    (tmp_path / "request.json").write_bytes(chat("a prompt that was not to be seen"))
    arguments = [name.split()[0], *COMMANDS[name], "--config", "a.yaml"]
    if (name, wrong) == ("check", "headers"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "proxy", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        shown, status = done.stdout + done.stderr, done.returncode
    else:
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(main, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), "a traceback"
        shown, status = result.output, result.exit_code
    assert shown
    assert "Traceback" not in shown
    assert (status == 0) == (not wrong), shown
    for secret in (OPERATOR, HEADER, store_key, CALLER, "not to be seen"):
        assert secret not in shown


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def body() -> Any:
        yield b'{"choices":[],"usage":{"prompt_tokens":9}}'

    async def nothing() -> None:
        return None

    async def send(self: Connections, *args: Any, **options: Any) -> Answer:
        return Answer(200, [("content-type", "application/json")], body(), nothing)

    monkeypatch.setattr(Connections, "send", send)
    routed = {"models": [{"match": "known-*", "upstream": "main"}]}
    return Proxy(settings_for("http://127.0.0.1:1", tmp_path, routed))


NAMES = 10_000


@pytest.mark.parametrize("names", [NAMES // 20, pytest.param(NAMES, marks=pytest.mark.full)])
def test_ten_thousand_names_make_no_series(counted: Any, names: int) -> None:
    """S22: models, keys, users, and paths don't become labels. The proxy bounds the data that it keeps of each.

    Only all names together exceed every bound.
    """

    async def one(number: int) -> None:
        body = chat(model=f"known-{number}" if number % 2 else f"unknown-{number}", user=f"user-{number}")
        path = CHAT if number % 5 else f"/nowhere/{number}"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"authorization", f"Bearer sk-{number}".encode()), (b"x-team", str(number).encode())],
        }
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            found = next(messages, None)
            return found or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            return None

        await counted(scope, receive, send)

    async def all_of_them() -> str:
        for number in range(names):
            await one(number)
        service = counted.service
        groups = (service.access, service.limits, service.money, service.records, service.stores)
        parts = [part for group in (service, *groups) for part in vars(group).values()]
        kept = [len(value) for part in parts for value in _collections(part)]
        assert kept
        assert max(kept) < NAMES / 2, kept
        await service.aclose()
        return exposition().decode()

    before = series()
    shown = asyncio.run(all_of_them())
    assert series() - before <= 120  # a histogram has a dozen; other tests of this process made the others
    assert re.search(r"(?:known|user|sk)-\d|nowhere/\d", shown) is None


def _collections(part: Any) -> list[Any]:
    inside = vars(part).values() if hasattr(part, "__dict__") else ()
    return [value for value in (part, *inside) if isinstance(value, dict | list | set)]


def series() -> int:
    return sum(len(metric.samples) for metric in REGISTRY.collect())


IDS = [
    "..",
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2f",
    "..%5c..%5cwindows",
    "%00",
    "0" * 20 + "%00.json",
    "0" * 300,
    "CON",
    "nul",
    "~root",
    "file:///etc/passwd",
    "0" * 19 + "G",
    "ABCDEF" + "0" * 14,
    "é" * 20,
    "e\u0301" * 10,
    "' OR 1=1 --",
    "0" * 20 + "/../x",
    "0" * 20 + "\n",
]


def test_no_name_leads_out_of_the_archive(start_proxy: StartProxy, stage: Stage, tmp_path: Path) -> None:
    """S5: ids are digests; names of teams and models, and keys, are values in a table and never part of a path."""
    hostile = "../../outside"
    key = hashlib.sha256(CALLER.encode()).hexdigest()
    inside = tmp_path / "inside"
    inside.mkdir()
    overrides = {"store": {"url": f"sqlite:///{inside}/compaction.db"}, "policies": {"default": POLICY}}
    with stage(script) as upstream:
        url = start_proxy(upstream.url, overrides)
        headers = [JSON, ("authorization", f"Bearer {CALLER}")]
        for model in (hostile, "..\\..\\outside", "a/b/c", "x" * 300, "nul\u0000", "e\u0301", "\u00e9", "CON", "con"):
            got = ask(url, CHAT, chat(model=model, messages=talk()), headers)
            assert got.status == 200
        for id in IDS:
            got = ask(url, f"/compaction/archive/{quote(id, safe='/%')}", None, headers)
            assert got.status == 404, id
            with contextlib.suppress(ValueError):
                assert got.error["code"] == "not_found"
    made = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert made
    assert all(name.startswith(("inside/compaction.db", "inside/compaction-records.db")) for name in made), made
    assert key not in " ".join(made)
