"""Test the meaning of policies."""

import dataclasses
from textwrap import dedent

import pytest
from pydantic import ValidationError

from proxy.compaction.settings import Clause
from proxy.config import Settings, load
from tests.kit.configurations import loads


def settings(text: str, **environ: str) -> Settings:
    return loads(dedent(text).encode(), environ)


def trigger(text: str) -> tuple[Clause, ...]:
    return settings(f"policies:\n  default:\n    trigger: {text}\n").policies["default"].trigger


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("{tokens: 4000}", (Clause(tokens=4000),)),
        ("{tokens: 4_000}", (Clause(tokens=4000),)),
        ("{fraction: 1}", (Clause(fraction=1.0),)),
        ("{tokens: 4000, messages: 10}", (Clause(tokens=4000, messages=10),)),
        ("[{tokens: 4000}, {messages: 10}]", (Clause(tokens=4000), Clause(messages=10))),
        ("[{tokens: 4000, fraction: 0.5}, {messages: 10}]", (Clause(tokens=4000, fraction=0.5), Clause(messages=10))),
        ("[]", ()),
        ("null", ()),
    ],
)
def test_conditions(text: str, meaning: tuple[Clause, ...]) -> None:
    assert trigger(text) == meaning


def test_keep() -> None:
    policy = settings("policies: {default: {keep: {messages: 20}}}").policies["default"]
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
        ("{trigger: [{fraction: 0.9}, {price_step: true}]}", (Clause(price_step=True), Clause(fraction=0.75))),
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
