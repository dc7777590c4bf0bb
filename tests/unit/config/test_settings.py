"""Test settings: their kinds, policies, and values from the environment."""

import ast
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import ValidationError

from proxy.compaction.settings import Clause
from proxy.config import Route, Settings, load
from tests.kit.configuration import errors_in
from tests.kit.configurations import loads


def settings(text: str, **environ: str) -> Settings:
    return loads(dedent(text).encode(), environ)


@pytest.mark.parametrize("content", [None, "", "# nothing\n", "---\n", "\ufeff# a mark\n", "{}"])
def test_without_settings_every_model_goes_to_openai_with_the_callers_key(
    content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8787/v1")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:8787")
    environ = {"OPENAI_BASE_URL": "http://127.0.0.1:8787/v1", "OPENAI_API_KEY": "sk-not-ours"}
    found = load(None, environ) if content is None else loads(content.encode(), environ)
    assert (found.server.host, found.server.port) == ("127.0.0.1", 8787)
    assert found.server.body_limit == 64_000_000
    assert (found.server.deadline, found.server.drain) == (600, 30)
    assert list(found.upstreams) == ["openai", "anthropic"]
    claude = found.upstreams["anthropic"]
    assert (claude.provider, claude.base_url) == ("anthropic", "https://api.anthropic.com/v1")
    assert claude.api_key is None
    upstream = found.upstreams["openai"]
    assert (upstream.provider, upstream.base_url) == ("openai", "https://api.openai.com/v1")
    assert upstream.api_key is None
    assert found.route("any/model") == Route("openai", "any/model", None)
    assert found.policies["default"] == Settings().policies["default"]


def test_the_default_store_is_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = load(None, {}).store.path
    assert path is not None
    assert path.name == "compaction.db"
    assert path.parent.name == "compaction-proxy"
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a/b.db", Path("a/b.db")),
        ("sqlite:////var/lib/b.db", Path("/var/lib/b.db")),
        ("sqlite://", None),
    ],
)
def test_the_store(url: str, path: Path | None) -> None:
    assert settings(f"store: {{url: '{url}'}}").store.path == path


@pytest.mark.parametrize(
    ("written", "size"),
    [("100", 100), ("64MB", 64_000_000), ("1 GB", 10**9), ("2mib", 2 * 1024**2), ("'7'", 7), ("5kB", 5000), ("9b", 9)],
)
def test_sizes(written: str, size: int) -> None:
    assert settings(f"server: {{body_limit: {written}}}").server.body_limit == size


def test_routes_match_in_order_and_by_case() -> None:
    found = settings("""
        upstreams: {a: {}, b: {}}
        models:
          - {match: "gpt-4o", upstream: b, model: x}
          - {match: "gpt-*", upstream: a}
          - {match: "[ab]?", upstream: b}
    """)
    assert found.route("gpt-4o") == Route("b", "x", None)
    assert found.route("gpt-4o-mini") == Route("a", "gpt-4o-mini", None)
    assert found.route("a1") == Route("b", "a1", None)
    assert found.route("GPT-4o") is None


@pytest.mark.parametrize(
    ("upstream", "base_url"),
    [
        ("{}", "https://api.openai.com/v1"),
        ("{base_url: null}", "https://api.openai.com/v1"),
        ("{provider: anthropic}", "https://api.anthropic.com/v1"),
        ("{provider: gemini}", None),
        ("{provider: groq, base_url: 'http://127.0.0.1:8000/v1/'}", "http://127.0.0.1:8000/v1"),
        ("{base_url: 'http://[::1]:8000'}", "http://[::1]:8000"),
    ],
)
def test_the_address_of_an_upstream(upstream: str, base_url: str | None) -> None:
    assert settings(f"upstreams: {{main: {upstream}}}").upstreams["main"].base_url == base_url


def test_providers_with_credentials_of_their_own_need_no_key_where_callers_have_the_proxys() -> None:
    found = settings(f"""
        auth: {{mode: keys}}
        teams: {{a: {{keys: ["sha256:{"0" * 64}"]}}}}
        upstreams: {{main: {{provider: bedrock}}}}
    """)
    assert found.upstreams["main"].has_credential


def test_secrets_are_not_in_any_representation() -> None:
    text = "upstreams: {main: {api_key: sk-canary, headers: {x-key: sk-canary}}}"
    found = settings(text)
    assert found.upstreams["main"].headers["x-key"].get_secret_value() == "sk-canary"
    assert "sk-canary" not in f"{found} {found!r} {found.model_dump()} {found.model_dump_json()}"


ROOT = Path(__file__).parents[3]

SETTINGS = (
    *("allow_header", "keep_newest", "overflow_retries", "rate_limit_as_limit", "reserve_output", "self_compacting"),
    *("exclude", "keep_first", "max_length", "max_replaced", "max_tokens_per_tool", "min_length", "truncation_text"),
    *("fallback_model", "max_rounds", "redact_secrets", "trim_tokens_to_summarize"),
    *("on_store_failure", "queue_timeout", "summary_tokens_per_day"),
)
"""Names that only settings have: those of a policy, of its stages, of its other sections, and of the process."""

_FOUND = re.compile(r'^(.+?):(\d+): error: .* has no attribute "(\w+)"', re.MULTILINE)


def plant(file: Path) -> set[tuple[int, str]]:
    """Remove the last letter of each setting that a module reads. Return the lines and the misspelled names."""
    text = file.read_text(encoding="utf-8")
    lines, planted = text.split("\n"), set[tuple[int, str]]()
    reads = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute) and node.attr in SETTINGS]
    for node in sorted(reads, key=lambda node: node.end_col_offset or 0, reverse=True):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        line = lines[node.end_lineno - 1]
        lines[node.end_lineno - 1] = line[: node.end_col_offset - 1] + line[node.end_col_offset :]
        planted.add((node.end_lineno, node.attr[:-1]))
    file.write_text("\n".join(lines), encoding="utf-8")
    return planted


@pytest.mark.full
@pytest.mark.long
def test_mypy_finds_each_misspelled_setting(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "proxy", tmp_path / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = sorted(tmp_path.glob("proxy/**/*.py"))
    planted = {(str(file.relative_to(tmp_path)), *read) for file in files for read in plant(file)}
    assert {name for _, _, name in planted} == {name[:-1] for name in SETTINGS}
    mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
    output = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    found = {(file, int(line), name) for file, line, name in _FOUND.findall(output)}
    assert planted <= found


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("server:\n  host: ${HOST}\n", 2, "${HOST} isn't set. Fix: export HOST=VALUE"),
        ("server:\n  host: ${HOST-x}\n", 2, "isn't the name of a variable. Fix: write ${NAME}"),
        ("server:\n  host: a${}\n", 2, "isn't the name of a variable"),
        ("server:\n  host: a${HOST\n", 2, "isn't the name of a variable"),
        ("server:\n  host: ${1A}\n", 2, "isn't the name of a variable"),
        ("policies:\n  default:\n    summary:\n      prompt: |\n        {messages} ${X}\n", 4, "${X} isn't set"),
    ],
)  # fmt: skip
def test_a_variable_without_a_value_is_an_error(text: str, line: int, hint: str) -> None:
    (found,) = errors_in(text)
    assert found.line == line
    assert hint in found.message


@pytest.mark.parametrize(("written", "value"), [
    ("${A}", "one"),
    ("x-${A}-${B}", "x-one-two"),
    ('"${A}"', "one"),
    ("${NONE:-three}", "three"),
    ("${EMPTY:-three}", "three"),
    ("${A:-three}", "one"),
    ("${NONE:-a:-b}", "a:-b"),
    ("$${A}", "${A}"),
    ("$A$$", "$A$$"),
    ("${NASTY}", "a: b\n- {c: !!python/x ${A}}"),
])  # fmt: skip
def test_variables(written: str, value: str) -> None:
    nasty = "a: b\n- {c: !!python/x ${A}}"
    text = f"upstreams:\n  main: {{}}\nmodels:\n  - match: {written}\n    upstream: main\n"
    assert settings(text, A="one", B="two", EMPTY="", NASTY=nasty).models[0].match == value


def test_a_variable_becomes_a_number_where_one_is_wanted_and_stays_text_where_not() -> None:
    found = settings(
        """
        server: {port: "${P}", deadline: "${D}", body_limit: "${L}"}
        upstreams: {main: {api_key: "${P}"}}
        policies: {default: {allow_header: "${T}", trigger: {tokens: "${P}"}, keep: {fraction: "${F}"}}}
        """,
        P="123",
        D="1.5",
        L="2MB",
        T="false",
        F="0.25",
    )
    assert (found.server.port, found.server.deadline, found.server.body_limit) == (123, 1.5, 2_000_000)
    key = found.upstreams["main"].api_key
    assert key is not None
    assert key.get_secret_value() == "123"
    policy = found.policies["default"]
    assert (policy.allow_header, policy.trigger, policy.keep) == (False, (Clause(tokens=123),), Clause(fraction=0.25))


def test_variables_in_names_and_comments_are_left_alone() -> None:
    assert settings("# ${NONE}\nupstreams:\n  main: {headers: {x$y: z}}\n").upstreams["main"].headers.keys() == {"x$y"}


def trigger(text: str) -> tuple[Clause, ...]:
    return settings(f"policies:\n  default:\n    trigger: {text}\n").policies["default"].trigger


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("{tokens: 4000}", (Clause(tokens=4000),)),
        ("{tokens: 4_000}", (Clause(tokens=4000),)),
        ("{fraction: 1}", (Clause(fraction=1.0),)),
        ("{tokens: 4000, messages: 10}", (Clause(tokens=4000, messages=10),)),
        ("[{tokens: 4000}, {messages: 10}]", (Clause(tokens=4000), Clause(messages=10))),
        ("[{tokens: 4000, fraction: 0.5}, {messages: 10}]", (Clause(tokens=4000, fraction=0.5), Clause(messages=10))),
        ("[]", ()),
        ("null", ()),
    ],
)
def test_conditions(text: str, meaning: tuple[Clause, ...]) -> None:
    assert trigger(text) == meaning


def test_keep() -> None:
    policy = settings("policies: {default: {keep: {messages: 20}}}").policies["default"]
    assert policy.keep == Clause(messages=20)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("null", None),
        ("4000", Clause(tokens=4000)),
        ("{tokens: 4000}", Clause(tokens=4000)),
        ("{fraction: 0.2}", Clause(fraction=0.2)),
    ],
)
def test_reserve_output(text: str, meaning: Clause | None) -> None:
    assert settings(f"policies: {{default: {{reserve_output: {text}}}}}").policies["default"].reserve_output == meaning


@pytest.mark.parametrize(
    ("stated", "prepare"),
    [
        ("{trigger: {fraction: 0.9}}", (Clause(fraction=0.75),)),
        ("{trigger: {fraction: 0.5}}", (Clause(fraction=0.4412),)),
        ("{trigger: [{fraction: 0.9}, {fraction: 0.17}]}", (Clause(fraction=0.15),)),
        ("{trigger: {tokens: 4000}}", ()),
        ("{trigger: [{fraction: 0.9}, {price_step: true}]}", (Clause(price_step=True), Clause(fraction=0.75))),
        ("{trigger: {fraction: 0.5, messages: 5}}", ()),
        ("{trigger: null}", ()),
        ("{trigger: null, prepare: {fraction: 0.5}}", ()),
        ("{trigger: {tokens: 4000}, prepare: {tokens: 3000}}", (Clause(tokens=3000),)),
        ("{prepare: null}", ()),
    ],
)
def test_prepare_follows_the_trigger_unless_it_is_stated(stated: str, prepare: tuple[Clause, ...]) -> None:
    assert settings(f"policies: {{default: {stated}}}").policies["default"].prepare == prepare


def test_stages_take_the_policys_own_trigger_and_keep_unless_they_state_others() -> None:
    policy = settings("""
        policies:
          default:
            trigger: {tokens: 4000}
            keep: {messages: 20}
            evict_results: {keep: {messages: 3}}
    """).policies["default"]
    assert policy.truncate_args is not None
    assert policy.evict_results is not None
    assert (policy.truncate_args.trigger, policy.truncate_args.keep) == ((Clause(tokens=4000),), Clause(messages=20))
    assert (policy.evict_results.trigger, policy.evict_results.keep) == ((Clause(tokens=4000),), Clause(messages=3))


@pytest.mark.parametrize(("text", "same"), [
    ("{mode: shadow}", True),
    ("{mode: off}", True),
    ("{allow_header: false}", True),
    ("{keep: {fraction: 0.1}}", True),
    ("{trigger: [{fraction: 0.85}]}", True),
    ("{keep: {fraction: 0.2}}", False),
    ("{trigger: {fraction: 0.86}}", False),
    ("{prepare: {fraction: 0.7}}", False),
    ("{reserve_output: 1000}", False),
    ("{summary: {model: m}}", False),
    ("{summary: {fallback_model: m}}", False),
    ("{summary: {prompt: '{messages}'}}", False),
    ("{summary: {max_tokens: 3}}", False),
    ("{truncate_args: null}", False),
    ("{evict_results: {exclude: []}}", False),
    ("{user_messages: {max_tokens: 3}}", False),
    ("{index: {max_tokens: 3}}", False),
    ("{unknown_model: {keep: {messages: 3}}}", False),
])  # fmt: skip
def test_the_fingerprint_changes_with_what_affects_checkpoints_and_summaries(text: str, same: bool) -> None:
    found = settings(f"policies: {{other: {text}}}").policies
    assert len(found["other"].fingerprint) == 64
    assert (found["other"].fingerprint == found["default"].fingerprint) is same


def test_a_policy_can_be_a_key_and_cannot_be_changed() -> None:
    policy = load(None, {}).policies["default"]
    assert {policy: 1}[load(None, {}).policies["default"]] == 1
    with pytest.raises(ValidationError):
        policy.mode = "off"
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.keep.tokens = 5  # type: ignore[misc]
