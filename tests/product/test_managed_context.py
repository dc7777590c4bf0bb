"""A request that asks its upstream to remove old content: the upstream decides what fits, until it refuses."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.messages import words
from tests.kit.scripted import PROFILE, behind
from tests.kit.upstream import EveryApi

TRIGGER = {"trigger": {"type": "input_tokens", "value": 8_000}}
REMOVING: list[tuple[str, Any]] = [
    ("messages", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("messages", {"edits": [{"type": "clear_tool_uses_20271231", **TRIGGER, "clear_tool_inputs": True}]}),
    ("messages", {"edits": [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919", **TRIGGER}]}),
    ("messages", {"edits": [{"type": "compact_20260112", "pause_after_compaction": True}]}),
    ("responses", [{"type": "compaction", "compact_threshold": 9_000}]),
    ("responses", [{"compact_threshold": 9_000}]),
]
KEEPING: list[tuple[str, Any]] = [
    ("messages", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    ("messages", {"edits": []}),
    ("messages", None),
    ("responses", []),
    ("responses", None),
]


def sent(folder: Path, window: int, api: str, managed: Any) -> tuple[list[Any], EveryApi]:
    """Send a growing conversation of up to 30,000 tokens. Return its outcomes and the upstream."""
    upstream = EveryApi(window=window)
    field = {} if managed is None else {"context_management": managed}
    outcomes, messages = [], list[Any]()
    with (
        behind(upstream, folder, policy={"prepare": None, "self_compacting": "usual"}, profile=PROFILE) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60) as http,
    ):
        for turn in range(10):
            messages.append({"role": "user", "content": f"Part {turn}: {words(1_500, f'u{turn}x')}"})
            body = {"model": "m", "input" if api == "responses" else "messages": messages, "max_tokens": 400, **field}
            if api == "responses":
                del body["max_tokens"]
            answer = http.post(f"/v1/{api}", json=body)
            assert answer.status_code == 200, answer.text
            outcomes.append((answer.headers["x-compaction"], answer.headers["x-compaction-retries"]))
            messages.append({"role": "assistant", "content": words(1_500, f"a{turn}x")})
    assert upstream.faults == []
    return outcomes, upstream


@pytest.mark.parametrize(("api", "managed"), REMOVING)
def test_the_upstream_removes(api: str, managed: Any, tmp_path: Path) -> None:
    outcomes, upstream = sent(tmp_path, 64_000, api, managed)
    assert outcomes == [("none", "0")] * 10
    assert upstream.summaries == []


@pytest.mark.parametrize(("api", "managed"), KEEPING)
def test_the_proxy_compacts_what_no_upstream_removes(api: str, managed: Any, tmp_path: Path) -> None:
    outcomes, _ = sent(tmp_path, 16_000, api, managed)
    assert {verdict for verdict, _ in outcomes[5:]} == {"compacted"}
    assert {retries for _, retries in outcomes} == {"0"}


@pytest.mark.parametrize(("api", "managed"), REMOVING[::3])
def test_after_a_refusal_the_proxy_compacts(api: str, managed: Any, tmp_path: Path) -> None:
    outcomes, _ = sent(tmp_path, 16_000, api, managed)
    verdicts = [verdict for verdict, _ in outcomes]
    assert verdicts[0] == "none"
    assert verdicts[-1] == "compacted"
