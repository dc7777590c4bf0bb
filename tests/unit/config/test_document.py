"""Test errors and warnings about a document of settings, with their lines."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli.commands import main
from proxy.compaction.settings import IndexRules, UserMessageRules
from proxy.compaction.stages import STAGES
from proxy.config import Policy, Settings, read
from proxy.config.document import Issue, Issues
from proxy.config.fields import Section
from tests.kit.configuration import errors_in
from tests.kit.configurations import check, loads

SYNTAX: dict[str, tuple[str | bytes, int, str]] = {
    "second key": ("server: {port: 1}\nauth: {mode: open}\nserver: {port: 2}\n", 3, "first on line 1"),
    "second document": ("server: {port: 1}\n---\nserver: {port: 2}\n", 2, "remove the '---'"),
    "a list at the top": ("- a\n- b\n", 1, "'name: value'"),
    "python tag": ("server:\n  host: !!python/object/apply:os.system [id]\n", 2, "tag"),
    "python name tag": ("server: !!python/name:os.system ''\n", 1, "tag"),
    "unknown anchor": ("models:\n  - match: *all\n", 2, "'*all' refers to no anchor"),
    "anchor in itself": ("models: &a\n  - *a\n", 2, "Fix: write the value out"),
    "merge key": ("server:\n  <<: {port: 1}\n", 2, "merge keys"),
    "variable in braces": ("server: {port: 1}\nupstreams: {main: {api_key: ${KEY}}}\n", 2, '"${NAME}"'),
    "tab": ("server:\n\tport: 1\n", 2, "spaces, not tabs"),
    "open quote": ("server:\n  host: 'a\n  port: 1\n", 2, "Fix: close the quote or bracket that opens here"),
    "open bracket": ("server:\n  port: 1\nmodels: [a,\n", 3, "Fix: close the quote or bracket that opens here"),
    "control character": ("server:\n  host: a\x07\n", 2, "control character"),
    "not UTF-8": (b"server:\n  host: \xff\n", 2, "UTF-8"),
    "a list as a name": ("server:\n  ? [a]\n  : 1\n", 2, "can't be a name"),
    "a truth value as a name": ("upstreams:\n  no: {provider: openai}\n", 2, 'Fix: put it in quotes, as in "no": …'),
    "a number as a name": ("teams:\n  1.10: {}\n", 2, 'Fix: put it in quotes, as in "1.10": …'),
    "nothing as a name": ("teams:\n  ~: {}\n", 2, 'Fix: put it in quotes, as in "~": …'),
}


@pytest.mark.parametrize(("text", "line", "hint"), SYNTAX.values(), ids=SYNTAX)
def test_invalid_yaml_is_an_error_with_its_line(text: str | bytes, line: int, hint: str) -> None:
    (found,) = errors_in(text)
    assert found.line == line
    assert hint in found.message


def test_a_bomb_of_aliases_is_refused() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    ((line, message),) = errors_in("\n".join(levels))
    assert line == 6  # the sum of 10 + 91 + … + 9^5 …: the sixth level goes over 100,000
    assert "expands to over 100,000 values" in message


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused(opening: str) -> None:
    ((line, message),) = errors_in("server: {port: 1}\nmodels:\n  " + opening * 20_000)
    assert line == 3
    assert "nested more than 40 levels deep" in message


def test_a_file_that_is_too_large_is_refused() -> None:
    ((line, message),) = errors_in(b"#" * 1_000_001)
    assert line == 1
    assert "over 1,000,000 bytes" in message


NAMES = [
    "server", "store", "upstreams", "models", "policies", "teams", "default", "trigger", "keep", "tokens",
    "fraction", "extends", "match", "upstream", "headers", "keys", "main", "port", "url", "summary", "prompt",
]  # fmt: skip

SCALARS = [
    "null", "true", "off", "0x_", "0b", "0b_", "1:30", "010", "1_0", ".5", "1.", "-.inf", ".nan", "2024-10-21",
    "=", "<<", "${A}", "${", "$${", "${N:-1}", "~", "0.5", "7", "-1", "1e5", "\\", "é",
]  # fmt: skip

MARKS = [
    ": ", ":", "\n", "\n  ", "\n    ", "- ", "[", "]", "{", "}", ", ", "'", "\"", "&a ", "*a", "!!str ",
    "!x ", "| ", "> ", "? ", "#", "%", "---\n", "\t", "\x00", "\x85", "\u2028", "\ufeff",
]  # fmt: skip


def outcome(content: bytes) -> Settings | list[Issue]:
    try:
        return loads(content, {"A": "x"})
    except Issues as found:
        return found.issues


def judge(content: bytes) -> None:
    found = outcome(content)
    if isinstance(found, Settings):
        assert "default" in found.policies
        return
    breaks = ("\n", "\r", "\x85", "\u2028")
    lines = sum(content.decode("utf-8", "replace").count(character) for character in breaks) + 1
    assert found
    for fault in found:
        assert 1 <= fault.line <= lines + 1
        assert fault.message.isprintable()


@given(st.lists(st.sampled_from(NAMES + SCALARS + MARKS), max_size=25).map("".join))
def test_any_text_is_settings_or_an_error_with_a_line(text: str) -> None:
    judge(text.encode())


@given(st.binary(max_size=60))
def test_any_bytes_are_settings_or_an_error_with_a_line(content: bytes) -> None:
    judge(content)


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, -1, 5000, 0.5, 1.5, "x", "", "*", "default", "keys", "sha256:" + "a" * 64])
    | st.integers()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_any_structure_is_settings_or_an_error_with_a_line(value: object) -> None:
    judge(json.dumps(value).encode())


HASH = "sha256:" + "ab" * 32


TOGETHER = {
    "a route to nowhere": (
        "upstreams:\n  main: {}\nmodels:\n  - match: a\n    upstream: mian\n",
        5,
        "Fix: did you mean 'main'?",
    ),
    "a team with an unknown policy": (
        "policies:\n  careful: {}\nteams:\n  a:\n    policy: carefull\n",
        5,
        "Fix: did you mean 'careful'?",
    ),
    "keys without a key": ("auth:\n  mode: keys\nupstreams:\n  main: {api_key: x}\n", 2, "Fix: add the lines"),
    "keys and an upstream without one": (
        f"auth: {{mode: keys}}\nteams:\n  a: {{keys: ['{HASH}']}}\n"
        "upstreams:\n  main: {api_key: x}\n  two:\n    lane: auto\n",
        6,
        "upstreams.two: api_key is missing",
    ),
    "an unknown parent": (
        "policies:\n  careful:\n    extends: defualt\n",
        3,
        "Fix: did you mean 'default'?",
    ),
    "its own parent": ("policies:\n  a:\n    keep: {messages: 5}\n    extends: a\n", 4, "in a circle (a → a)"),
    "prepare above a trigger in tokens": (
        "policies:\n  a:\n    prepare: {tokens: 5000}\n    trigger: [{tokens: 4000}, {fraction: 0.8}]\n",
        3,
        "5000 (tokens) must be below the trigger's 4000",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "line", "hint"), TOGETHER.values(), ids=TOGETHER)
def test_settings_that_conflict_are_an_error_with_its_line(text: str | bytes, line: int, hint: str) -> None:
    (found,) = errors_in(text)
    assert found.line == line
    assert hint in found.message


PROVIDERS = {
    "openai": None,
    "anthropic": None,
    "bedrock": None,
    "anthropc": "did you mean 'anthropic'?",
    "opena": "did you mean 'openai'?",
    "zzzzzz": "lane: relay",
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_provider_that_nobody_knows(provider: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"upstreams:\n  main:\n    provider: {provider}\n")
    hint = PROVIDERS[provider]
    if hint is None:
        assert check(file, {}) == []
        return
    (said,) = check(file, {})
    assert said.startswith(f"{file}:3: upstreams.main.provider: LiteLLM has no provider '{provider}'. Fix: ")
    assert hint in said
    file.write_text(f"upstreams: {{main: {{provider: {provider}, lane: relay, base_url: 'http://127.0.0.1:1'}}}}\n")
    assert check(file, {}) == []


def test_a_provider_without_an_address_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("server: {}\nupstreams:\n  main: {provider: hosted_vllm}\n")
    assert check(file, {}) == [
        f"{file}:3: upstreams.main: provider hosted_vllm has no default address. Fix: add base_url: https://HOST/v1"
    ]


UP = "upstreams:\n  main: {base_url: 'http://127.0.0.1:9/v1'}\n"


POLICY = "policies:\n  default:\n    %s\n"


SPENDING = f"teams:\n  t:\n    keys: ['sha256:{'1' * 64}']\n    limits: {{spend: {{usd: 5, per: day}}}}\n"


UNLIMITED = f"teams:\n  t:\n    keys: ['sha256:{'1' * 64}']\n"


FORM = re.compile(r".+?:\d+: warning: (?:[\w.\[\]-]+: )?.+?\. Fix: .+", re.DOTALL)

WARNINGS = {
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
    "a trigger above a step in the price": (
        UP + "models:\n  - {match: gpt-6-astra, upstream: main}\n" + POLICY % "trigger: {fraction: 0.8}",
        7,
        "'gpt-6-astra' costs more over 272,000 tokens, but 'default' compacts at ",
    ),
    "the default trigger above a step in the operator's own price": (
        UP + "models:\n  - {match: m, upstream: main, profile: {context_window: 200000}}\n"
        "prices: {m: {input_cost_per_token: 0.000001, input_cost_per_token_above_100k_tokens: 0.000002}}\n",
        4,
        "Fix: add a condition, as in trigger: [{price_step: true}, {fraction: 0.85}]",
    ),
    "recall without the archive that a parent turns off": (
        "policies:\n  default: {archive: null}\n  p:\n    extends: default\n    recall:\n      tool: auto\n",
        6,
        "policies.p.recall.tool: has no effect without an archive",
    ),
    "recall of a few tokens": (
        POLICY % "recall: {tool: auto, max_tokens: 1}",
        3,
        "policies.default.recall.max_tokens: has no room for a passage of a message, which takes about 200 tokens "
        "(got 1). Fix: max_tokens: 4000",
    ),
    "metrics on the server's own port": (
        "server: {port: 9090}\nmetrics: {listen: '127.0.0.1:9090'}\n",
        2,
        "metrics.listen: is the server's own address, port 9090, so the proxy can't start",
    ),
    "a heartbeat after the deadline": (
        "server:\n  deadline: 30\n  keepalive: 40\n",
        3,
        "server.keepalive: isn't below server.deadline (30), so no heartbeat is sent (got 40). Fix: keepalive: 10",
    ),
    "a budget without prices": (
        UP + "models:\n  - {match: mine, upstream: main, profile: {context_window: 9000}}\n" + SPENDING,
        8,
        "teams.t.limits.spend.usd: refuses 'mine', because no price of these models is known. "
        "Fix: prices: {mine: {input_cost_per_token: 0.000001, output_cost_per_token: 0.000004}}, or a budget in tokens",
    ),
    "prices of a team whose streams have none": (
        UP + POLICY % "mode: 'off'" + "prices:\n  m: {input_cost_per_token: 0.000001}\n" + UNLIMITED,
        9,
        "teams.t: the prices of this team's streams of chat completions are estimates, because with mode: off the "
        "proxy doesn't ask for their usage. Fix: give the team a policy with mode: shadow, or a budget",
    ),
    "a budget for models that the provider doesn't list": (
        UP + "models:\n  - {match: 'qwen-of-ours*', upstream: main}\n" + SPENDING,
        8,
        "teams.t.limits.spend.usd: refuses 'qwen-of-ours*'",
    ),
    "a budget at a provider without prices": (
        UP.replace("{", "{provider: vllm, ") + SPENDING,
        6,
        "teams.t.limits.spend.usd: refuses '*'",
    ),
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


NOTHING = {
    "a listed price": "upstreams: {o: {provider: openai}}\nmodels: [{match: gpt-5, upstream: o}]\n" + SPENDING,
    "listed prices": "upstreams: {o: {provider: openai}}\nmodels: [{match: '*', upstream: o}]\n" + SPENDING,
    "an own price": UP.replace("{", "{provider: vllm, ")
    + SPENDING
    + "prices: {'my-*': {input_cost_per_token: 0.000001}}\n",
    "other models": UP + "models:\n  - {match: mine, upstream: main, profile: {context_window: 9000}}\n"
    "  - {match: gpt-5, upstream: main}\n" + SPENDING.replace("keys", "models: ['gpt-*']\n    keys"),
    "metrics at another address": "server: {host: 10.0.0.1, port: 9090}\nmetrics: {listen: '127.0.0.1:9090'}\n",
    "limits on Redis": "store: {url: 'redis://h'}\nlimits: {on_store_failure: refuse}\n",
    "recall": POLICY % "recall: {tool: auto, max_tokens: 200}",
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_meant_is_no_warning(name: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(NOTHING[name])
    assert not read(tmp_path / "c.yaml", {}).warnings


def test_what_is_hardly_meant_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        dedent(
            """
        upstreams: {openai: {}}
        models:
          - {match: "gpt-5*", upstream: openai}
        policies:
          default:
            summary: {model: gpt-5-mini, fallback_model: gpt-4o}
            models:
              - match: "gpt-5.2*"
                summary:
                  model: o9
        teams:
          one: {models: ["gpt-*", "*mini", "claude-*"], keys: ["KEY1"]}
          none: {models: [], keys: ["KEY2"]}
        """
        ).replace("KEY", "sha256:" + "1" * 63)
    )
    assert [line.removeprefix(f"{file}:").partition(", so")[0] for line in read(file, {}).warnings] == [
        "7: warning: policies.default.summary.fallback_model: no route of 'models' matches 'gpt-4o'",
        "11: warning: policies.default.models[0].summary.model: no route of 'models' matches 'o9'",
    ]
    file.write_text("policies: {default: {summary: {model: anything}}}\n")
    assert read(file, {}).warnings == (), "without routes every model has one"


@pytest.mark.parametrize(
    ("section", "kind"),
    [*((stage.SECTION, stage) for stage in STAGES), ("index", IndexRules), ("user_messages", UserMessageRules)],
)
def test_the_engine_has_the_defaults_of_its_section(section: str, kind: Any) -> None:
    assert dict(getattr(Policy.build("p", {}), section)) == {name: getattr(kind(), name) for name in asdict(kind())}


def test_no_section_is_lost_when_settings_are_dumped() -> None:
    dumped = Settings().model_dump()["policies"]["default"]
    assert dumped["summary"]["max_tokens"] == Policy().summary.max_tokens
    assert dumped["duplicates"]["min_length"] == 200


def test_the_setting_that_a_plain_value_means_exists() -> None:
    sections = [one.default for one in Policy.model_fields.values() if isinstance(one.default, Section)]
    assert [one for one in sections if one.main is not None and one.main not in type(one).model_fields] == []
    assert len(sections) > 10


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
