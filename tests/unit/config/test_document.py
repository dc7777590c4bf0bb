"""Test that any file gives settings or an error with a line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import Settings
from proxy.config.document import Issue, Issues
from tests.kit.configuration import errors_in
from tests.kit.configurations import loads

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
