"""Test the warnings about settings that are valid but probably not intended."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

from proxy.config import read

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
