"""Test the line and the advice of each invalid value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.config import load
from proxy.errors import ConfigurationError
from tests.kit.configuration import errors_in

CANARY = "sk-canary-8c1f"


FORM = re.compile(r"(?:[\w.\[\]-]+: )?.+?\. Fix: .+", re.DOTALL)

POLICY = "policies:\n  default:\n    %s\n"


VALUES = {
    # Unknown names
    "unknown section": ("sevrer: {port: 1}\n", 1, "sevrer: unknown setting. Fix: did you mean 'server'?"),
    "unknown key": ("server:\n  host: a\n  prot: 1\n", 3, "server.prot: unknown setting. Fix: did you mean 'port'?"),
    "unknown key, other case": ("server:\n  Port: 1\n", 2, "did you mean 'port'?"),
    "unknown key, nothing near": ("auth:\n  zzz: 1\n", 2, 'Fix: use one of: keyless, mode'),
    "unknown key in an upstream": ("upstreams:\n  main:\n    base_ulr: x\n", 3, "did you mean 'base_url'?"),
    "unknown key in an upstream called headers": ("upstreams:\n  headers:\n    lan: x\n", 3, "did you mean 'lane'?"),
    "unknown key in a profile": (
        "models:\n  - match: a\n    upstream: openai\n    profile: {context_widow: 1}\n",
        4,
        "models[0].profile.context_widow: unknown setting. Fix: did you mean 'context_window'?",
    ),
    "unknown key in a policy": ("policies:\n  default:\n    triger: null\n", 3, "did you mean 'trigger'?"),
    "unknown key in a stage": (
        "policies:\n  default:\n    truncate_args:\n      max_lenght: 1\n",
        4,
        "policies.default.truncate_args.max_lenght: unknown setting. Fix: did you mean 'max_length'?",
    ),
    # YAML 1.1 scalars instead of text
    "no as text": ("server:\n  host: no\n", 2, 'Fix: host: "no"'),
    "12:30:45 as text": ("server:\n  host: 12:30:45\n", 2, 'Fix: host: "12:30:45"'),
    "a date as text": (
        "upstreams:\n  main:\n    provider: azure\n    api_version: 2024-10-21\n",
        4,
        'Fix: api_version: "2024-10-21"',
    ),
    "010 as text": ("server:\n  host: 010\n", 2, "base 8"),
    "nothing as text": ("server:\n  host:\n", 2, 'Fix: give a text, in quotes if it is null or ~, or remove th'),
    "on in a list of tools": (
        "policies:\n  default:\n    evict_results:\n      exclude:\n        - ls\n        - on\n",
        6,
        "policies.default.evict_results.exclude[1]: must be text (got 'on', which YAML reads as the",
    ),
    # Other scalars
    "no digits": ("server:\n  port: 0x_\n", 2, "a number without digits"),
    "base 60 as a number": ("server:\n  deadline: 1:30\n", 2, 'Fix: write digits only, as in deadline: 45'),
    "base 8 as a number": ("server:\n  port: 010\n", 2, 'Fix: write digits only, as in port: 45'),
    "a very long number": ("server:\n  port: " + "9" * 5000 + "\n", 2, "a number of too many digits"),
    "text as a number": ("server:\n  port: http\n", 2, "server.port: must be a whole number"),
    "a truth value as a number": ("server:\n  port: true\n", 2, 'Fix: write digits only, as in port: 45'),
    "a port out of range": ("server:\n  port: 70000\n", 2, 'Fix: port: 65535'),
    "a key without its hash": ("teams:\n  t:\n    keys:\n      - {name: x}\n", 4, "'hash' is missing"),
    "no such day": (
        f"teams: {{t: {{keys: [{{hash: 'sha256:{'0' * 64}', expires: 2027-02-30}}]}}}}\n",
        1,
        'Fix: expires: 2027-01-31',
    ),
    "no date": (f"teams: {{t: {{keys: [{{hash: 'sha256:{'0' * 64}', expires: soon}}]}}}}\n", 1, "must be a date"),
    "a time": (
        f"teams: {{t: {{keys: [{{hash: 'sha256:{'0' * 64}', expires: 2027-01-31 10:00:00}}]}}}}\n",
        1,
        'Fix: expires: 2027-01-31',
    ),
    "no limit": ("teams: {t: {limits: {requests_minute: 3}}}\n", 1, "did you mean 'requests_per_minute'?"),
    "a limit of nothing": ("teams: {t: {limits: {concurrent: 0}}}\n", 1, "must be over 0"),
    "no memory for bodies": ("server:\n  body_limit: 2GB\n  max_body_memory: 3GB\n", 3, "4,000,000,000 bytes"),
    "no memory for caches": ("server:\n  cache_memory: 1MB\n", 2, "at least 16,000,000 bytes"),
    "a negative time": ("server:\n  drain: -1\n", 2, 'Fix: drain: 0'),
    "not a number": ("server:\n  deadline: .nan\n", 2, "must be a number"),
    "text as a truth value": ("policies:\n  default:\n    allow_header: maybe\n", 3, "must be true or false"),
    "a size": ("server:\n  body_limit: 64XB\n", 2, "must be a size"),
    "empty text": ('server:\n  host: ""\n', 2, "is empty"),
    "a list as text": ("server:\n  host: [a]\n", 2, "must be text"),
    "text as a list": ("teams:\n  a:\n    keys: abc\n", 3, "must be a list"),
    "text as a section": ("server: 8787\n", 1, 'Fix: write server: {port: 8787}'),
    "an empty section": ("auth: {mode: open}\nserver:\n", 2, 'Fix: give its settings, or remove the line'),
    "a mode": ("policies:\n  default:\n    mode: enforced\n", 3, 'Fix: mode: enforce'),
    "a lane": ("upstreams:\n  main:\n    lane: zzz\n", 3, 'Fix: lane: auto'),
    "a missing match": ("models:\n  - upstream: openai\n", 2, 'models[0]: \'match\' is missing. Fix: add match: "*"'),
    "a missing upstream": ("server: {port: 1}\nmodels:\n\n  - match: a\n", 4, "models[0]: 'upstream' is missing"),
    "an unknown API": ("upstreams:\n  main:\n    speaks: [chats]\n", 3, "speaks[0]: must be one of chat"),
    "no API": ("upstreams:\n  main:\n    speaks: []\n", 3, "Fix: speaks: [chat], or remove the line"),
    "an API twice": ("upstreams:\n  main:\n    speaks: [chat, chat]\n", 3, "Fix: speaks: [chat]"),
    "APIs of a translated upstream": ("upstreams:\n  main: {lane: translate, speaks: [chat]}\n", 2, "has no effect"),
    "no upstreams": ("upstreams: {}\n", 1, 'Fix: add an upstream, as in main: {base_url: https://api.ope'),
    "a name of another alphabet": ("teams:\n  größe: {}\n", 2, "Fix: use 1 to 64 letters"),
    "a tokenizer to download": (
        "models:\n  - match: a\n    upstream: openai\n    profile: {tokenizer: gpt2}\n",
        4,
        "must be one of o200k_base",
    ),
    "unknown rule for images": (
        "models:\n  - match: a\n    upstream: openai\n    profile: {images: gpt-9}\n",
        4,
        "models[0].profile.images: isn't a rule for images (got gpt-9). Fix: did you mean 'gpt-5'?",
    ),
    "an input over the window": (
        "models:\n  - match: a\n    upstream: openai\n"
        "    profile:\n      context_window: 10\n      max_input_tokens: 11\n",
        6,
        'Fix: max_input_tokens: 10',
    ),
    "unknown responses.state": (
        "policies:\n  default:\n    responses:\n      state: compat\n",
        4,
        "policies.default.responses.state: must be",
    ),
    "a prompt without its place": ("policies:\n  default:\n    summary: {prompt: Sum up}\n", 3, "{messages}"),
    # The store
    "a server without a host": ("store:\n  url: redis://:pw@\n", 2, "Fix: url: rediss://:${REDIS_PASSWORD}@redis.example.com:6379/0"),
    "Sentinels without a service": ("store:\n  url: redis+sentinel://one:1,two:2\n", 2, "Fix: url: redis+sentinel://"),
    "a server with a bad port": ("store:\n  url: redis://host:port/0\n", 2, "at most a port"),
    "a server with a bad database": ("store:\n  url: redis://host/main\n", 2, "the number of a database"),
    "a scheme of Valkey": ("store:\n  url: valkey://host\n", 2, "redis:// or rediss://"),
    "an unknown parameter of a server": ("store:\n  url: redis://h?nonsense=1\n", 2, "an unknown parameter, nonsense"),
    "a parameter that the proxy sets": ("store:\n  url: redis://h?decode_responses=true\n", 2, "decode_responses"),
    "a wrong timeout of a server": ("store:\n  url: redis://h?socket_timeout=abc\n", 2, "socket_timeout"),
    "a wrong timeout of Sentinels": ("store:\n  url: redis+sentinel://h/s?socket_timeout=abc\n", 2, "socket_timeout"),
    "a wrong parameter of TLS": ("store:\n  url: rediss://h?ssl_cert_reqs=maybe\n", 2, "parameter ssl_cert_reqs"),
    "a wrong version of TLS": ("store:\n  url: rediss://h?ssl_min_version=9\n", 2, "parameter ssl_min_version"),
    "a parameter of TLS without it": ("store:\n  url: redis://h?ssl_ca_certs=/ca.pem\n", 2, "needs rediss://"),
    "a parameter that clusters lack": ("store:\n  url: rediss+cluster://h?ssl_ca_path=/ca\n", 2, "clusters"),
    "an archive for longer than a century": ("policies:\n  default:\n    archive: {days: 1000000000000}\n", 3, "36500"),
    "records for longer than a century": ("records:\n  days: 36501\n", 2, "36500"),
    "a size of a server": ("store:\n  url: redis://host\n  max_bytes: 1GB\n", 3, "the server's own maxmemory"),
    "sqlite with two slashes": ("store:\n  url: sqlite://state.db\n", 2, 'Fix: url: sqlite:///path/to/compaction.db'),
    "sqlite with a parameter": ("store:\n  url: sqlite:///a.db?mode=ro\n", 2, "characters"),
    # The archive
    "another scheme for the archive": ("archive:\n  url: redis://host\n", 2, "Fix: url: s3://bucket/prefix"),
    "an archive without a bucket": ("archive:\n  url: s3://\n", 2, "must name a bucket"),
    "an archive with credentials": ("archive:\n  url: s3://me:pw@bucket\n", 2, "credentials in the environment"),
    "an archive above its bucket": ("archive:\n  url: s3://bucket/../other\n", 2, "must name a bucket"),
    "an archive in a relative folder": ("archive:\n  url: file://here\n", 2, "Fix: url: file:///srv/archive"),
    "an unknown setting of the archive": ("archive:\n  url: s3://bucket\n  regoin: eu\n", 3, "region"),
    "a region of a folder": ("archive:\n  url: file:///a\n  region: eu\n", 3, "needs a url that starts with s3://"),
    "an endpoint without a bucket": ("archive:\n  endpoint: https://a\n", 2, "needs a url that starts with s3://"),
    "an endpoint with a password": ("archive:\n  url: s3://bb\n  endpoint: https://a:b@c\n", 3, "without credential"),
    # Upstreams
    "an address without a scheme": ("upstreams:\n  main:\n    base_url: api.openai.com/v1\n", 3, 'Fix: base_url: https://api.openai.com/v1'),
    "an address with a bad port": ("upstreams:\n  main:\n    base_url: http://a:x/v1\n", 3, 'Fix: base_url: https://api.openai.com/v1'),
    "an address with a key": ("upstreams:\n  main:\n    base_url: https://me:pw@a/v1\n", 3, "Fix: api_key: "),
    "an address with a query": ("upstreams:\n  main:\n    base_url: https://a/v1?api-version=1\n", 3, "api_version"),
    "an empty key": ('upstreams:\n  main:\n    api_key: ""\n', 3, "is empty"),
    "a key with a line break": ('upstreams:\n  main:\n    api_key: "a\\n"\n', 3, "line breaks"),
    "a number as a key": ("upstreams:\n  main:\n    api_key: 12345678\n", 3, 'Fix: put it in quotes'),
    "a header's name": ("upstreams:\n  main:\n    headers:\n      a: b\n      'a b': c\n", 5, "isn't a header name"),
    "a header's value": ('upstreams:\n  main:\n    headers:\n      a: "b\\r\\nc: d"\n', 4, "line breaks"),
    "authorization as a header": ("upstreams:\n  main:\n    headers: {Authorization: x}\n", 3, "Fix: api_key: "),
    "the same header twice": ("upstreams:\n  main:\n    headers:\n      X-A: b\n      x-a: c\n", 5, "is a duplicate"),
    # Teams
    "a key itself": ("teams:\n  a:\n    keys:\n      - sk-abc\n", 4, "must be the hash of a key"),
}  # fmt: skip

MISTAKES = {
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
        "Fix: use one of: concurrent, requests_per_minute, spend, summary_tokens_per_day",
    ),
    "workers": ("server: {workers: 4}\n", 1, "set the number of workers with serve --workers N"),
    "LiteLLM": ("model_list: []\n", 1, "this looks like a LiteLLM configuration; docs/migrating.md lists"),
    "logging": ("logging: {level: debug}\n", 1, "log: {level: info, format: json, requests: all}"),
    "log_level": ("log_level: debug\n", 1, "log: {level: info}. log.format and log.requests"),
    "a condition": (POLICY % "keep: {mesages: 10}", 3, "unknown key 'mesages'. Fix: did you mean 'messages'?"),
    "look-ahead": (
        POLICY % 'pinned: ["(?=a)b"]',
        3,
        "look-ahead and look-behind aren't supported (got (?=a)b). Fix: match the surrounding text instead",
    ),
}


CONDITIONS = {
    "trigger: {fraction: 0}": "over 0 and at most 1",
    "trigger: {fraction: 1.5}": "Fix: for 1.5% write fraction: 0.015",
    "trigger: {fraction: 85}": "Fix: for 85% write fraction: 0.85",
    "trigger: {fraction: true}": "over 0 and at most 1",
    "trigger: {fraction: .nan}": "over 0 and at most 1",
    "trigger: {fraction: much}": "over 0 and at most 1",
    "trigger: {tokens: 0}": "Fix: tokens: 4000",
    "trigger: {tokens: -5}": "Fix: tokens: 4000",
    "trigger: {tokens: true}": "Fix: tokens: 4000",
    "trigger: {tokens: 4000.5}": "Fix: tokens: 4000",
    "trigger: {messages: many}": "Fix: messages: 10",
    "trigger: {token: 5}": "Fix: did you mean 'tokens'?",
    "trigger: {}": "Fix: trigger: {fraction: 0.85}",
    "trigger: 5": "Fix: trigger: {fraction: 0.05}",
    "trigger: soon": "Fix: trigger: {fraction: 0.85}",
    "trigger: true": "Fix: trigger: {fraction: 0.85}",
    "trigger: [5]": "Fix: {fraction: 0.05}",
    "trigger: [[tokens, 5, 6]]": "Fix: {fraction: 0.85}",
    "trigger: [fractions, 0.5]": "did you mean 'fraction'?",
    "trigger: [fraction, 2]": "at most 1",
    "keep: null": "Fix: keep: {fraction: 0.1}",
    "keep: []": "Fix: keep: {fraction: 0.1}",
    "keep: {tokens: 5, messages: 5}": "Fix: keep: {fraction: 0.1}",
    "keep: [{tokens: 5}, {messages: 5}]": "Fix: keep: {fraction: 0.1}",
    "keep: {fraction: 1.1}": "at most 1",
    "reserve_output: 0": "Fix: reserve_output: 4000",
    "reserve_output: {messages: 5}": "Fix: reserve_output: 4000",
    "reserve_output: true": "Fix: reserve_output: 4000",
    "unknown_model: {trigger: {fraction: 0.5}}": "Fix: trigger: {tokens: 170000}",
    "unknown_model: {keep: {fraction: 0.5}}": "Fix: keep: {messages: 6}",
    "truncate_args: {keep: {tokens: 0}}": "positive whole number",
    "evict_results: {trigger: {tokens: 0}}": "positive whole number",
}


CASES = {
    **VALUES,
    **MISTAKES,
    **{setting: (f"policies:\n  careful:\n    {setting}\n", 3, hint) for setting, hint in CONDITIONS.items()},
}


@pytest.mark.parametrize(("text", "line", "hint"), CASES.values(), ids=CASES)
def test_an_invalid_value_is_an_error_with_its_line_and_fix(text: str, line: int, hint: str) -> None:
    (found,) = errors_in(text)
    assert found.line == line
    assert hint in found.message
    assert FORM.fullmatch(found.message)


def test_a_wrong_part_of_a_long_condition_is_named_with_its_own_line() -> None:
    text = """
        policies:
          default:
            trigger:
              - {tokens: 4000}
              - messages: 10
                fraction: 7
        """
    (found,) = errors_in(text)
    assert found.line == 6
    assert found.message.startswith("policies.default.trigger[1].fraction: ")


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file() -> None:
    text = """
        server:
          prot: 1
          host: no
        auth: {mode: closed}
        teams:
          a: {keys: [sk-1, sk-2]}
        """
    assert [found.line for found in errors_in(text)] == [2, 3, 4, 6, 6]


@pytest.mark.parametrize(
    ("text", "value", "hint"),
    [
        ("server: \n  port: ${V}\n", CANARY, "must be a whole number"),
        ("server: \n  trigger: ${V}\n", "{fraction: 0.5}", "unknown setting"),
        (
            "policies:\n  default: {trigger: '${V}'}\n",
            "{tokens: 5}",
            "must be a mapping. Fix: trigger: {fraction: 0.85}",
        ),
        ("upstreams:\n  main: {lane: '${V}'}\n", CANARY, "must be one of auto"),
        ("upstreams:\n  main: {api_key: '${V}'}\n", CANARY + "\n", "line breaks"),
        ("upstreams:\n  main: {base_url: '${V}'}\n", f"http://{CANARY}@host/v1", "must not hold"),
        ("upstreams:\n  main: {headers: {x-key: '${V}'}}\n", CANARY + "\n", "line breaks"),
        ("teams:\n  main: {keys: ['${V}']}\n", CANARY, "must be the hash"),
        ("store:\n  url: ${V}\n", f"redis://:{CANARY} @host", "no spaces"),
        ("store:\n  url: ${V}\n", f"redis://:a?{CANARY}=1@host", "%3F in place of ?"),
        ("store:\n  url: ${V}\n", f"rediss://host?ssl_cert_reqs={CANARY}", "parameter ssl_cert_reqs"),
    ],
)
def test_what_a_variable_holds_is_never_shown(text: str, value: str, hint: str) -> None:
    (found,) = errors_in(text, {"V": value})
    assert found.line == 2
    assert hint in found.message
    assert CANARY not in found.message


@pytest.mark.parametrize(
    "text",
    [
        f"teams:\n  a: {{keys: ['{CANARY}']}}\n",
        f'upstreams:\n  a: {{api_key: "{CANARY}\\n"}}\n',
        f'upstreams:\n  a: {{headers: {{x: "{CANARY}\\n"}}}}\n',
        f"upstreams:\n  a: {{base_url: 'https://{CANARY}@host/v1'}}\n",
        f"upstreams:\n  a: {{api_key: [{CANARY}]}}\n",
    ],
)
def test_no_key_in_the_file_is_shown_not_even_by_the_error_behind_the_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(file, {})
    error: BaseException | None = caught.value
    while error is not None:
        assert CANARY not in f"{error} {error!r} {getattr(error, 'issues', '')}"
        error = error.__cause__ or error.__context__


def test_a_file_of_something_else_is_not_answered_with_thousands_of_lines() -> None:
    found = errors_in("\n".join(f"name{n}: 1" for n in range(3000)))
    assert len(found) == 101
    assert found[-1].message == "2,900 more errors. Fix: check that this is the right file"


def test_object_storage_without_its_package_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (error,) = errors_in("archive:\n  url: s3://bucket\n")
    assert error == (2, "archive.url: needs the package obstore. Fix: run pip install 'obstore>=0.12'")
