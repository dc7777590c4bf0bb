"""Test the settings of valid files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import ValidationError

from proxy.compaction.conditions import Clause
from proxy.config import Route, Settings, load
from proxy.config.loading import loads

# The names that are settled, as users have them in their files.
SETTLED = """
    server: {host: 127.0.0.1, port: 8787}
    store: {url: "sqlite:///state/compaction.db"}
    auth: {mode: open}
    upstreams:
      main:
        provider: openai
        base_url: https://api.openai.com/v1
        api_key: ${OPENAI_API_KEY}
        lane: auto
    models:
      - match: "gpt-5*"
        upstream: main
      - match: support-bot
        upstream: main
        model: gpt-4o-mini
        profile: {context_window: 128000, max_input_tokens: 128000, max_output_tokens: 16384, tokenizer: o200k_base}
    policies:
      default:
        mode: enforce
        trigger: {fraction: 0.85}
        keep: {fraction: 0.10}
        prepare: {fraction: 0.75}
        summary: {model: gpt-4o-mini, fallback_model: null, prompt: null, trim_tokens_to_summarize: null,
                  max_tokens: 4000, timeout: 45}
        truncate_args: {trigger: {fraction: 0.85}, keep: {fraction: 0.10}, max_length: 2000,
                        truncation_text: "...(argument truncated)", tools: [write_file, edit_file]}
        evict_results: {trigger: {fraction: 0.85}, keep: {fraction: 0.10}, max_tokens: 2000,
                        exclude: [ls, glob, grep, write_todos]}
      careful:
        extends: default
        keep: {messages: 40}
    teams:
      search:
        keys: ["sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"]
        policy: careful
        models: ["gpt-5*", support-bot]
"""


def settings(text: str, **environ: str) -> Settings:
    return loads(dedent(text).encode(), environ)


def trigger(text: str) -> tuple[Clause, ...]:
    return settings(f"policies:\n  default:\n    trigger: {text}\n").policies["default"].trigger


def test_the_settled_names_mean_what_they_say() -> None:
    found = settings(SETTLED, OPENAI_API_KEY="sk-mine")
    assert (found.server.host, found.server.port) == ("127.0.0.1", 8787)
    assert found.store.path == Path("state/compaction.db")
    assert found.auth.mode == "open"
    main = found.upstreams["main"]
    assert (main.provider, main.base_url, main.lane) == ("openai", "https://api.openai.com/v1", "auto")
    assert main.api_key is not None
    assert main.api_key.get_secret_value() == "sk-mine"
    assert found.route("gpt-5-mini") == Route("main", "gpt-5-mini", None)
    bot = found.route("support-bot")
    assert bot is not None
    assert (bot.upstream, bot.model) == ("main", "gpt-4o-mini")
    assert bot.profile is not None
    assert (bot.profile.context_window, bot.profile.max_output_tokens) == (128000, 16384)
    assert found.route("claude") is None
    careful = found.policies["careful"]
    assert careful.name == "careful"
    assert careful.keep == Clause(messages=40)
    assert careful.trigger == (Clause(fraction=0.85),)
    assert careful.summary.model == "gpt-4o-mini"
    assert careful.truncate_args is not None
    assert careful.truncate_args.tools == ("write_file", "edit_file")
    assert found.teams["search"].policy == "careful"


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


def test_the_default_policy() -> None:
    policy = load(None, {}).policies["default"]
    assert policy.name == "default"
    assert (policy.mode, policy.allow_header, policy.reserve_output) == ("enforce", True, None)
    assert policy.trigger == (Clause(fraction=0.85),)
    assert policy.keep == Clause(fraction=0.10)
    assert policy.prepare == (Clause(fraction=0.75),)
    assert (policy.summary.max_tokens, policy.summary.timeout) == (4000, 45)
    assert policy.summary.trim_tokens_to_summarize is None
    assert policy.truncate_args is not None
    assert policy.truncate_args.max_length == 2000
    assert {"write_file", "edit_file"} <= set(policy.truncate_args.tools)
    assert policy.evict_results is not None
    assert policy.evict_results.max_tokens == 2000
    assert policy.evict_results.exclude == ("ls", "glob", "grep", "write_todos")
    assert (policy.user_messages.max_tokens, policy.index.max_tokens) == (20_000, 2000)
    assert policy.unknown_model.trigger == (Clause(tokens=170_000),)
    assert policy.unknown_model.keep == Clause(messages=6)


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
    ("text", "meaning"),
    [
        ("{tokens: 4000}", (Clause(tokens=4000),)),
        ("{tokens: 4_000}", (Clause(tokens=4000),)),
        ("{fraction: 1}", (Clause(fraction=1.0),)),
        ("{tokens: 4000, messages: 10}", (Clause(tokens=4000, messages=10),)),
        ("[{tokens: 4000}, {messages: 10}]", (Clause(tokens=4000), Clause(messages=10))),
        ("[{tokens: 4000, fraction: 0.5}, {messages: 10}]", (Clause(tokens=4000, fraction=0.5), Clause(messages=10))),
        ('["fraction", 0.8]', (Clause(fraction=0.8),)),
        ('[["tokens", 4000], ["messages", 10]]', (Clause(tokens=4000), Clause(messages=10))),
        ('[["tokens", 4000], {messages: 10}]', (Clause(tokens=4000), Clause(messages=10))),
        ("[]", ()),
        ("null", ()),
    ],
)
def test_conditions(text: str, meaning: tuple[Clause, ...]) -> None:
    assert trigger(text) == meaning


@pytest.mark.parametrize("text", ["{messages: 20}", '["messages", 20]'])
def test_keep(text: str) -> None:
    policy = settings(f"policies: {{default: {{keep: {text}}}}}").policies["default"]
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


INHERITED = """
    policies:
      grandchild:
        extends: child
        trigger: {tokens: 5000}
        truncate_args: {max_length: 50}
        evict_results: {max_tokens: 9}
        prepare: null
      child:
        extends: base
        keep: {messages: 7}
        summary: {timeout: 5}
        truncate_args: null
        unknown_model: {keep: {messages: 2}}
      base:
        mode: shadow
        trigger: [{tokens: 9000}, {messages: 90}]
        prepare: {tokens: 8000}
        summary: {model: small, timeout: 90}
        truncate_args: {max_length: 7, tools: ["*"]}
        evict_results: {exclude: [cat], max_tokens: 8}
        unknown_model: {trigger: {tokens: 1000}}
      apart: {}
"""


def test_a_policy_takes_what_it_does_not_state_from_the_one_it_extends() -> None:
    policies = settings(INHERITED).policies
    child, grandchild = policies["child"], policies["grandchild"]
    assert child.mode == "shadow"
    assert child.trigger == (Clause(tokens=9000), Clause(messages=90))
    assert (child.summary.model, child.summary.timeout) == ("small", 5)
    assert child.truncate_args is None
    assert child.unknown_model.trigger == (Clause(tokens=1000),)
    assert child.unknown_model.keep == Clause(messages=2)
    assert grandchild.trigger == (Clause(tokens=5000),)
    assert grandchild.prepare == ()
    assert grandchild.keep == Clause(messages=7)
    assert grandchild.truncate_args is not None
    assert grandchild.truncate_args.max_length == 50
    assert "write_file" in grandchild.truncate_args.tools
    assert grandchild.evict_results is not None
    assert (grandchild.evict_results.exclude, grandchild.evict_results.max_tokens) == (("cat",), 9)


def test_a_policy_without_a_parent_starts_from_the_built_in_defaults() -> None:
    policies = settings("policies: {default: {trigger: {tokens: 5}}, apart: {}, child: {extends: default}}").policies
    assert policies["apart"].trigger == (Clause(fraction=0.85),)
    assert policies["child"].trigger == (Clause(tokens=5),)


def test_default_is_always_there_and_first() -> None:
    assert list(settings("policies: {a: {}, b: {extends: default}}").policies) == ["default", "a", "b"]


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


@pytest.mark.parametrize(("written", "mode"), [("off", "off"), ('"off"', "off"), ("shadow", "shadow")])
def test_mode_off_needs_no_quotes(written: str, mode: str) -> None:
    assert settings(f"policies: {{default: {{mode: {written}}}}}").policies["default"].mode == mode


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


def test_without_routes_every_model_goes_to_the_first_upstream() -> None:
    assert settings("upstreams: {second: {}, first: {}}").route("m") == Route("second", "m", None)


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


def test_aliases_may_be_used() -> None:
    found = settings("""
        policies:
          a: {summary: &small {model: small}}
          b: {summary: *small}
    """)
    assert found.policies["b"].summary.model == "small"


def test_secrets_are_not_in_any_representation() -> None:
    text = "upstreams: {main: {api_key: sk-canary, headers: {x-key: sk-canary}}}"
    found = settings(text)
    assert found.upstreams["main"].headers["x-key"].get_secret_value() == "sk-canary"
    assert "sk-canary" not in f"{found} {found!r} {found.model_dump()} {found.model_dump_json()}"
