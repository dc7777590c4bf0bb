"""An edited configuration takes effect while requests come in, and no request notices."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import yaml

from proxy.config import read
from proxy.config.loading import attempt
from proxy.server.app import WRONG, Proxy
from proxy.server.loopback import serve
from tests.kit.program import program
from tests.kit.scripted import chat, client, key_hash
from tests.kit.upstream import Reply, StandIn

PATIENCE = 30.0
"""Seconds after which what should have happened has not."""

EDITS, EDITS_FULL = 12, 30
"""Edits of the configuration under load, without ``--full`` and with it."""
KEY = "sk-search"
HASH = key_hash(KEY)


def until(true: Callable[[], bool], what: str) -> float:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < PATIENCE, what
        time.sleep(0.02)
    return time.monotonic() - begun


def written(path: Path, text: str) -> None:
    """Write a file as deployments do: under another name, and renamed."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)


@contextlib.contextmanager
def followed(path: Path, every: float = 0.05, host: str | None = None) -> Iterator[tuple[str, Proxy]]:
    """A proxy that checks its configuration more often than by default. ``host`` is the command's."""
    loaded = read(path, {})
    app = Proxy(loaded.settings.listening(host), loaded)
    assert app.reload is not None
    app.reload._every = every
    with serve(app) as url:
        yield url, app


def main_file(upstream: str, folder: Path, **sections: Any) -> str:
    settings = {
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "upstreams": {"main": {"base_url": f"{upstream}/v1", "api_key": "sk-upstream"}},
        **sections,
    }
    return yaml.safe_dump(settings)


def policy_of(url: str, key: str = KEY) -> str:
    with client(url, key) as caller:
        raw = caller.chat.completions.with_raw_response.create(model="m", messages=chat(1, 5))
    return raw.headers["x-compaction-policy"]


def ready(url: str) -> str:
    answer = httpx.get(f"{url}/readyz", trust_env=False)
    assert answer.status_code == 200
    return answer.text


class Clients:
    """Clients that ask all the time, plainly and for streams; ``failures`` is what went wrong for any of them."""

    def __init__(self, url: str, count: int) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with client(self._url, KEY) as caller:
            while not self._end.is_set():
                try:
                    if number % 2:
                        caller.chat.completions.create(model="m", messages=chat(1, 5))
                    else:
                        parts = list(caller.chat.completions.create(model="m", messages=chat(1, 5), stream=True))
                        assert parts[-1].choices[0].finish_reason == "stop"
                except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
                    self.failures.append(repr(error))
                with self._lock:
                    self.answered += 1


FAULTS = [
    ("policies:\n  p:\n    triger: {fraction: 0.5}\n", 3, "Fix: did you mean 'trigger'?"),
    (f"policies:\n  p: {{}}\nteams:\n  search:\n    keys: ['{HASH}']\n    policy: pp\n", 6, "did you mean 'p'?"),
    ("policies:\n  p: {keep: {fraction: 2\n", 2, "close the quote or bracket"),
]


@pytest.mark.long
def test_edits_under_load(tmp_path: Path, full: bool) -> None:
    """A third of the edits is wrong. Each is told with its line, none is put in force, and no request fails.

    There are 12 edits, or 30 with ``--full``.
    """
    edits = EDITS_FULL if full else EDITS
    upstream = StandIn(responder=lambda body: Reply(content="Yes, of course, as you like it. " * 4, pause=0.002))
    main, team = tmp_path / "main.yaml", tmp_path / "teams" / "search.yaml"
    team.parent.mkdir()
    with serve(upstream.app) as entrance, structlog.testing.capture_logs() as logged:

        def rightly(number: int) -> None:
            # Every second time the upstream changes too, and with it the connections.
            headers = {"x-edit": str(number // 2)}
            upstreams = {"main": {"base_url": f"{entrance}/v1", "api_key": "sk-upstream", "headers": headers}}
            written(main, main_file(entrance, tmp_path, upstreams=upstreams, include=["teams/*.yaml"]))
            teams = {"search": {"keys": [HASH], "policy": f"p{number}"}}
            written(team, yaml.safe_dump({"policies": {f"p{number}": {"mode": "shadow"}}, "teams": teams}))

        rightly(0)
        longest, wrong = 0.0, 0
        with followed(main) as (url, app), Clients(url, 4) as clients:
            assert app.reload is not None
            in_force = policy_of(url)
            for number in range(1, edits + 1):
                if number % 3:
                    rightly(number)
                    in_force = f"p{number}"
                    took = until(lambda: policy_of(url) == in_force, f"edit {number} takes effect")  # noqa: B023
                    assert until(lambda: ready(url) == "ready\n", "it is right again") < PATIENCE
                else:
                    text, line, hint = FAULTS[wrong % len(FAULTS)]
                    wrong += 1
                    written(team, f"# edit {number}\n" * number + text)
                    place = f"{team}:{number + line}: "
                    took = until(lambda: place in (app.reload.wrong or ""), f"edit {number} is told")  # noqa: B023
                    assert hint in app.reload.wrong
                    assert policy_of(url) == in_force
                longest = max(longest, took)
        told = [entry["faults"] for entry in logged if entry["event"] == "configuration.wrong"]
        print(f"{edits} edits, {wrong} wrong, {clients.answered} requests, longest {longest:.2f} s")
    assert clients.failures == []
    assert clients.answered > edits
    assert wrong == edits // 3
    assert len(told) == wrong, "each is told once"
    for number, faults in zip(range(3, edits + 1, 3), told, strict=True):
        assert faults[0].startswith(f"{team}:{number + FAULTS[(number // 3 - 1) % len(FAULTS)][1]}: ")
    assert not [entry for entry in logged if entry["event"] == "configuration.reload_crashed"]
    assert {request.headers["x-edit"] for request in upstream.requests} > {"0", str(edits // 2 - 1)}


def test_what_was_learned_stays(tmp_path: Path) -> None:
    """The summary that was made before an edit serves after it, and limits are remembered."""
    upstream = StandIn(window=16_000, max_output=2_000)
    profile = {"context_window": 16_000, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}
    models = [{"match": "*", "upstream": "main", "profile": profile}]
    file = tmp_path / "main.yaml"
    with serve(upstream.app) as entrance:
        file.write_text(main_file(entrance, tmp_path, models=models))
        with followed(file) as (url, app), client(url) as caller:

            def summary() -> str:
                raw = caller.chat.completions.with_raw_response.create(model="m", messages=chat(7, 1_000))
                return raw.headers["x-compaction-summary"]

            kept = (
                app.service.limits.learned,
                app.service.limits.calibration,
                app.service.stores.summaries,
                app.service.stores.facts,
            )
            assert summary() == "made"
            written(file, main_file(entrance, tmp_path, models=models, server={"deadline": 500}))
            until(lambda: app.service.settings.server.deadline == 500, "the edit takes effect")
            assert summary() in ("remembered", "stored")
            assert kept == (
                app.service.limits.learned,
                app.service.limits.calibration,
                app.service.stores.summaries,
                app.service.stores.facts,
            )
            places = app.service.configuration.upstreams
            assert places.unchanged == {"main"}, "an upstream that is as it was keeps its connections"
            written(file, main_file(entrance, tmp_path, models=models, policies={"default": {"keep": {"messages": 4}}}))
            until(lambda: app.service.settings.policies["default"].keep.messages == 4, "the edit takes effect")
            assert summary() == "made", "another policy has other checkpoints"
    assert len(upstream.summaries) == 2


def test_a_team_joins_and_leaves_by_a_file_of_its_own(tmp_path: Path) -> None:
    upstream = StandIn()
    conf = tmp_path / "conf"
    (conf / "policies").mkdir(parents=True)
    with serve(upstream.app) as entrance:
        (conf / "main.yaml").write_text(main_file(entrance, tmp_path, auth={"mode": "keys"}, teams=OPERATORS))
        with followed(conf) as (url, _):

            def status() -> int:
                body = {"model": "m", "messages": chat(1, 5)}
                headers = {"authorization": f"Bearer {KEY}"}
                return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False).status_code

            assert status() == 401
            team = {"policies": {"careful": {}}, "teams": {"search": {"keys": [HASH], "policy": "careful"}}}
            (conf / "policies" / "search.yaml").write_text(yaml.safe_dump(team))
            until(lambda: status() == 200, "the team may call")
            assert policy_of(url) == "careful"
            (conf / "policies" / "search.yaml").unlink()
            until(lambda: status() == 401, "the team may call no more")


def test_a_folder_that_is_a_link_which_is_turned(tmp_path: Path) -> None:
    """So Kubernetes mounts a ConfigMap: files are links into a folder that is a link, and that one is replaced."""
    upstream = StandIn()
    mount = tmp_path / "mount"
    mount.mkdir()

    def turned(version: str, policy: str, entrance: str) -> None:
        content = mount / f"..{version}"
        content.mkdir()
        teams = {"search": {"keys": [HASH], "policy": policy}}
        (content / "main.yaml").write_text(main_file(entrance, tmp_path, policies={policy: {}}, teams=teams))
        (mount / "..new").symlink_to(content.name)
        (mount / "..new").rename(mount / "..data")

    with serve(upstream.app) as entrance:
        turned("1", "first", entrance)
        (mount / "main.yaml").symlink_to("..data/main.yaml")
        for entry in (mount, mount / "main.yaml"):
            with followed(entry) as (url, _):
                before = policy_of(url)
                turned(f"2{entry.suffix}", f"second{entry.suffix}", entrance)
                until(lambda: policy_of(url) == f"second{entry.suffix}", "the edit takes effect")  # noqa: B023
                assert before != policy_of(url)


SECRETS = ("sk-canary-8c1f", "wJalrXUtnFEMIK7MDENG0bPxRfiCYEX4MPLEKEY1", "d41d8cd98f00b204e9800998ecf8427e")


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "text",
    [
        'upstreams: {main: {api_key: "${%s}"}}',
        "auth: {mode: %s}",
        "auth: {%s: open}",
        "%s: 1",
        "upstreams: {main: {lane: %s}}",
        "upstreams: {main: {api_key: !%s x}}",
        "upstreams: {main: {api_key: *%s}}",
        "teams: {t: {policy: %s}}",
        "teams: {t: {keys: [sha256:%s]}}",
        "auth: {%s: 1, %s: 2}",
        "models: [{match: a, upstream: %s}]",
    ],
)
def test_no_error_shows_a_secret_in_a_wrong_place(tmp_path: Path, text: str, secret: str) -> None:
    file = tmp_path / "main.yaml"
    file.write_text(text.replace("%s", secret))
    found = attempt(file, {})
    assert found.loaded is None
    assert secret not in found.wrong
    assert secret[:12] not in found.wrong


def test_readyz_quotes_nothing_of_a_wrong_configuration(tmp_path: Path) -> None:
    file = tmp_path / "main.yaml"
    with serve(StandIn().app) as entrance, structlog.testing.capture_logs() as logged:
        file.write_text(main_file(entrance, tmp_path))
        with followed(file) as (url, _):
            written(file, f'upstreams: {{main: {{api_key: "${{{SECRETS[0]}}}"}}}}\nauth: {{mode: {SECRETS[0]}}}\n')
            until(lambda: ready(url) != "ready\n", "it is told")
            said = ready(url)
    assert said == f"ready\n{WRONG}\n"
    assert str(tmp_path) not in said
    assert SECRETS[0] not in json.dumps(logged)
    assert [entry["event"] for entry in logged if entry["log_level"] == "error"] == ["configuration.wrong"]


OPERATORS = {"operators": {"keys": ["sha256:" + "0" * 64]}}


def test_what_holds_until_a_restart_is_said(tmp_path: Path) -> None:
    upstream = StandIn()
    file = tmp_path / "main.yaml"
    with serve(upstream.app) as entrance, structlog.testing.capture_logs() as logged:
        file.write_text(main_file(entrance, tmp_path))
        with followed(file) as (url, app):
            changes: dict[str, Any] = {
                "server": {"port": 1, "body_limit": 300},
                "store": {"url": f"sqlite:///{tmp_path}/other.db"},
            }
            written(file, main_file(entrance, tmp_path, **changes))
            until(lambda: app.service.settings.server.body_limit == 300, "the rest is put in force")
            assert app.service.settings.server.port == 8787
            assert app.service.settings.store.url.endswith("/store.db")
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * 300}]}
            assert httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False).status_code == 413
            until(lambda: any(e["event"] == "configuration.needs_restart" for e in logged), "it is said")
    (said,) = [entry for entry in logged if entry["event"] == "configuration.needs_restart"]
    assert said["settings"] == ["server.port", "store.url"]


@pytest.mark.parametrize("content", ["", "  \n"])
def test_a_file_that_is_suddenly_empty_opens_no_door(content: str, tmp_path: Path) -> None:
    upstream = StandIn()
    file = tmp_path / "main.yaml"
    with serve(upstream.app) as entrance:
        file.write_text(main_file(entrance, tmp_path, auth={"mode": "keys"}, teams=OPERATORS))
        with followed(file) as (_, app):
            assert app.reload is not None
            file.write_text(content)
            until(lambda: f"{file}:1: the file has become empty" in (app.reload.wrong or ""), "it is told")
            assert app.service.settings.auth.mode == "keys"
            file.unlink()
            until(lambda: "can't be read" in (app.reload.wrong or ""), "it is told")
            assert app.service.settings.auth.mode == "keys"


def entries(log: Path, event: str) -> list[dict[str, Any]]:
    """The entries of a log under one name; a line that is still being written is left for the next look."""
    lines = [json.loads(line) for line in log.read_text().splitlines(True) if line[:1] == "{" and line[-1:] == "\n"]
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_sighup(workers: int, tmp_path: Path) -> None:
    """Each worker reads the file again, and none ends. An invalid file doesn't end any either."""
    upstream = StandIn()
    file = tmp_path / "main.yaml"
    with serve(upstream.app) as entrance:
        file.write_text(main_file(entrance, tmp_path))
        with program(file, "--workers", str(workers)) as (url, running, log):
            until(lambda: ready(url) == "ready\n", "it serves")
            if workers > 1:
                time.sleep(1)  # its workers are ready one after the other
            running.send_signal(signal.SIGHUP)
            until(lambda: len(entries(log, "configuration.reloaded")) == workers, "each worker has read it")
            written(file, "policies:\n  default:\n    triger: null\n")
            running.send_signal(signal.SIGHUP)
            until(lambda: len(entries(log, "configuration.wrong")) == workers, "each worker tells it")
            assert policy_of(url) == "default"
            written(file, main_file(entrance, tmp_path, policies={"new": {}}, teams={"t": TEAM}))
            running.send_signal(signal.SIGHUP)
            until(lambda: len(entries(log, "configuration.reloaded")) == 2 * workers, "each worker has read it")
            assert {policy_of(url) for _ in range(10)} == {"new"}
            assert running.poll() is None
        fault = entries(log, "configuration.wrong")[0]["faults"]
        assert fault == [f"{file}:3: policies.default.triger: unknown setting. Fix: did you mean 'trigger'?"]


TEAM = {"keys": [HASH], "policy": "new"}
