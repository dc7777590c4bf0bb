"""Requests far beyond any window: they fit or get a clear error, and never cause a loop."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit.scripted import behind, chat, client, protected, words
from tests.kit.upstream import StandIn

WINDOW = 8_000
BELIEVED = WINDOW * 10 // 3
"""The window that the proxy assumes by default. The real one is 30 % of it."""

SECONDS = 60
"""For one request, on a machine that has other things to do."""


def tool(number: int, size: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": words(size)}}}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def call(number: int) -> dict[str, Any]:
    function = {"name": "read_file", "arguments": f'{{"path": "/srv/{number}.log"}}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def result(number: int, size: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": words(size, f"line{number}x")}


EXTREMES: dict[str, tuple[dict[str, Any], bool]] = {
    "a result": ({"messages": [*chat(2, 200), call(1), result(1, 3 * WINDOW)]}, True),
    "a result in the past": ({"messages": [call(1), result(1, 3 * WINDOW), *chat(2, 200)[1:]]}, True),
    "parallel results": (
        {
            "messages": [
                *chat(2, 200),
                {**call(1), "tool_calls": [call(number)["tool_calls"][0] for number in range(6)]},
                *[result(number, WINDOW // 2) for number in range(6)],
            ]
        },
        True,
    ),
    "tiny messages": ({"messages": chat(1_500, 1)}, True),
    "tiny messages without a break": (
        {"messages": [{"role": "user", "content": f"Line {number}."} for number in range(3_000)]},
        True,
    ),
    "the user's words": ({"messages": [*chat(4, 200), {"role": "user", "content": words(3 * WINDOW)}]}, False),
    "the user's words alone": ({"messages": [{"role": "user", "content": words(3 * WINDOW)}]}, False),
    "the system's words": ({"messages": [{"role": "system", "content": words(3 * WINDOW)}, *chat(4, 200)[1:]]}, False),
    "200 tools": (
        {"messages": chat(4, 200), "tools": [tool(number, WINDOW * 12 // 10 // 200 - 31) for number in range(200)]},
        False,
    ),
}

PARTS = {
    "the user's words": "last user message",
    "the user's words alone": "last user message",
    "the system's words": "system messages",
    "200 tools": "tools",
}


def asked(
    request: Mapping[str, Any], folder: Path, *, believed: int = WINDOW, stream: bool = False, **policy: Any
) -> tuple[StandIn, str | None]:
    """The upstream after a request was sent twice, and what the client was told of the last, if it failed."""
    upstream = StandIn(window=WINDOW)
    told: str | None = None
    with protected(upstream, folder, believed, policy) as caller:
        for _ in range(2):
            before, begun = len(upstream.conversations), time.monotonic()
            told = None
            try:
                # The client sends ``extra_body`` unchanged. It spends seconds on other arguments.
                answer: Any = caller.chat.completions.create(
                    model="m", messages=[], stream=stream, extra_body=dict(request)
                )
                assert list(answer) if stream else answer.choices
            except openai.BadRequestError as error:
                told = f"{error.code}: {error.message}"
            assert time.monotonic() - begun < SECONDS
            assert len(upstream.conversations) - before <= 3
    return upstream, told


CASES = [
    pytest.param(name, believed, stream, marks=[] if (number + place) % 4 == 3 * stream else pytest.mark.full)
    for number, name in enumerate(EXTREMES)
    for place, believed in enumerate((WINDOW, BELIEVED))
    for stream in (False, True)
]
"""Each request is streamed with one of the two windows. ``--full`` runs all combinations."""


@pytest.mark.parametrize(("name", "believed", "stream"), CASES)
def test_a_fit_or_the_clear_error(name: str, believed: int, stream: bool, tmp_path: Path) -> None:
    """Each extreme is tested in two of four combinations, and in all with ``--full``."""
    request, fits = EXTREMES[name]
    upstream, told = asked(request, tmp_path, believed=believed, stream=stream)
    assert upstream.faults == []
    if fits:
        assert told is None
        assert upstream.conversations[-1].tokens < WINDOW
        refused = [received for received in upstream.conversations if received.status != 200]
        assert len(refused) <= (1 if believed > WINDOW else 0)
    else:
        assert told is not None
        assert told.startswith("context_length_exceeded: ")
        assert "maximum context length" in told, "the upstream's own words"
        assert PARTS[name] in told, "and which part it is"


@pytest.mark.parametrize("believed", [WINDOW, BELIEVED])
def test_the_users_words_are_shortened_where_the_policy_allows_it(believed: int, tmp_path: Path) -> None:
    request, _ = EXTREMES["the user's words"]
    upstream, told = asked(request, tmp_path, believed=believed, shorten_last_user_message=True)
    assert told is None
    assert upstream.conversations[-1].tokens < WINDOW
    assert upstream.faults == []


@pytest.mark.parametrize("name", ["a result", "tiny messages"])
def test_a_fit_where_nobody_knows_the_window(name: str, tmp_path: Path) -> None:
    upstream = StandIn(window=WINDOW)
    with behind(upstream, tmp_path, profile=None) as url, client(url) as caller:
        for _ in range(2):
            before = len(upstream.conversations)
            assert caller.chat.completions.create(model="nobody-knows", **EXTREMES[name][0]).choices
            assert len(upstream.conversations) - before <= 3
    assert upstream.conversations[-1].status == 200
