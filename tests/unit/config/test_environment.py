"""Test environment variables in a configuration."""

from textwrap import dedent

import pytest

from proxy.compaction.settings import Clause
from proxy.config import Settings
from tests.kit.configuration import errors_in
from tests.kit.configurations import loads


def settings(text: str, **environ: str) -> Settings:
    return loads(dedent(text).encode(), environ)


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
