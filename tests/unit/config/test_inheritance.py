"""Test policies that extend others, and their overrides for models."""

import json
from textwrap import dedent

import pytest

from proxy.compaction.settings import Clause
from proxy.config import Policy
from tests.kit.configuration import errors_in
from tests.kit.configurations import loads

POLICIES = """
    policies:
      base:
        trigger: {fraction: 0.6}
        keep: {messages: 10}
        summary: {max_tokens: 1000, timeout: 9}
        models:
          - match: "gpt-5-mini"
            keep: {messages: 5}
          - match: "*-small"
            mode: "off"
      careful:
        extends: base
        keep: {messages: 40}
        models:
          - match: "gpt-5*"
            trigger: {fraction: 0.5}
            summary: {timeout: 8}
            duplicates: null
          - match: "gpt-5-mini"
            mode: shadow
      plain:
        extends: careful
"""


def policies(text: str = POLICIES) -> dict[str, Policy]:
    return dict(loads(dedent(text).encode(), {}).policies)


def test_the_first_entry_that_matches_is_laid_over_the_policy() -> None:
    careful = policies()["careful"]
    found = careful.for_model("gpt-5.2")
    assert found.name == "careful"
    assert found.trigger == (Clause(fraction=0.5),)
    assert found.keep == Clause(messages=40)
    assert (found.summary.timeout, found.summary.max_tokens) == (8, 1000)
    assert found.duplicates is None
    assert found.mode == "enforce"


SECTIONS = {
    "summary": {"max_tokens": 1000, "timeout": 9.0},
    "duplicates": {"min_length": 50, "keep": {"messages": 9}},
    "truncate_args": {"max_length": 100, "truncation_text": "cut"},
    "evict_results": {"max_tokens": 300, "exclude": ["ls"]},
    "media": {"trigger": {"fraction": 0.5}, "keep": {"messages": 3}},
    "recall": {"tool": "auto", "max_rounds": 2},
    "user_messages": {"max_tokens": 500, "keep_first": False},
    "unknown_model": {"trigger": {"tokens": 9000}, "keep": {"messages": 3}},
}
"""Sections with two settings, of which the parent states the first and the child the second."""


@pytest.mark.parametrize("by", ["extends", "models"])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_merges_with_that_of_the_parent(name: str, by: str) -> None:
    (first, inherited), own = SECTIONS[name].items()
    parent, child = {name: {first: inherited}}, {name: dict([own])}
    if by == "extends":
        text = {"base": parent, "child": {"extends": "base", **child}}
    else:
        text = {"child": {**parent, "models": [{"match": "m", **child}]}}
    found = getattr(policies(json.dumps({"policies": text}))["child"].for_model("m"), name)
    expected = getattr(policies(json.dumps({"policies": {"both": {name: SECTIONS[name]}}}))["both"], name)
    assert found == expected


def test_what_follows_from_the_trigger_follows_from_that_of_the_entry() -> None:
    careful = policies()["careful"]
    found = careful.for_model("gpt-5")
    assert found.media is not None
    assert found.media.trigger == (Clause(fraction=0.5),)
    assert found.media.keep == Clause(messages=40)
    assert found.prepare == (Clause(fraction=round(0.5 * 15 / 17, 4)),)
    assert careful.prepare == (Clause(fraction=round(0.6 * 15 / 17, 4)),)


def test_a_model_that_none_matches_has_the_policy_itself() -> None:
    base = policies()["base"]
    assert base.for_model("gpt-5") is base
    assert base.for_model("GPT-5-MINI") is base
    assert base.for_model("gpt-5-mini").keep == Clause(messages=5)
    assert base.for_model("gpt-5-mini") is base.for_model("gpt-5-mini")


def test_the_fingerprint_is_that_of_what_is_in_force() -> None:
    found = policies()
    base, careful = found["base"], found["careful"]
    assert careful.fingerprint != careful.for_model("gpt-5").fingerprint
    assert careful.for_model("gpt-5").fingerprint == careful.for_model("gpt-5.2").fingerprint
    assert found["plain"].for_model("gpt-5").fingerprint == careful.for_model("gpt-5").fingerprint
    without = policies("policies: {base: {trigger: {fraction: 0.6}, keep: {messages: 10}}}")
    other = policies(POLICIES.replace('match: "gpt-5-mini"\n            keep: {messages: 5}', "match: x"))["base"]
    assert base.fingerprint == other.fingerprint, "what holds for another model changes no summary of this one"
    assert base.fingerprint != without["base"].fingerprint


WRONG = {
    "no match": (
        """
        policies:
          a:
            models:
              - keep: {messages: 5}
        """,
        4,
        "policies.a.models[0]: 'match' is missing. Fix: add match",
    ),
    "extends": (
        """
        policies:
          a:
            models:
              - match: x
                extends: default
        """,
        5,
        "policies.a.models[0].extends: unknown setting. Fix: ",
    ),
    "a value": (
        """
        policies:
          a:
            models:
              - match: x
                summary:
                  max_tokens: lots
        """,
        6,
        "policies.a.models[0].summary.max_tokens: must be a whole number",
    ),
    "prepared too late by a child": (
        """
        policies:
          a:
            models:
              - match: x
                trigger: {fraction: 0.5}
          b:
            extends: a
            prepare: {fraction: 0.6}
        """,
        8,
        "policies.b.models (x).prepare: 0.6 (fraction) must be below the trigger's 0.5",
    ),
}


@pytest.mark.parametrize(("text", "line", "hint"), WRONG.values(), ids=WRONG)
def test_an_invalid_override_is_an_error_with_its_line(text: str | bytes, line: int, hint: str) -> None:
    (found,) = errors_in(text)
    assert found.line == line
    assert found.message.startswith(hint)
