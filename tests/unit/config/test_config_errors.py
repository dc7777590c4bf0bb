"""Test the line and the advice of each configuration error."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from proxy.config import check, load
from proxy.errors import ConfigurationError

HASH = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
CANARY = "sk-canary-8c1f"


def complaints(tmp_path: Path, text: str | bytes, environ: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """Return the errors of ``check`` as pairs of line and message."""
    file = tmp_path / "proxy.yaml"
    file.write_bytes(text if isinstance(text, bytes) else dedent(text).lstrip("\n").encode())
    found = []
    for line in check(file, environ or {}):
        name, number, message = line.removeprefix(str(tmp_path) + "/").split(":", 2)
        assert name == "proxy.yaml"
        found.append((int(number), message.strip()))
    return found


SYNTAX: dict[str, tuple[str | bytes, int, str]] = {
    "second key": ("server: {port: 1}\nauth: {mode: open}\nserver: {port: 2}\n", 3, "first on line 1"),
    "second key inside": ("server:\n  port: 1\n  port: 2\n", 3, "Fix: keep one of them"),
    "second document": ("server: {port: 1}\n---\nserver: {port: 2}\n", 2, "remove the '---'"),
    "a list at the top": ("- a\n- b\n", 1, "'name: value'"),
    "text at the top": ("hello\n", 1, "'name: value'"),
    "python tag": ("server:\n  host: !!python/object/apply:os.system [id]\n", 2, "tag"),
    "python name tag": ("server: !!python/name:os.system ''\n", 1, "tag"),
    "int tag": ("server: {host: !!int 1}\n", 1, "tag"),
    "set tag": ("server:\n  host: a\nteams: !!set {a}\n", 3, "tag"),
    "unquoted star": ("models:\n  - match: *\n    upstream: main\n", 2, "in quotes"),
    "unknown anchor": ("models:\n  - match: *all\n", 2, "'*all' refers to no anchor"),
    "anchor in itself": ("models: &a\n  - *a\n", 2, "Fix: write the value out"),
    "merge key": ("server:\n  <<: {port: 1}\n", 2, "merge keys"),
    "variable in braces": ("server: {port: 1}\nupstreams: {main: {api_key: ${KEY}}}\n", 2, '"${NAME}"'),
    "tab": ("server:\n\tport: 1\n", 2, "spaces, not tabs"),
    "open quote": ("server:\n  host: 'a\n  port: 1\n", 2, "Fix: close the quote or bracket that opens here"),
    "open bracket": ("server:\n  port: 1\nmodels: [a,\n", 3, "Fix: close the quote or bracket that opens here"),
    "colon in text": ("server:\n  host: a: b\n", 2, "quotes"),
    "percent": ("server:\n  host: %a\n", 2, "in quotes"),
    "indentation": ("server:\n  host: a\n port: 1\n", 3, "indentation"),
    "control character": ("server:\n  host: a\x07\n", 2, "control character"),
    "not UTF-8": (b"server:\n  host: \xff\n", 2, "UTF-8"),
    "a list as a name": ("server:\n  ? [a]\n  : 1\n", 2, "can't be a name"),
    "a truth value as a name": ("upstreams:\n  no: {provider: openai}\n", 2, 'Fix: put it in quotes, as in "no": …'),
    "a number as a name": ("teams:\n  1.10: {}\n", 2, 'Fix: put it in quotes, as in "1.10": …'),
    "nothing as a name": ("teams:\n  ~: {}\n", 2, 'Fix: put it in quotes, as in "~": …'),
}


@pytest.mark.parametrize("name", SYNTAX)
def test_what_is_no_valid_yaml_here_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    text, line, hint = SYNTAX[name]
    (found,) = complaints(tmp_path, text)
    assert found[0] == line
    assert hint in found[1]


VALUES = {
    # Unknown names
    "unknown section": ("sevrer: {port: 1}\n", 1, "sevrer: unknown setting. Fix: did you mean 'server'?"),
    "unknown key": ("server:\n  host: a\n  prot: 1\n", 3, "server.prot: unknown setting. Fix: did you mean 'port'?"),
    "unknown key, other case": ("server:\n  Port: 1\n", 2, "did you mean 'port'?"),
    "unknown key, nothing near": ("auth:\n  zzz: 1\n", 2, 'Fix: use one of: keyless, mode'),
    "unknown key in an upstream": ("upstreams:\n  main:\n    base_ulr: x\n", 3, "did you mean 'base_url'?"),
    "unknown key in an upstream called headers": ("upstreams:\n  headers:\n    lan: x\n", 3, "did you mean 'lane'?"),
    "unknown key in a route": ("models:\n  - match: a\n    upstraem: m\n    upstream: openai\n", 3, "'upstream'?"),
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
    "unknown key in a team": ("teams:\n  a:\n    key: []\n", 3, "did you mean 'keys'?"),
    # YAML 1.1 scalars instead of text
    "no as text": ("server:\n  host: no\n", 2, 'Fix: host: "no"'),
    "1.10 as text": ("models:\n  - match: 1.10\n    upstream: openai\n", 2, 'Fix: match: "1.10"'),
    "12:30:45 as text": ("server:\n  host: 12:30:45\n", 2, 'Fix: host: "12:30:45"'),
    "a date as text": (
        "upstreams:\n  main:\n    provider: azure\n    api_version: 2024-10-21\n",
        4,
        'Fix: api_version: "2024-10-21"',
    ),
    "010 as text": ("server:\n  host: 010\n", 2, "base 8"),
    "nothing as text": ("server:\n  host:\n", 2, 'Fix: give a text, in quotes if it is null or ~, or remove th'),
    "yes as an upstream": ("models:\n  - match: a\n    upstream: yes\n", 3, 'Fix: upstream: "yes"'),
    "a number as a policy": ("teams:\n  a:\n    policy: 12\n", 3, 'Fix: policy: "12"'),
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
    "a broken number": ("server:\n  port: 8.5\n", 2, "whole number"),
    "a port out of range": ("server:\n  port: 70000\n", 2, 'Fix: port: 65535'),
    "a key that is none": ("teams: {t: {keys: [{hash: abc}]}}\n", 1, "teams.t.keys[0].hash: must be the hash of a key"),
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
    "no time at all": ("server:\n  deadline: 0\n", 2, "must be over 0"),
    "a negative time": ("server:\n  drain: -1\n", 2, 'Fix: drain: 0'),
    "not a number": ("server:\n  deadline: .nan\n", 2, "must be a number"),
    "infinite": ("server:\n  deadline: .inf\n", 2, "must be a number"),
    "text as a truth value": ("policies:\n  default:\n    allow_header: maybe\n", 3, "must be true or false"),
    "a size": ("server:\n  body_limit: 64XB\n", 2, "must be a size"),
    "a size of zero": ("server:\n  body_limit: 0\n", 2, "must be a size"),
    "empty text": ('server:\n  host: ""\n', 2, "is empty"),
    "a list as text": ("server:\n  host: [a]\n", 2, "must be text"),
    "text as a list": ("teams:\n  a:\n    keys: abc\n", 3, "must be a list"),
    "text as a section": ("server: 8787\n", 1, 'Fix: write server: {port: 8787}'),
    "an empty section": ("auth: {mode: open}\nserver:\n", 2, 'Fix: give its settings, or remove the line'),
    "a mode": ("policies:\n  default:\n    mode: enforced\n", 3, 'Fix: mode: enforce'),
    "a lane": ("upstreams:\n  main:\n    lane: zzz\n", 3, 'Fix: lane: auto'),
    "an auth mode": ("auth:\n  mode: key\n", 2, 'Fix: mode: keys'),
    "a missing match": ("models:\n  - upstream: openai\n", 2, 'models[0]: \'match\' is missing. Fix: add match: "*"'),
    "a missing upstream": ("server: {port: 1}\nmodels:\n\n  - match: a\n", 4, "models[0]: 'upstream' is missing"),
    "no upstreams": ("upstreams: {}\n", 1, 'Fix: add an upstream, as in main: {base_url: https://api.ope'),
    "a name with a space": ("policies:\n  my policy: {}\n", 2, "Fix: use 1 to 64 letters"),
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
    "a prompt without its place": ("policies:\n  default:\n    summary: {prompt: Sum up}\n", 3, "{messages}"),
    # The store
    "redis": ("store:\n  url: redis://:pw@host\n", 2, 'Fix: url: sqlite:///path/to/compaction.db'),
    "postgres": ("store:\n  url: postgres://x\n", 2, 'Fix: url: sqlite:///path/to/compaction.db'),
    "sqlite without a path": ("store:\n  url: sqlite:///\n", 2, 'Fix: url: sqlite:///path/to/compaction.db'),
    "sqlite with two slashes": ("store:\n  url: sqlite://state.db\n", 2, 'Fix: url: sqlite:///path/to/compaction.db'),
    "sqlite with a parameter": ("store:\n  url: sqlite:///a.db?mode=ro\n", 2, "characters"),
    # Upstreams
    "an address without a scheme": ("upstreams:\n  main:\n    base_url: api.openai.com/v1\n", 3, 'Fix: base_url: https://api.openai.com/v1'),
    "a file as an address": ("upstreams:\n  main:\n    base_url: file:///etc/passwd\n", 3, 'Fix: base_url: https://api.openai.com/v1'),
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
    "a short hash": ("teams:\n  a:\n    keys: ['sha256:abc']\n", 3, "64 hex digits"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_wrong_is_named_with_its_line_and_what_to_do(name: str, tmp_path: Path) -> None:
    text, line, hint = VALUES[name]
    (found,) = complaints(tmp_path, text)
    assert found[0] == line
    assert hint in found[1]


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


@pytest.mark.parametrize("setting", CONDITIONS)
def test_a_condition_that_is_wrong_is_refused(setting: str, tmp_path: Path) -> None:
    (found,) = complaints(tmp_path, f"policies:\n  careful:\n    {setting}\n")
    assert found[0] == 3
    assert CONDITIONS[setting] in found[1]


def test_a_wrong_part_of_a_long_condition_is_named_with_its_own_line(tmp_path: Path) -> None:
    text = """
        policies:
          default:
            trigger:
              - {tokens: 4000}
              - messages: 10
                fraction: 7
        """
    (found,) = complaints(tmp_path, text)
    assert found[0] == 6
    assert found[1].startswith("policies.default.trigger[1].fraction: ")


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
    "one key, two teams": (
        f"teams:\n  a:\n    keys: ['{HASH}']\n"
        f"  b:\n    keys:\n      - '{OTHER}'\n      - '{HASH.upper().replace('SHA', 'sha')}'\n",
        7,
        'Fix: keep it in one team',
    ),
    "keys without a key": ("auth:\n  mode: keys\nupstreams:\n  main: {api_key: x}\n", 2, "Fix: add the lines"),
    "keys and an upstream without one": (
        f"auth: {{mode: keys}}\nteams:\n  a: {{keys: ['{HASH}']}}\n"
        "upstreams:\n  main: {api_key: x}\n  two:\n    lane: auto\n",
        6,
        "upstreams.two: api_key is missing",
    ),
    "keys and the default upstream": (
        f"teams:\n  a: {{keys: ['{HASH}']}}\nauth: {{mode: keys}}\n",
        1,
        "upstreams.openai: api_key is missing",
    ),
    "an unknown parent": (
        "policies:\n  careful:\n    extends: defualt\n",
        3,
        "Fix: did you mean 'default'?",
    ),
    "its own parent": ("policies:\n  a:\n    keep: {messages: 5}\n    extends: a\n", 4, "in a circle (a → a)"),
    "a circle of three": (
        "policies:\n  d:\n    extends: a\n  a:\n    extends: b\n  b:\n    extends: c\n  c:\n    extends: a\n",
        5,
        "in a circle (a → b → c → a)",
    ),
    "prepare at the trigger": (
        "policies:\n  a:\n    trigger: {fraction: 0.8}\n    prepare: {fraction: 0.8}\n",
        4,
        "0.8 (fraction) must be below the trigger's 0.8",
    ),
    "prepare above a trigger in tokens": (
        "policies:\n  a:\n    prepare: {tokens: 5000}\n    trigger: [{tokens: 4000}, {fraction: 0.8}]\n",
        3,
        "5000 (tokens) must be below the trigger's 4000",
    ),
    "a trigger below the parent's prepare": (
        "policies:\n  a:\n    prepare: {fraction: 0.7}\n  b:\n    extends: a\n    trigger: {fraction: 0.5}\n",
        6,
        "policies.b.prepare: 0.7 (fraction) must be below the trigger's 0.5",
    ),
    "prepare above the default trigger": ("policies:\n  a:\n    prepare: {fraction: 0.9}\n", 3, "the trigger's 0.85"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_what_does_not_go_together_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text, line, hint = TOGETHER[name]
    (found,) = complaints(tmp_path, text)
    assert found[0] == line
    assert hint in found[1]


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """
        server:
          prot: 1
          host: no
        auth: {mode: closed}
        teams:
          a: {keys: [sk-1, sk-2]}
        """
    assert [line for line, _ in complaints(tmp_path, text)] == [2, 3, 4, 6, 6]


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("server:\n  host: ${HOST}\n", 2, "Fix: set HOST in the environment, or write ${HOST:-default}"),
        ("server:\n  host: ${HOST-x}\n", 2, "isn't the name of a variable. Fix: write ${NAME}"),
        ("server:\n  host: a${}\n", 2, "isn't the name of a variable"),
        ("server:\n  host: a${HOST\n", 2, "isn't the name of a variable"),
        ("server:\n  host: ${1A}\n", 2, "isn't the name of a variable"),
        ("policies:\n  default:\n    summary:\n      prompt: |\n        {messages} ${X}\n", 4, "${X} isn't set"),
    ],
)  # fmt: skip
def test_a_variable_without_a_value_is_an_error(text: str, line: int, hint: str, tmp_path: Path) -> None:
    (found,) = complaints(tmp_path, text)
    assert found[0] == line
    assert hint in found[1]


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
        ("store:\n  url: ${V}\n", f"redis://:{CANARY}@host", "Redis"),
    ],
)
def test_what_a_variable_holds_is_never_shown(text: str, value: str, hint: str, tmp_path: Path) -> None:
    (found,) = complaints(tmp_path, text, {"V": value})
    assert found[0] == 2
    assert hint in found[1]
    assert CANARY not in found[1]


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


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    ((line, message),) = complaints(tmp_path, "\n".join(levels))
    assert line == 6  # the sum of 10 + 91 + … + 9^5 …: the sixth level goes over 100,000
    assert "expands to over 100,000 values" in message


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused(opening: str, tmp_path: Path) -> None:
    ((line, message),) = complaints(tmp_path, "server: {port: 1}\nmodels:\n  " + opening * 20_000)
    assert line == 3
    assert "nested more than 40 levels deep" in message


def test_a_file_of_something_else_is_not_answered_with_thousands_of_lines(tmp_path: Path) -> None:
    found = complaints(tmp_path, "\n".join(f"name{n}: 1" for n in range(3000)))
    assert len(found) == 101
    assert found[-1][1] == "2,900 more errors. Fix: check that this is the right file"


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    ((line, message),) = complaints(tmp_path, b"#" * 1_000_001)
    assert line == 1
    assert "over 1,000,000 bytes" in message


@pytest.mark.parametrize(("name", "reason"), [("none.yaml", "No such file"), (".", "this folder has no *.yaml file")])
def test_a_file_that_cannot_be_read_is_said(name: str, reason: str, tmp_path: Path) -> None:
    (message,) = check(tmp_path / name, {})
    assert message.startswith(str(tmp_path / name))
    assert reason in message
