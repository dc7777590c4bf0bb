"""What policies and teams decide, seen from the official client."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.demo.serving import serve
from proxy.demo.upstream import StandIn
from tests.kit.scripted import chat, client, proxied, words

WINDOW = 16_000
BUDGET = 15_488
"""Of the window, 512 tokens are kept for an answer where the request names no size."""
PROFILE = {"context_window": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}

Headers = Mapping[str, str]


@contextlib.contextmanager
def under(
    policies: Mapping[str, Any],
    folder: Path,
    *,
    upstream: StandIn,
    profile: Mapping[str, Any] | None = PROFILE,
    **sections: Any,
) -> Iterator[str]:
    """The URL of a proxy with these policies."""
    with serve(upstream.app) as url:
        route = {"match": "*", "upstream": "main", **({"profile": dict(profile)} if profile else {})}
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream"}},
            "models": [route],
            "policies": dict(policies),
            **sections,
        }
        with proxied(settings, folder) as entrance:
            yield entrance


def ask(url: str, messages: list[Any], *, key: str = "sk-client", **extra: Any) -> Headers:
    """The headers of an answer."""
    with client(url, key) as caller:
        raw = caller.chat.completions.with_raw_response.create(model="m", messages=messages, **extra)
    return raw.headers


def outcome(policy: Mapping[str, Any], messages: list[Any], folder: Path, **extra: Any) -> tuple[Headers, StandIn]:
    """What a policy makes of one request."""
    upstream = StandIn(window=WINDOW, max_output=2_000)
    with under({"default": policy}, folder, upstream=upstream) as url:
        return ask(url, messages, **extra), upstream


def last_messages(upstream: StandIn) -> list[Any]:
    """The messages that reached the upstream."""
    messages: list[Any] = upstream.conversations[-1].body["messages"]
    return messages


def tools(count: int, size: int, *, argument: str = "", name: str = "read_file") -> list[Any]:
    """A conversation of one question and ``count`` tool calls with results of ``size`` tokens."""
    messages: list[Any] = [{"role": "user", "content": "Look at all of it."}]
    for number in range(count):
        arguments = json.dumps({"path": f"src/part_{number}.py", "content": argument})
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": words(size, f"r{number}x")})
    return messages


LONG = chat(7, 1_000)
SHORT = chat(2, 100)


def test_shadow_measures_and_changes_nothing(tmp_path: Path) -> None:
    headers, upstream = outcome({"mode": "shadow"}, LONG, tmp_path)
    assert headers["x-compaction"] == "shadow"
    assert headers["x-compaction-steps"] == "summary"
    before, after = (int(headers[f"x-compaction-tokens-{when}"]) for when in ("before", "after"))
    assert abs(before - upstream.requests[0].tokens) <= 10
    assert after < before / 2
    assert last_messages(upstream) == LONG
    assert len(upstream.requests) == 1, "no summary is made"


def test_off(tmp_path: Path) -> None:
    headers, upstream = outcome({"mode": "off"}, LONG, tmp_path)
    assert headers["x-compaction"] == "off"
    assert "x-compaction-tokens-before" not in headers
    assert last_messages(upstream) == LONG


@pytest.mark.parametrize(
    ("mode", "asked", "done"),
    [
        ("enforce", "off", "off"),
        ("enforce", "shadow", "shadow"),
        ("enforce", "SHADOW", "shadow"),
        ("shadow", "off", "off"),
        ("off", "shadow", "off"),
    ],
)
def test_the_header_makes_less_of_it(mode: str, asked: str, done: str, tmp_path: Path) -> None:
    headers, upstream = outcome({"mode": mode}, LONG, tmp_path, extra_headers={"x-compaction": asked})
    assert headers["x-compaction"] == done
    assert last_messages(upstream) == LONG
    assert "x-compaction" not in upstream.requests[0].headers


def test_the_header_where_the_policy_forbids_it(tmp_path: Path) -> None:
    headers, upstream = outcome({"allow_header": False}, LONG, tmp_path, extra_headers={"x-compaction": "off"})
    assert headers["x-compaction"] == "compacted"
    assert len(last_messages(upstream)) < len(LONG)


def test_another_word_in_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="'off' or 'shadow'") as refused:
        outcome({}, SHORT, tmp_path, extra_headers={"x-compaction": "enforce"})
    assert refused.value.response.headers["x-compaction"] == "none"


TRIGGERS: list[tuple[Any, bool]] = [
    ({"tokens": 14_000}, True),
    ({"tokens": 14_600}, False),
    ({"fraction": 0.9}, True),
    ({"fraction": 0.94}, False),
    ({"messages": 16}, True),
    ({"messages": 17}, False),
    ({"tokens": 14_000, "messages": 16}, True),
    ({"tokens": 14_000, "messages": 17}, False),
    ({"tokens": 14_600, "messages": 16}, False),
    ([{"messages": 100}, {"tokens": 14_000}], True),
    ([{"messages": 100}, {"tokens": 14_600}], False),
    ([{"tokens": 14_600, "messages": 2}, {"fraction": 0.9}], True),
    (["fraction", 0.9], True),
    ([["tokens", 14_600], ["messages", 16]], True),
    ([], False),
    (None, False),
]


@pytest.mark.parametrize(("trigger", "fires"), TRIGGERS, ids=[str(trigger) for trigger, _ in TRIGGERS])
def test_triggers(trigger: Any, fires: bool, tmp_path: Path) -> None:
    """The conversation has 16 messages and some 14,250 tokens, which is 0.92 of the budget."""
    headers, upstream = outcome({"trigger": trigger, "keep": {"messages": 2}}, LONG, tmp_path)
    assert 14_100 < upstream.conversations[-1].tokens < 14_500 or fires
    assert len(LONG) == 16
    assert headers["x-compaction"] == ("compacted" if fires else "none")


def test_a_trigger_in_messages_fires_far_below_the_window(tmp_path: Path) -> None:
    headers, upstream = outcome({"trigger": {"messages": 10}, "keep": {"messages": 4}}, chat(8, 500), tmp_path)
    assert headers["x-compaction"] == "compacted"
    assert last_messages(upstream)[-4:] == chat(8, 500)[-4:]


def test_what_would_gain_nothing_is_not_done(tmp_path: Path) -> None:
    headers, upstream = outcome({"trigger": {"messages": 10}, "keep": {"messages": 4}}, chat(8, 20), tmp_path)
    assert headers["x-compaction"] == "none"
    assert last_messages(upstream) == chat(8, 20)
    assert len(upstream.requests) == 1


KEEPS: list[tuple[Any, int]] = [
    ({"messages": 6}, 6),
    ({"messages": 1}, 1),
    ({"tokens": 3_000}, 4),
    ({"tokens": 500}, 2),
    ({"fraction": 0.30}, 6),
    ({"fraction": 0.01}, 2),
]


@pytest.mark.parametrize(("keep", "least"), KEEPS, ids=[str(keep) for keep, _ in KEEPS])
def test_at_least_keep_stays(keep: Any, least: int, tmp_path: Path) -> None:
    headers, upstream = outcome({"trigger": {"tokens": 14_000}, "keep": keep}, LONG, tmp_path)
    assert headers["x-compaction-steps"] == "summary"
    messages = last_messages(upstream)
    assert messages[0] == LONG[0]
    assert messages[-least:] == LONG[-least:]
    kept = len(messages) - 2
    assert least <= kept <= least + 2, "keep is the least, but not much more stays"


def digest_of(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


TEAMS: dict[str, Any] = {
    "policies": {
        "default": {"trigger": {"tokens": 14_000}, "keep": {"messages": 2}},
        "careful": {"extends": "default", "keep": {"messages": 6}},
        "hands-off": {"extends": "careful", "mode": "off"},
        "stubborn": {"extends": "careful", "allow_header": False},
    },
    "teams": {
        "search": {"keys": [digest_of("sk-search")], "policy": "careful"},
        "legal": {"keys": [digest_of("sk-legal")], "policy": "hands-off"},
        "bots": {"keys": [digest_of("sk-bots")], "policy": "stubborn", "models": ["m", "gpt-*"]},
    },
}


def test_each_team_has_its_policy(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    policies, teams = TEAMS["policies"], TEAMS["teams"]
    with under(policies, tmp_path, upstream=upstream, teams=teams) as url:
        kept = {}
        for key in ("sk-nobody", "sk-search", "sk-legal", "sk-bots"):
            headers = ask(url, LONG, key=key, extra_headers={"x-compaction": "off"} if key == "sk-bots" else None)
            kept[headers["x-compaction-policy"]] = len(last_messages(upstream)) - 2
    # `keep` is counted from where the trigger was reached, which may be a message or two before the last.
    assert 2 <= kept["default"] <= 4
    assert 6 <= kept["careful"] == kept["stubborn"] <= 8
    assert kept["hands-off"] == len(LONG) - 2
    assert {request.headers["authorization"] for request in upstream.requests} == {"Bearer sk-upstream"}


def test_keys_mode_and_models_of_a_team(tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    sections = {"teams": TEAMS["teams"], "auth": {"mode": "keys"}}
    with under(TEAMS["policies"], tmp_path, upstream=upstream, **sections) as url:
        with pytest.raises(openai.AuthenticationError):
            ask(url, SHORT, key="sk-nobody")
        assert ask(url, SHORT, key="sk-bots")["x-compaction"] == "none"
        with client(url, "sk-bots") as caller, pytest.raises(openai.PermissionDeniedError) as refused:
            caller.chat.completions.create(model="o9", messages=[{"role": "user", "content": "Hello"}])
        assert refused.value.code == "model_not_allowed"
        assert refused.value.response.headers["x-compaction"] == "none"
        with client(url, "sk-search") as caller:
            caller.chat.completions.create(model="o9", messages=[{"role": "user", "content": "Hello"}])
    assert len(upstream.requests) == 2


def test_a_policy_has_settings_of_its_own_for_some_models(tmp_path: Path) -> None:
    """By the name that the client gives, and each with summaries of its own."""
    upstream = StandIn(window=WINDOW, max_output=2_000)
    policy = {
        "trigger": {"tokens": 15_000},
        "keep": {"messages": 2},
        "models": [{"match": "eager*", "trigger": {"tokens": 14_000}}, {"match": "*", "allow_header": False}],
    }
    done = {}
    with under({"default": policy}, tmp_path, upstream=upstream) as url, client(url) as caller:
        for model in ("eager-1", "patient", "eager-2"):
            header = {"x-compaction": "off"} if model == "patient" else None
            raw = caller.chat.completions.with_raw_response.create(model=model, messages=LONG, extra_headers=header)
            done[model] = (raw.headers["x-compaction"], raw.headers["x-compaction-policy"])
    assert done == {
        "eager-1": ("compacted", "default"),
        "patient": ("none", "default"),
        "eager-2": ("compacted", "default"),
    }


NEVER = {"tokens": 15_000}
"""A summary's trigger that these conversations do not reach."""


def test_arguments_alone(tmp_path: Path) -> None:
    policy = {
        "trigger": NEVER,
        "truncate_args": {"trigger": {"tokens": 5_000}, "keep": {"messages": 4}, "max_length": 300},
        "evict_results": None,
    }
    messages = tools(8, 100, argument=words(1_200, "long"), name="write_file")
    headers, upstream = outcome(policy, messages, tmp_path)
    assert headers["x-compaction-steps"] == "arguments"
    assert "x-compaction-summary" not in headers
    assert len(upstream.requests) == 1
    sent = last_messages(upstream)
    assert len(sent) == len(messages)
    changed = [i for i, message in enumerate(sent) if message != messages[i]]
    assert changed[0] == 1
    assert changed[-1] < len(messages) - 4
    for index in changed:
        arguments = json.loads(sent[index]["tool_calls"][0]["function"]["arguments"])
        assert arguments["path"].startswith("src/part_")
        assert "this note is not part of the value" in arguments["content"]
        assert len(arguments["content"]) < 300
    assert upstream.faults == []


def test_results_alone(tmp_path: Path) -> None:
    policy = {
        "trigger": NEVER,
        "truncate_args": None,
        "evict_results": {"trigger": {"tokens": 5_000}, "keep": {"messages": 4}, "max_tokens": 500},
    }
    messages = tools(8, 1_200)
    headers, upstream = outcome(policy, messages, tmp_path)
    assert headers["x-compaction-steps"] == "results"
    assert len(upstream.requests) == 1
    sent = last_messages(upstream)
    assert len(sent) == len(messages)
    changed = [i for i, message in enumerate(sent) if message != messages[i]]
    assert changed[0] == 2
    assert changed[-1] < len(messages) - 4
    assert all("left out" in sent[index]["content"] for index in changed)
    assert upstream.conversations[0].tokens < 8_000
    assert upstream.faults == []


def test_results_of_excluded_tools_stay(tmp_path: Path) -> None:
    results = {"trigger": {"tokens": 5_000}, "keep": {"messages": 4}, "max_tokens": 500, "exclude": ["read_file"]}
    policy = {"trigger": NEVER, "truncate_args": None, "evict_results": results}
    messages = tools(8, 1_200)
    headers, upstream = outcome(policy, messages, tmp_path)
    assert headers["x-compaction"] == "none"
    assert last_messages(upstream) == messages


def test_an_unknown_model_is_compacted_at_170000_tokens(tmp_path: Path) -> None:
    upstream = StandIn(window=1_000_000)
    with under({}, tmp_path, upstream=upstream, profile=None) as url:
        below = ask(url, chat(20, 3_000))
        assert below["x-compaction"] == "none"
        assert upstream.conversations[-1].tokens > 110_000
        above = ask(url, chat(30, 3_000))
    assert above["x-compaction"] == "compacted"
    assert last_messages(upstream)[-6:] == chat(30, 3_000)[-6:]


def test_an_unknown_model_under_a_policys_own_figures(tmp_path: Path) -> None:
    upstream = StandIn(window=1_000_000)
    policy = {"unknown_model": {"trigger": {"tokens": 6_000}, "keep": {"messages": 2}}}
    with under({"default": policy}, tmp_path, upstream=upstream, profile=None) as url:
        headers = ask(url, LONG)
        assert headers["x-compaction-steps"] == "summary"
        assert last_messages(upstream)[-2:] == LONG[-2:]
        assert upstream.conversations[-1].tokens < 6_000
        assert ask(url, SHORT)["x-compaction"] == "none"


def test_room_is_kept_for_an_answer(tmp_path: Path) -> None:
    """A request that only just fits its window would be answered with the few tokens that are left."""
    messages = chat(8, 950)
    policy = {"trigger": {"fraction": 1.0}, "keep": {"messages": 2}, "reserve_output": {"tokens": 4_000}}
    headers, upstream = outcome(policy, messages, tmp_path)
    assert headers["x-compaction"] == "compacted"
    assert upstream.conversations[-1].tokens <= WINDOW - 4_000
