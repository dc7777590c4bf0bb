"""Test common mistakes: each one gets an error or a warning with a fix to paste."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from proxy.cli.commands import main
from proxy.config import check, read
from proxy.config.globs import covers
from proxy.config.masking import masked
from tests.kit.client import StartProxy

ROOT = Path(__file__).parents[3]
POLICY = "policies:\n  default:\n    %s\n"
FORM = re.compile(r".+?:\d+: (?:warning: )?(?:[\w.\[\]-]+: )?.+?\. Fix: .+", re.DOTALL)

ERRORS = {
    "a variable as LiteLLM writes it": ("upstreams:\n  main: {api_key: os.environ/X}\n", 2, 'Fix: "${X}"'),
    "a variable as shells write it": (
        "upstreams:\n  main: {api_key: $OPENAI_API_KEY}\n",
        2,
        'Fix: "${OPENAI_API_KEY}"',
    ),
    "the whole URL": (
        "upstreams:\n  main: {base_url: https://a.example/v1/chat/completions}\n",
        2,
        "must end before /chat/completions, which the proxy appends. Fix: base_url: https://api.openai.com/v1",
    ),
    "a port in the host": (
        'server:\n  host: "0.0.0.0:8787"\n',
        2,
        "(got 0.0.0.0:8787). Fix: host: 0.0.0.0, and on its own line port: 8787",
    ),
    "a URL as host": ("server:\n  host: http://localhost\n", 2, "Fix: host: localhost"),
    "brackets": (
        'server:\n  host: "[::1]:80"\n',
        2,
        'Fix: host: "::1", and on its own line port: 80',
    ),
    "percent": (POLICY % "trigger: 85%", 3, "trigger: must be a mapping (got 85%). Fix: trigger: {fraction: 0.85}"),
    "a bare fraction": (POLICY % "trigger: 0.85", 3, "(got 0.85). Fix: trigger: {fraction: 0.85}"),
    "bare tokens": (POLICY % "trigger: 128k", 3, "(got 128k). Fix: trigger: {tokens: 128000}"),
    "a bare keep": (POLICY % "keep: 10%", 3, "(got 10%). Fix: keep: {fraction: 0.1}"),
    "a model as summary": (POLICY % "summary: gpt-4o-mini", 3, "Fix: did you mean summary: {model: gpt-4o-mini}?"),
    "archive off": (POLICY % "archive: false", 3, "(got false). Fix: to turn it off, write archive: null"),
    "summary off": (POLICY % "summary: false", 3, "must be a section (got false). Fix: "),
    "seconds": (POLICY % "summary: {timeout: 45s}", 3, "must be a number of seconds (got 45s). Fix: timeout: 45"),
    "minutes": ("server: {deadline: 10m}\n", 1, "Fix: deadline: 600"),
    "thousands": (POLICY % "summary: {max_tokens: 4k}", 3, "must be a whole number (got 4k). Fix: max_tokens: 4000"),
    "a limit in dollars": (
        "teams: {t: {limits: {usd_per_month: 5}}}\n",
        1,
        "Fix: use one of: concurrent, requests_per_minute, summary_tokens_per_day",
    ),
    "workers": ("server: {workers: 4}\n", 1, "set the number of workers with serve --workers N"),
    "LiteLLM": ("model_list: []\n", 1, "this looks like a LiteLLM configuration; docs/migrating.md lists"),
    "logging": ("logging: {level: debug}\n", 1, "logs JSON lines to standard error"),
    "a condition": (POLICY % "keep: {mesages: 10}", 3, "unknown key 'mesages'. Fix: did you mean 'messages'?"),
    "look-ahead": (
        POLICY % 'pinned: ["(?=a)b"]',
        3,
        "look-ahead and look-behind aren't supported (got (?=a)b). Fix: match the surrounding text instead",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_an_error_with_its_fix(name: str, tmp_path: Path) -> None:
    text, line, hint = ERRORS[name]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (found,) = check(file, {})
    assert found.startswith(f"{file}:{line}: ")
    assert hint in found
    assert FORM.fullmatch(found)


UP = "upstreams:\n  main: {base_url: 'http://127.0.0.1:9/v1'}\n"
WARNINGS = {
    "a route that is never reached": (
        UP + "models:\n  - {match: '*', upstream: main}\n  - {match: gpt-4o, upstream: main}\n",
        5,
        "models[1].match: never reached, because models[0] ('*') comes first. Fix: move this route before models[0]",
    ),
    "keep above the trigger": (
        POLICY % "trigger: {fraction: 0.5}\n    keep: {fraction: 0.6}",
        4,
        "policies.default.keep: 0.6 (fraction) isn't below the trigger's 0.5, so a compaction can keep all messages. "
        "Fix: keep: {fraction: 0.1}",
    ),
    "keep above the trigger of a model": (
        POLICY % "models: [{match: 'a*', trigger: {messages: 9}, keep: {messages: 9}}]",
        3,
        "Fix: keep: {messages: 1}",
    ),
    "Azure": (
        "upstreams:\n  az:\n    provider: azure\n    base_url: https://x.openai.azure.com\n",
        2,
        'Fix: add api_version: "2024-10-21"',
    ),
    "an unknown window": (
        UP + "models:\n  - {match: my-model, upstream: main}\n",
        4,
        "the context window of 'my-model' is unknown unless the upstream reports it. "
        "Fix: add its size in tokens, as in profile: {context_window: 128000}",
    ),
    "a team without keys": ("teams:\n  t: {keys: []}\n", 2, "compaction-proxy keys new --team t"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_a_likely_mistake_is_a_warning_with_its_fix(name: str, tmp_path: Path) -> None:
    text, line, hint = WARNINGS[name]
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (found,) = read(file, {}).warnings
    assert found.startswith(f"{file}:{line}: warning: ")
    assert hint in found
    assert FORM.fullmatch(found)


OPEN = "upstreams: {main: {api_key: x}}\nstore: {url: 'sqlite:///s.db'}\n"
EXPOSED = [
    (OPEN, "0.0.0.0", ["auth.mode: anyone who can reach 0.0.0.0 can spend", "store.encryption.key: "]),  # noqa: S104
    (OPEN + "server: {host: '::'}\n", None, ["auth.mode: ", "store.encryption.key: "]),
    (OPEN, None, []),
    (OPEN, "::1", []),
    ("store: {url: 'sqlite://'}\n", "0.0.0.0", []),  # noqa: S104
]


@pytest.mark.parametrize(("text", "host", "expected"), EXPOSED)
def test_listening_on_more_than_loopback_is_warned_of(
    text: str, host: str | None, expected: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    options = ["check", str(file), *(["--host", host] if host else [])]
    plain = CliRunner().invoke(main, options)
    assert plain.exit_code == 0
    said = [line for line in plain.stderr.splitlines() if "warning: " in line]
    assert len(said) == len(expected)
    for line, start in zip(said, expected, strict=True):
        assert line.partition("warning: ")[2].startswith(start)
    assert CliRunner().invoke(main, [*options, "--strict"]).exit_code == (1 if expected else 0)


def test_serve_refuses_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    (tmp_path / "c.yaml").write_text("store: {url: sqlite:///taken/s.db}\n")
    command = [sys.executable, "-m", "proxy", "serve", "--config", "c.yaml", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("store.url: cannot create or write taken/s.db (")
    assert ". Fix: " in done.stderr


@pytest.mark.parametrize(
    ("general", "special", "expected"),
    [
        ("*", "gpt-4o", True),
        ("gpt-*", "gpt-4*", True),
        ("gpt-4*", "gpt-*", False),
        ("gpt-?", "gpt-*", False),
        ("*mini", "gpt-*mini", True),
        ("a*b", "a*c", False),
        ("[ab]*", "a*", True),
        ("[ab]", "[ab]", True),
        ("[ab]", "[abc]", False),
        ("**", "*", True),
        ("a", "?", False),
    ],
)
def test_whether_one_pattern_covers_another(general: str, special: str, expected: bool) -> None:
    assert covers(general, special) is expected


@pytest.mark.parametrize(
    "text",
    [
        "claude-3-5-sonnet-20241022",
        "bedrock/us.anthropic.claude-3-5-sonnet-20241022-v2:0",
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8",
        "str_replace_based_edit_tool",
        "sha256: and 64 hex digits",
    ],
)
def test_names_are_not_masked(text: str) -> None:
    assert masked(text) == text


def test_the_archive_says_that_an_id_is_a_requests(start_proxy: StartProxy) -> None:
    url = start_proxy("http://127.0.0.1:9")
    said = httpx.get(f"{url}/compaction/archive/{'0f' * 8}", trust_env=False).json()["error"]["message"]
    assert said.startswith(
        "This is the id of a request, from the header x-compaction-id. Copy the archive id from the note "
    )
    other = httpx.get(f"{url}/compaction/archive/x", trust_env=False).json()["error"]["message"]
    assert other.startswith("This isn't an archive id. An archive id has 20 lowercase hexadecimal digits. Copy ")
