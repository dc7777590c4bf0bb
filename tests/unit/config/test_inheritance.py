"""Test policies that extend others, and their overrides for models."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from proxy.compaction.settings import Clause
from proxy.config import Policy
from proxy.config.fields import Section
from tests.kit.configuration import errors_in
from tests.kit.configurations import check, loads

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


def test_every_section_with_several_settings_is_tried() -> None:
    sections = {name for name, value in Policy.build("p", {}).__dict__.items() if isinstance(value, Section)}
    single = {name for name in sections if len(type(getattr(Policy.build("p", {}), name)).model_fields) < 2}
    assert sections - single == set(SECTIONS)


def test_what_follows_from_the_trigger_follows_from_that_of_the_entry() -> None:
    careful = policies()["careful"]
    found = careful.for_model("gpt-5")
    assert found.media is not None
    assert found.media.trigger == (Clause(fraction=0.5),)
    assert found.media.keep == Clause(messages=40)
    assert found.prepare == (Clause(fraction=round(0.5 * 15 / 17, 4)),)
    assert careful.prepare == (Clause(fraction=round(0.6 * 15 / 17, 4)),)


@pytest.mark.parametrize("name", ["careful", "plain"])
def test_own_entries_come_before_those_of_the_parent(name: str) -> None:
    policy = policies()[name]
    assert [own.match for own in policy.models] == ["gpt-5*", "gpt-5-mini", "gpt-5-mini", "*-small"]
    assert policy.for_model("gpt-5-mini").mode == "enforce", "an earlier entry matches"
    small = policy.for_model("llama-small")
    assert (small.mode, small.keep) == ("off", Clause(messages=40)), "the parent's entry over the child's settings"


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
    "unknown setting": (
        """
        policies:
          a:
            models:
              - match: x
                triger: {fraction: 0.5}
        """,
        5,
        "policies.a.models[0].triger: unknown setting. Fix: did you mean 'trigger'?",
    ),
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
    "entries in entries": (
        """
        policies:
          a:
            models:
              - {match: x, models: []}
        """,
        4,
        "policies.a.models[0].models: unknown setting. Fix: ",
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
    "prepared too late": (
        """
        policies:
          a:
            prepare: {fraction: 0.6}
            models:
              - match: x
                trigger: {fraction: 0.5}
        """,
        6,
        "policies.a.models[0].prepare: 0.6 (fraction) must be below the trigger's 0.5",
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


def test_a_file_may_hold_a_thousand_teams_with_overrides(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    lines = ["policies:"]
    lines += [f"  p{n}: {{models: [{{match: 'm{n}*', keep: {{messages: {n + 1}}}}}]}}" for n in range(1_000)]
    file.write_text("\n".join(lines) + "\n")
    assert check(file, {}) == []


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
    found = policies(INHERITED)
    child, grandchild = found["child"], found["grandchild"]
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
    found = policies("policies: {default: {trigger: {tokens: 5}}, apart: {}, child: {extends: default}}")
    assert found["apart"].trigger == (Clause(fraction=0.85),)
    assert found["child"].trigger == (Clause(tokens=5),)


def test_default_is_always_there_and_first() -> None:
    assert list(policies("policies: {a: {}, b: {extends: default}}")) == ["default", "a", "b"]
