"""Test the agent, its session without the proxy and with another server, and the whole demonstration."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from proxy.demo.apis import EveryApi
from proxy.demo.run import (
    MODEL,
    WINDOW,
    Figures,
    demo,
    session,
    straight,
    through_proxy,
    verdict,
)
from proxy.demo.script import FACTS
from proxy.server.loopback import serve


@pytest.fixture(scope="module")
def unprotected() -> Figures:
    return session(60, straight, lambda: None)


VERDICTS: dict[str, tuple[str | None, str | None, bool, str]] = {
    "as it should be": ("400 too long", None, True, "failed in turn 18: 400 too long"),
    "the proxy failed": ("400 too long", "500 oops", False, "With the proxy the session failed in turn 18: 500 oops"),
    "both failed": ("500 oops", "500 oops", False, "With the proxy the session failed"),
    "nothing to show": (None, None, False, "Ask for more turns"),
}


@pytest.mark.parametrize(("without", "protected", "good", "words"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict(unprotected: Figures, without: str | None, protected: str | None, good: bool, words: str) -> None:
    said = verdict(60, replace(unprotected, error=without), replace(unprotected, error=protected))
    assert said[0] is good
    assert words in said[1]


def test_the_whole_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    status = demo(60)
    shown = capsys.readouterr().out
    assert status == 0, shown
    cells = {
        row[0].strip(): [cell.strip() for cell in row[1:]]
        for row in (line.strip("│┃").split("│") for line in shown.splitlines())
        if len(row) == 3
    }
    assert cells["turns done"][1] == "60"
    assert cells["error"] == ["400 context_length_exceeded", "none"]
    assert cells["malformed conversations"] == ["0", "0"]
    assert cells["requests refused upstream"] == ["1", "0"]
    assert int(cells["turns compacted"][1]) > 0
    assert int(cells["largest prompt"][1].replace(",", "")) <= WINDOW
    assert cells["early facts still visible"][1].startswith(f"{len(FACTS)} of {len(FACTS)}")


@pytest.mark.parametrize(
    ("api", "words"),
    [
        ("responses", "context_length_exceeded: Your input exceeds the context window of this model."),
        ("messages", "400 invalid_request_error: prompt is too long: "),
    ],
)
def test_the_session_fails_on_every_api_and_the_proxy_saves_it(api: str, words: str) -> None:
    without = session(24, straight, lambda: None, api)
    assert without.error is not None
    assert without.error.startswith(words)
    assert (without.turns, without.refused, without.faults) == (17, 1, 0)
    protected = session(24, through_proxy, lambda: None, api)
    assert (protected.turns, protected.error, protected.refused, protected.faults) == (24, None, 0, 0)
    assert (protected.compacted > 0, protected.summaries > 0, protected.facts) == (True, True, len(FACTS))


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
USER = {"role": "user", "content": "Hello."}


@pytest.mark.parametrize(
    ("path", "conversation", "words"),
    [
        ("responses", {"input": "Hello."}, None),
        ("responses", {"input": [USER, CALL, OUTPUT]}, None),
        ("responses", {"input": [USER, CALL]}, "No tool output found for function call a."),
        ("responses", {"input": [USER, OUTPUT]}, "No tool call found for function call output with call_id a."),
        ("messages", {"messages": [USER, USER, USE, RESULT, USER]}, None),
        ("messages", {"messages": [USER, USE, USER]}, "messages.1: `tool_use` ids were found without `tool_result`"),
        (
            "messages",
            {"messages": [USER, USE, USER, RESULT]},
            "messages.1: `tool_use` ids were found without `tool_result`",
        ),
        ("messages", {"messages": [USER, RESULT]}, "messages.0: unexpected `tool_use_id` found in `tool_result`"),
    ],
)
def test_the_stand_in_rejects_calls_and_results_that_do_not_match(
    path: str, conversation: dict[str, Any], words: str | None
) -> None:
    upstream = EveryApi(window=WINDOW, max_output=2_000, model=MODEL)
    with serve(upstream.app) as url:
        sent = {"model": MODEL, "max_tokens": 100, **conversation}
        answer = httpx.post(f"{url}/v1/{path}", json=sent, trust_env=False)
    assert answer.status_code == (400 if words else 200)
    assert len(upstream.faults) == bool(words)
    if words:
        assert answer.json()["error"]["message"].startswith(words)
