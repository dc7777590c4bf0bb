"""The commands for operators: `run`, `check --json`, `check --live`, and `keys list`."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from proxy.limits.prices import price_from
from proxy.pipeline.billing import Basis, cost_of
from proxy.records import open_records
from proxy.server.loopback import PROGRAMS, launch, serve
from proxy.store import open_store
from proxy.telemetry.record import RequestRecord, Usage
from tests.kit.combinations import combined
from tests.kit.program import ROOT, call, run
from tests.kit.scripted import key_hash
from tests.kit.upstream import StandIn

ASK = """
import os, urllib.request
base = os.environ["OPENAI_BASE_URL"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == base
request = urllib.request.Request(
    base + "/chat/completions", b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
    {"content-type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(request).headers["x-compaction"])
raise SystemExit(7)
"""


def configured(folder: Path, **sections: object) -> str:
    (folder / "c.yaml").write_text(yaml.safe_dump(sections))
    return "c.yaml"


def test_a_live_check_reports_each_part_with_a_fix(tmp_path: Path) -> None:
    with serve(StandIn().app) as url:
        upstreams = {"main": {"base_url": f"{url}/v1"}, "gone": {"base_url": "http://127.0.0.1:9/v1"}}
        models = [{"match": "gpt-5", "upstream": "main"}, {"match": "own", "upstream": "main"}]
        file = configured(tmp_path, upstreams=upstreams, models=models, store={"url": "sqlite:///c.db"})
        done = call(tmp_path, "check", "--live", "--config", file)
        found = json.loads(call(tmp_path, "check", "--live", "--config", file, "--json").stdout)["findings"]
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert len(lines) == len(found)
    states = {one["about"]: one["state"] for one in found}
    assert states["upstream main"] == states["model gpt-5"] == states["store c.db"] == "ok"
    assert (states["upstream gone"], states["model own"]) == ("failed", "warning")
    assert all(one["fix"] for one in found if one["state"] != "ok")
    (gone,) = (line for line in lines if line.startswith("FAILED   upstream gone: "))
    assert gone.count("check upstreams.gone") == 1
    assert not re.search(r"\.\.|\. \.", gone)


def test_a_live_check_fails_for_an_unusable_store(tmp_path: Path) -> None:
    (tmp_path / "c.db").mkdir()
    with serve(StandIn().app) as url:
        upstreams = {"main": {"base_url": f"{url}/v1"}}
        file = configured(tmp_path, upstreams=upstreams, store={"url": "sqlite:///c.db"})
        done = call(tmp_path, "check", "--live", "--config", file)
    assert done.returncode == 1
    assert "FAILED   store c.db: " in done.stdout


def test_run_points_a_program_at_the_proxy_and_returns_its_status(tmp_path: Path) -> None:
    with serve(StandIn().app) as url:
        file = configured(tmp_path, upstreams={"main": {"base_url": f"{url}/v1"}}, store={"url": "sqlite://"})
        done = run(tmp_path, "run", "--config", file, "--", sys.executable, "-c", ASK)
        assert (done.returncode, done.stdout.strip()) == (7, "none"), done.stderr
        assert done.stderr == "compaction-proxy: requests: 1, compacted: 0, input tokens saved: 0\n"
        told = configured(tmp_path, upstreams={"main": {"base_url": f"{url}/v1"}}, log={"level": "info"})
        done = run(tmp_path, "run", "--config", told, "--", sys.executable, "-c", "")
        assert "Application startup complete" in done.stderr
        assert done.stderr.endswith(
            "compaction-proxy: no request came through the proxy. "
            "The program may not read OPENAI_BASE_URL or ANTHROPIC_BASE_URL.\n"
        )
        missing = run(tmp_path, "run", "--config", file, "no-such-program")
    assert missing.returncode == 2
    assert "no-such-program: can't be started (no such file or directory). Fix: check its name" in missing.stderr


KNOWN = [pytest.param(n, marks=[] if n in ("claude", "codex", "crush") else pytest.mark.full) for n in sorted(PROGRAMS)]

LOOK = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.mark.parametrize("name", KNOWN)
def test_run_gives_each_known_program_its_own_switches(name: str, tmp_path: Path) -> None:
    """The program is a stand-in that prints its arguments and its environment. ``--full`` runs all of them."""
    program = tmp_path / "bin" / name
    program.parent.mkdir()
    program.write_text(LOOK.format(python=sys.executable))
    program.chmod(0o700)
    file = configured(tmp_path, upstreams={"main": {"base_url": "http://127.0.0.1:9/v1"}}, store={"url": "sqlite://"})
    own = {"PATH": f"{program.parent}:{os.environ['PATH']}", "OPENAI_API_KEY": "sk-1", "NO_PROXY": "internal"}
    done = run(tmp_path, "run", "--config", file, "--", name, "say", "hi", **own)
    if PROGRAMS[name].file:
        assert (done.returncode, done.stdout) == (2, ""), "it isn't started"
        assert done.stderr.startswith(f"{name}: can't use the proxy for one run, because it reads its address from ")
        return
    assert done.returncode == 0, done.stderr
    arguments, environment = json.loads(done.stdout)
    url = environment["ANTHROPIC_BASE_URL"]
    assert environment["NO_PROXY"] == "internal,127.0.0.1"
    assert arguments[-2:] == ["say", "hi"]
    shown = json.dumps([arguments, {name: environment.get(name) for name in VARIABLES[name]}])
    assert url in shown
    assert done.stderr == f"compaction-proxy: no request came through the proxy. {PROGRAMS[name].hint}.\n"


VARIABLES = {
    "aider": ["OPENAI_API_BASE", "ANTHROPIC_API_BASE"],
    "claude": [],
    "codex": [],
    "copilot": ["COPILOT_PROVIDER_BASE_URL"],
    "goose": ["OPENAI_HOST", "ANTHROPIC_HOST"],
    "opencode": ["OPENCODE_CONFIG_CONTENT"],
    "qwen": [],
}


def test_run_finds_programs_behind_others_and_leaves_their_own_options() -> None:
    def options(*command: str) -> list[str]:
        return launch(command, "http://p", {})[0]

    assert options("npx", "-y", "@openai/codex@latest", "exec")[:4] == ["npx", "-y", "@openai/codex@latest", "-c"]
    assert options("/opt/bin/claude", "-p", "x")[1] == "--settings"
    assert options("claude", "--settings", "own.json") == ["claude", "--settings", "own.json"]
    assert options("qwen", "--auth-type", "openai").count("--auth-type") == 1
    assert options("python", "codex") == ["python", "codex"]
    own = {"OPENCODE_CONFIG_CONTENT": '{"model": "m", "provider": {"other": {}}}'}
    merged = json.loads(launch(["opencode"], "http://p", own)[1]["OPENCODE_CONFIG_CONTENT"])
    assert (merged["model"], sorted(merged["provider"])) == ("m", ["anthropic", "openai", "other"])


def test_check_prints_json_and_works_without_the_environment(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        'server: {port: "${PORT}"}\n'
        'upstreams: {main: {base_url: "https://${HOST}/v1", api_key: "${KEY}"}}\n'
        "policies: {default: {triger: 1}}\n"
    )
    done = call(tmp_path, "check", "c.yaml", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, [one["line"] for one in found["errors"]]) == (1, [1, 2, 2])
    found = json.loads(call(tmp_path, "check", "c.yaml", "--json", "--no-env").stdout)
    (error,) = found["errors"]
    assert (error["line"], error["fix"]) == (3, "did you mean 'trigger'?")
    (tmp_path / "c.yaml").write_text('upstreams: {main: {api_key: "${KEY}"}}\n')
    assert call(tmp_path, "check", "c.yaml").returncode == 1
    assert call(tmp_path, "check", "c.yaml", "--no-env").stdout == "c.yaml: fine\n"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("teams: {one: {limits: {spend: {usd: ten, per: day}}}}", "must be a number of US dollars"),
        ("upstreams:\n  main: {base_url: x\npolicies: {}", "Fix: close the { or [ that opens above, or put a comma"),
    ],
)
def test_a_message_fits_its_mistake(text: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    done = call(tmp_path, "check", "c.yaml")
    assert done.returncode == 1
    assert fix in done.stderr


def test_a_live_check_says_that_a_store_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"junk" * 3_000)
    file = configured(
        tmp_path, upstreams={"main": {"base_url": "http://127.0.0.1:9/v1"}}, store={"url": "sqlite:///c.db"}
    )
    (line,) = [
        line for line in call(tmp_path, "check", "--live", "--config", file).stdout.splitlines() if "store c.db" in line
    ]
    assert "Fix: the file is damaged: start the proxy, which moves it aside" in line


def test_check_warns_of_budgets_that_count_nothing(tmp_path: Path) -> None:
    limits = {"spend": {"usd": 10, "per": "day"}}
    two = {"keys": [key_hash("b")], "models": ["gpt-5"]}
    three = {"keys": [key_hash("c")], "models": ["gpt-5"], "limits": limits}
    teams = {"one": {"keys": [key_hash("a")], "limits": limits}, "two": two, "three": three}
    models = [{"match": name, "upstream": "main"} for name in ("own", "gpt-5")]
    sections = {
        "upstreams": {"main": {"provider": "openai", "api_key": "sk-1"}},
        "models": models,
        "auth": {"mode": "keys"},
        "teams": teams,
    }
    warned = call(tmp_path, "check", configured(tmp_path, **sections)).stderr
    (warning,) = [line for line in warned.splitlines() if "teams.one" in line]
    assert "teams.one.limits.spend.usd: refuses 'own', because no price of these models is known." in warning
    assert warning.endswith("output_cost_per_token: 0.000004}}, or a budget in tokens")
    assert "teams.three" not in warned
    prices = {"own": {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.000002}}
    assert "teams.one" not in call(tmp_path, "check", configured(tmp_path, **sections, prices=prices)).stderr


LOADS = """
import sys, httpx
from proxy.config import load
from proxy.server.app import Proxy
from proxy.server.loopback import serve
from pathlib import Path
with serve(Proxy(load(Path(sys.argv[1]), {}))) as url:
    assert httpx.get(url + "/readyz", trust_env=False).status_code == 200
    print("litellm" in sys.modules)
"""


@pytest.mark.parametrize(("provider", "loaded"), [("gemini", "True"), ("anthropic", "False")])
def test_litellm_is_loaded_before_ready_if_an_upstream_needs_it(provider: str, loaded: str, tmp_path: Path) -> None:
    upstreams = {"main": {"provider": provider, "api_key": "sk-1"}}
    file = configured(tmp_path, upstreams=upstreams, store={"url": "sqlite://"})
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOADS, file]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == loaded


def test_a_price_without_a_price_of_caches_is_exact() -> None:
    usage = Usage(input=10, output=2)

    def estimated(usage: Usage, **more: float) -> bool:
        price = price_from({"input_cost_per_token": 0.000001, "output_cost_per_token": 0.000002, **more})
        assert price is not None
        return cost_of(price, usage, Basis()).estimated

    assert not estimated(usage)
    assert estimated(usage, cache_read_input_token_cost=0.0000001)
    assert not estimated(replace(usage, cache_read=0), cache_read_input_token_cost=0.0000001)
    assert estimated(replace(usage, estimated=True))


LEAVES = """
import os, re, signal, sys, time
signal.signal(signal.SIGHUP, lambda *_: sys.exit(9))
parent, masks = os.getppid(), []
for id in (parent, os.getpid()):
    masks += re.findall(r"^Umask:\\s*(\\d+)$", open(f"/proc/{id}/status").read(), re.MULTILINE)
print(*masks, flush=True)
os.kill(parent, signal.SIGHUP)
time.sleep(4)
sys.exit(5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("before", "status"), [("", 9), ("trap '' HUP; ", 5)], ids=["by default", "nohup"])
def test_a_hangup_ends_the_program_of_run_and_only_the_proxy_writes_private_files(
    before: str, status: int, tmp_path: Path
) -> None:
    """The program's files are the user's, so it keeps the user's umask. The tests themselves may ignore hangups."""
    shell = ["env", "--default-signal=HUP", "bash", "-c", before + 'umask 022; exec "$@"', "-"]
    command = [*shell, sys.executable, "-m", "proxy", "run", "--"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, sys.executable, "-c", LEAVES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "0077 0022\n"), done.stderr


async def filled(url: str) -> None:
    async with aclosing(open_store(url)) as store:
        await store.put("team:a", "summary.2", "key", b"value", 60)
    async with aclosing(open_records(url)) as records:
        await records.write([RequestRecord("a", 0.0, tenant="team:a")], 60)


WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
"""Makes file permissions apply to root, too."""


@pytest.mark.skipif(
    bool(WITHOUT_RIGHTS) and not shutil.which("setpriv"), reason="no setpriv: apt-get install util-linux"
)
@pytest.mark.parametrize(("mode", "whole_folder"), [(0, True), *combined(2, [0o400, 0], [False])])
def test_commands_with_a_store_of_another_user_fail_at_once(mode: int, whole_folder: bool, tmp_path: Path) -> None:
    folder = tmp_path / "of another user"
    file = configured(tmp_path, upstreams={"main": {"provider": "openai"}}, store={"url": f"sqlite:///{folder}/s.db"})
    asyncio.run(filled(f"sqlite:///{folder}/s.db"))
    places = [folder] if whole_folder else [*folder.iterdir()]
    for place in places:
        place.chmod(mode)
    commands: list[tuple[str, ...]] = [("forget", "--team", "a")]
    if whole_folder:
        commands += [("report",), ("store", "backup", "b.db")]
    try:
        for command in commands:
            started = time.monotonic()
            done = subprocess.run(
                [*WITHOUT_RIGHTS, sys.executable, "-m", "proxy", *command, "--config", file],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=50,
                check=False,
            )
            assert (done.returncode, "Traceback" in done.stderr) == (2, False), (command, done.stderr)
            assert str(folder) in done.stderr or "Fix: " in done.stderr, (command, done.stderr)
            assert time.monotonic() - started < 30, command
    finally:
        for place in places:
            place.chmod(0o700)
