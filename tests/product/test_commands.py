"""The commands: their output and their exit status. Each runs once in a process of its own, and else in this one."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from proxy.access.authenticator import Authenticator
from proxy.cli import models as cli_models
from proxy.limits.learned import LearnedLimit, LearnedLimits
from proxy.server.loopback import serve
from proxy.store import open_store
from proxy.upstream import limit_discovery
from tests.kit.configurations import loads
from tests.kit.program import ROOT, call, run
from tests.kit.scripted import chat, key_hash

GOOD: dict[str, Any] = {
    "upstreams": {"main": {"base_url": "http://127.0.0.1:9/v1"}},
    "models": [
        {"match": "small", "upstream": "main", "profile": {"context_window": 16_000, "tokenizer": "o200k_base"}},
        {"match": "gpt-*", "upstream": "main"},
    ],
    "policies": {"default": {}, "careful": {"extends": "default", "keep": {"messages": 8}}},
}
WRONG = """\
upstreams:
  main: {base_url: "http://127.0.0.1:9/v1"}
policies:
  default:
    triger: {fraction: 0.5}
    keep: {fraction: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a right and a wrong configuration, and a recorded request."""
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "wrong.yaml").write_text(WRONG)
    (tmp_path / "long.json").write_text(json.dumps({"model": "small", "messages": chat(7, 1_000)}))
    return tmp_path


def test_check_without_a_file(folder: Path) -> None:
    assert call(folder, "check", "--config", "good.yaml").stdout == "good.yaml: fine\n"
    assert call(folder, "check", COMPACTION_PROXY_CONFIG="good.yaml").stdout == "good.yaml: fine\n"
    assert call(folder, "check", "wrong.yaml", COMPACTION_PROXY_CONFIG="good.yaml").returncode == 1
    done = call(folder, "check", "--model", "small")
    assert done.returncode == 2
    assert "No configuration. Fix: check FILE, or set COMPACTION_PROXY_CONFIG" in done.stderr
    gone = call(folder, "models", COMPACTION_PROXY_CONFIG="gone.yaml")
    assert gone.returncode == 2
    assert "gone.yaml" in gone.stderr


def test_check_shows_what_is_in_force_for_a_team_and_a_model(tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    (conf / "policies").mkdir(parents=True)
    (conf / "main.yaml").write_text(
        "upstreams: {main: {api_key: sk-secret-1}}\n"
        "models: [{match: 'gpt-*', upstream: main, model: gpt-4o}]\n"
        "policies:\n  default:\n    summary:\n      max_tokens: 3000\n    evict_results: null\n"
    )
    (conf / "policies" / "search.yaml").write_text(
        f"teams:\n  search: {{policy: careful, models: ['gpt-5*'], keys: ['sha256:{'1' * 64}']}}\n"
        "policies:\n  careful:\n    extends: default\n    keep: {messages: 40}\n"
        "    models:\n      - match: 'gpt-5*'\n        trigger: {tokens: 9000}\n        summary: {timeout: 7}\n"
    )
    done = call(tmp_path, "check", "conf", "--team", "search", "--model", "gpt-5")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sk-secret-1" not in done.stdout
    rows = {
        cells[0]: cells[1:]
        for cells in (re.findall(r"│ (.*?) +(?=│)", line) for line in done.stdout.splitlines())
        if cells
    }
    assert rows["policy"] == ["careful extends default"]
    assert rows["settings for some models"] == ["those for gpt-5*"]
    assert rows["goes to"] == ["main, as gpt-4o"]
    assert rows["trigger"] == ["[{tokens: 9000}]", "conf/policies/search.yaml:9"]
    assert rows["keep"] == ["{messages: 40}", "conf/policies/search.yaml:6"]
    assert rows["summary.timeout"] == ["7.0", "conf/policies/search.yaml:10"]
    assert rows["summary.max_tokens"] == ["3000", "conf/main.yaml:6"]
    assert rows["evict_results"] == ["null", "conf/main.yaml:7"]
    assert rows["media.trigger"] == ["[{tokens: 9000}]", "follows from trigger"]
    assert rows["media.keep"] == ["{messages: 40}", "follows from keep"]
    assert rows["prepare"] == ["[]", "follows from trigger"]
    assert rows["index.max_tokens"] == ["4000", "default"]
    assert len([name for name in rows if name.startswith("truncate_args.")]) == 6
    plain = call(tmp_path, "check", "conf", "--model", "gpt-4")
    assert re.search(r"│ trigger +│ \[\{fraction: 0.85\}\] +│ default", plain.stdout)
    barred = call(tmp_path, "check", "conf", "--team", "search", "--model", "o9")
    assert "nowhere: no route matches" in barred.stdout
    assert "no: the team may use gpt-5*" in barred.stdout
    unknown = call(tmp_path, "check", "conf", "--team", "serch")
    assert unknown.returncode == 2
    assert unknown.stderr == "there is no team 'serch'. Fix: did you mean 'search'?\n"


def test_a_new_key_works_with_the_lines_it_comes_with(tmp_path: Path) -> None:
    done = run(tmp_path, "keys", "new", "--team", "search", "--expires", "2999-01-31")
    assert (done.returncode, done.stderr) == (0, "")
    (key,) = re.findall(r"^ +(cp-[\w-]{43})$", done.stdout, re.MULTILINE)
    lines = done.stdout[done.stdout.index("teams:") :]
    assert key not in lines
    upstreams = "auth: {mode: keys}\nupstreams: {main: {api_key: sk-upstream}}\n"
    caller = Authenticator(loads((upstreams + lines).encode(), {})).authenticate(
        [(b"authorization", f"Bearer {key}".encode())]
    )
    assert caller.team == "search"
    assert list(tmp_path.iterdir()) == [], "nothing was written"
    named = call(tmp_path, "keys", "new", "--team", "search", "--name", "007").stdout
    lines = named[named.index("teams:") :]
    assert loads((upstreams + lines).encode(), {}).teams["search"].keys[0].name == "007"
    other = call(tmp_path, "keys", "new", "--team", "search")
    assert key not in other.stdout
    assert "expires" not in other.stdout


def test_a_key_of_an_administrator_comes_with_its_lines(tmp_path: Path) -> None:
    done = call(tmp_path, "keys", "new", "--admin")
    key = re.search(r"^  (cp-\S+)$", done.stdout, re.MULTILINE)
    assert key is not None
    assert "\n  keys:\n    - " in done.stdout, "each level is two further columns in"
    section = yaml.safe_load(done.stdout[done.stdout.index("admin:") :])
    assert section == {"admin": {"keys": [key_hash(key[1])]}}
    assert call(tmp_path, "keys", "new", "--admin", "--team", "a").returncode == 2
    assert call(tmp_path, "keys", "new").returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--team", "a b"],
        ["--team", "t", "--name", 'a"'],
        ["--team", "t", "--expires", "2020-01-31"],
        ["--team", "t", "--expires", "soon"],
        [],
    ],
)
def test_no_key_is_made_of_nonsense(arguments: list[str], tmp_path: Path) -> None:
    done = call(tmp_path, "keys", "new", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""


def test_the_example_is_right(tmp_path: Path) -> None:
    keys = {name: f"sk-{name}" for name in re.findall(r"\$\{(\w+)\}", (ROOT / "config.example.yaml").read_text())}
    done = call(tmp_path, "check", str(ROOT / "config.example.yaml"), **keys)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "long.json", "--config", "wrong.yaml"],
        ["models", "gpt-5.2", "--config", "wrong.yaml"],
        ["serve", "--config", "wrong.yaml", "--port", "0"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_configuration_ends_every_command(arguments: list[str], folder: Path) -> None:
    done = (run if "serve" in arguments else call)(folder, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "wrong.yaml:5: policies.default.triger" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("**/*.db")), "nothing was begun"


def test_explain(folder: Path) -> None:
    done = run(folder, "explain", "long.json", "--config", "good.yaml")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for said in ("15,488 tokens", "in 16 messages", "stages │ summary", "system messages │ 7"):
        assert said in text
    careful = call(folder, "explain", "long.json", "--config", "good.yaml", "--policy", "careful")
    replaced = [int(re.findall(r"messages 2 to (\d+)", output)[0]) for output in (careful.stdout, text)]
    assert 4 <= replaced[0] < replaced[1] <= len(chat(7, 1_000)) - 2, "who keeps more replaces less"
    larger = call(folder, "explain", "long.json", "--config", "good.yaml", "--model", "gpt-4o-mini")
    assert "no: below every trigger" in larger.stdout
    assert not list(folder.glob("**/*.db")), "nothing is stored"


def test_explain_uses_the_limits_that_the_server_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First those that the upstream reports, then lower ones that the server has learned for some caller."""
    for module in (limit_discovery, cli_models):
        monkeypatch.setattr(module, "reports_limits", lambda settings: True)

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "local", "max_model_len": 16_000}]})

    async def learn(place: tuple[str, str]) -> None:
        store = open_store(f"sqlite:///{folder}/own.db")
        limits = LearnedLimits(store)
        for team, tokens in (("a", 9_000), ("b", 8_000)):
            limits.learn(*place, f"team:{team}", LearnedLimit(input=tokens), LearnedLimit())
        await limits.aclose()
        await store.aclose()

    def explained() -> str:
        done = call(folder, "explain", "long.json", "--config", "own.yaml", "--model", "local")
        assert done.returncode == 0, done.stderr
        return " ".join(re.sub(r"[│\n]", " ", done.stdout).split())

    with serve(Starlette(routes=[Route("/v1/models", models)])) as url:
        settings = {"upstreams": {"main": {"base_url": f"{url}/v1"}}, "store": {"url": "sqlite:///own.db"}}
        (folder / "own.yaml").write_text(yaml.safe_dump(settings))
        reported = explained()
        asyncio.run(learn(("main", "local")))
        learned = explained()

    assert "window 16,000 (upstream: max_model_len in /models)" in reported
    assert f"learned limits none: there is no {folder}/own.db" in reported
    assert re.search(r"compacted yes .* stages summary", reported)
    assert re.search(r"learned limits 8,000 tokens of input \(team b, the strictest of 2\)", learned)
    budgets = [
        int(re.findall(r"budget for the input ([\d,]+)", text)[0].replace(",", "")) for text in (reported, learned)
    ]
    assert budgets[1] <= 8_000 < budgets[0] < 16_000
    assert "upstream main may accept less" in explained(), "it doesn't respond now"
    assert "may accept less" not in reported + learned


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("[1]", [], "no messages, so there is nothing to explain"),
        ("{", [], "not JSON"),
        ('{"model": "small", "messages": []}', [], "no messages, so there is nothing to explain"),
        (None, ["--policy", "nope"], "there is no policy 'nope'. Fix: use one of: careful, default"),
        (None, ["--model", "o9"], "no route of 'models' matches 'o9'"),
    ],
)
def test_explain_what_cannot_be(content: str | None, options: list[str], said: str, folder: Path) -> None:
    if content is not None:
        (folder / "long.json").write_text(content)
    done = call(folder, "explain", "long.json", "--config", "good.yaml", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_explain_a_request_of_another_api(api: str, folder: Path) -> None:
    """The API follows from the request, or from the option."""
    turns = [turn for turn in chat(7, 1_000) if turn["role"] != "system"]
    body = {"input": turns} if api == "responses" else {"system": "Be brief.", "messages": turns}
    (folder / "other.json").write_text(json.dumps({"model": "small", **body}))
    for options in ([], ["--api", api]):
        done = call(folder, "explain", "other.json", "--config", "good.yaml", *options)
        assert done.returncode == 0, done.stderr
        assert "stages │ summary" in " ".join(done.stdout.split())
    wrong = call(folder, "explain", "other.json", "--config", "good.yaml", "--api", "chat")
    assert (wrong.returncode == 2) is (api == "responses")


def test_models(folder: Path) -> None:
    done = run(folder, "models", "--config", "good.yaml")
    assert done.returncode == 0, done.stderr
    assert re.search(r"context_window\s+│ 16,000\s+│ override", done.stdout)
    named = call(folder, "models", "gpt-5.2", "unheard-of-model")
    assert named.returncode == 0, named.stderr
    assert re.search(r"max_input_tokens\s+│ 272,000", named.stdout)
    assert "no limits are known for unheard-of-model" in named.stdout
    nothing = call(folder, "models")
    assert nothing.returncode == 2
    assert "Name the models to show" in nothing.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_serve_on_a_port_that_is_taken(folder: Path, workers: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(folder, "serve", "--config", "good.yaml", "--port", str(port), "--workers", workers)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"server\.port: cannot listen on 127\.0\.0\.1:{port} \(address already in use\)\. "
        rf"Fix: stop the other program, or use another port: --port \d+\n",
        done.stderr,
    )


def test_serve_refuses_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    (tmp_path / "c.yaml").write_text("store: {url: sqlite:///taken/s.db}\n")
    done = run(tmp_path, "serve", "--config", "c.yaml", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("store.url: cannot create or write taken/s.db (")
    assert ". Fix: " in done.stderr
