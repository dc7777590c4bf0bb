"""Test the line and the advice of each invalid value."""

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
    "12:30:45 as text": ("server:\n  host: 12:30:45\n", 2, 'Fix: host: "12:30:45"'),
    "nothing as text": ("server:\n  host:\n", 2, 'Fix: give a text, in quotes if it is null or ~, or remove th'),
    # Other scalars
    "no digits": ("server:\n  port: 0x_\n", 2, "a number without digits"),
    "a very long number": ("server:\n  port: " + "9" * 5000 + "\n", 2, "a number of too many digits"),
    "a port out of range": ("server:\n  port: 70000\n", 2, 'Fix: port: 65535'),
    "a key without its hash": ("teams:\n  t:\n    keys:\n      - {name: x}\n", 4, "'hash' is missing"),
    "no date": (f"teams: {{t: {{keys: [{{hash: 'sha256:{'0' * 64}', expires: soon}}]}}}}\n", 1, "must be a date"),
    "no memory for bodies": ("server:\n  body_limit: 2GB\n  max_body_memory: 3GB\n", 3, "4,000,000,000 bytes"),
    "no memory for caches": ("server:\n  cache_memory: 1MB\n", 2, "at least 16,000,000 bytes"),
    "text as a truth value": ("policies:\n  default:\n    allow_header: maybe\n", 3, "must be true or false"),
    "empty text": ('server:\n  host: ""\n', 2, "is empty"),
    "a list as text": ("server:\n  host: [a]\n", 2, "must be text"),
    "text as a section": ("server: 8787\n", 1, 'Fix: write server: {port: 8787}'),
    "a lane": ("upstreams:\n  main:\n    lane: zzz\n", 3, 'Fix: lane: auto'),
    "no API": ("upstreams:\n  main:\n    speaks: []\n", 3, "Fix: speaks: [chat], or remove the line"),
    "APIs of a translated upstream": ("upstreams:\n  main: {lane: translate, speaks: [chat]}\n", 2, "has no effect"),
    "a name of another alphabet": ("teams:\n  größe: {}\n", 2, "Fix: use 1 to 64 letters"),
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
    # The store
    "a server without a host": ("store:\n  url: redis://:pw@\n", 2, "Fix: url: rediss://:${REDIS_PASSWORD}@redis.example.com:6379/0"),
    "a scheme of Valkey": ("store:\n  url: valkey://host\n", 2, "redis:// or rediss://"),
    "an unknown parameter of a server": ("store:\n  url: redis://h?nonsense=1\n", 2, "an unknown parameter, nonsense"),
    "a wrong timeout of Sentinels": ("store:\n  url: redis+sentinel://h/s?socket_timeout=abc\n", 2, "socket_timeout"),
    "a wrong version of TLS": ("store:\n  url: rediss://h?ssl_min_version=9\n", 2, "parameter ssl_min_version"),
    "a parameter of TLS without it": ("store:\n  url: redis://h?ssl_ca_certs=/ca.pem\n", 2, "needs rediss://"),
    "a size of a server": ("store:\n  url: redis://host\n  max_bytes: 1GB\n", 3, "the server's own maxmemory"),
    "sqlite with a parameter": ("store:\n  url: sqlite:///a.db?mode=ro\n", 2, "characters"),
    "metrics by OTLP": ("otel:\n  metrics: true\n", 2, "Fix: remove it: otel sends spans only"),
    "an archive elsewhere": ("archive:\n  url: s3://b\n", 1, "Fix: remove it: the archive is in the store"),
    "an address with a key": ("upstreams:\n  main:\n    base_url: https://me:pw@a/v1\n", 3, "Fix: api_key: "),
    "an empty key": ('upstreams:\n  main:\n    api_key: ""\n', 3, "is empty"),
    "a number as a key": ("upstreams:\n  main:\n    api_key: 12345678\n", 3, 'Fix: put it in quotes'),
    "a header's value": ('upstreams:\n  main:\n    headers:\n      a: "b\\r\\nc: d"\n', 4, "line breaks"),
    "the same header twice": ("upstreams:\n  main:\n    headers:\n      X-A: b\n      x-a: c\n", 5, "is a duplicate"),
}  # fmt: skip

MISTAKES = {
    "a variable as LiteLLM writes it": ("upstreams:\n  main: {api_key: os.environ/X}\n", 2, 'Fix: "${X}"'),
    "the whole URL": (
        "upstreams:\n  main: {base_url: https://a.example/v1/chat/completions}\n",
        2,
        "must end before /chat/completions, which the proxy appends. Fix: base_url: https://api.openai.com/v1",
    ),
    "a URL as host": ("server:\n  host: http://localhost\n", 2, "Fix: host: localhost"),
    "percent": (POLICY % "trigger: 85%", 3, "trigger: must be a mapping (got 85%). Fix: trigger: {fraction: 0.85}"),
    "archive off": (POLICY % "archive: false", 3, "(got false). Fix: to turn it off, write archive: null"),
    "summary off": (POLICY % "summary: false", 3, "must be a section (got false). Fix: "),
    "a condition": (POLICY % "keep: {mesages: 10}", 3, "unknown key 'mesages'. Fix: did you mean 'messages'?"),
}


CONDITIONS = {
    "trigger: {fraction: 0}": "over 0 and at most 1",
    "trigger: {fraction: much}": "over 0 and at most 1",
    "trigger: {tokens: 0}": "Fix: tokens: 4000",
    "trigger: 5": "Fix: trigger: {fraction: 0.05}",
    "trigger: [5]": "Fix: {fraction: 0.05}",
    "trigger: [fraction, 0.8]": "Fix: {fraction: 0.85}",
    "keep: null": "Fix: keep: {fraction: 0.1}",
    "keep: {tokens: 5, messages: 5}": "Fix: keep: {fraction: 0.1}",
    "reserve_output: 0": "Fix: reserve_output: 4000",
    "reserve_output: {messages: 5}": "Fix: reserve_output: 4000",
    "unknown_model: {trigger: {fraction: 0.5}}": "Fix: trigger: {tokens: 170000}",
    "unknown_model: {keep: {fraction: 0.5}}": "Fix: keep: {messages: 6}",
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
