"""Test that shadow mode predicts what enforcing would have done, on a recorded session."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.records.model import LedgerSums
from tests.kit.recorded import SESSION, recorded_messages
from tests.kit.records import ledger_in, records_in
from tests.kit.scripted import behind
from tests.kit.upstream import Reply, StandIn, ToolCall

pytestmark = [pytest.mark.long, pytest.mark.skipif(not SESSION.exists(), reason="the recorded session is not at hand")]

HUGE = 1_000_000
PRICES = {
    "m": {"input_cost_per_token": 0.000001, "output_cost_per_token": 0.00001, "cache_read_input_token_cost": 1e-7}
}


def recorded_reply(message: dict[str, Any]) -> Reply:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return Reply(content=message.get("content"), tool_calls=calls)


def replayed(mode: str, window: int, folder: Path) -> tuple[LedgerSums, int]:
    """Return the ledger of the session in a mode, and the number of checkpoints that it passed."""
    messages = recorded_messages()
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    answers = iter(recorded_reply(messages[i]) for i in turns)
    upstream = StandIn(window=HUGE, max_output=window // 4, responder=lambda body: next(answers))
    limits = {"context_window": window, "max_input_tokens": window, "max_output_tokens": window // 4}
    store = folder / mode / "compaction.db"
    with (
        behind(
            upstream,
            folder,
            profile={**limits, "tokenizer": "o200k_base"},
            policy={"mode": mode},
            store={"url": f"sqlite:///{store}"},
            prices=PRICES,
            records={"max": 10_000},
        ) as url,
        httpx.Client(trust_env=False, timeout=120) as http,
    ):
        for i in turns:
            body = {"model": "m", "messages": messages[:i]}
            answer = http.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
            assert answer.status_code == 200, answer.text[:500]
    total = LedgerSums()
    for _, sums in ledger_in(store):
        total.add(sums)
    return total, max(one.checkpoints for one in records_in(store))


@pytest.mark.full
@pytest.mark.parametrize("window", [65_536, 131_072])
def test_shadow_mode_predicts_compactions_tokens_and_refusals(window: int, tmp_path: Path) -> None:
    shadow, predicted = replayed("shadow", window, tmp_path)
    enforced, passed = replayed("enforce", window, tmp_path)
    print(f"\n{window}: predicted {shadow}\nenforced {enforced}\ncheckpoints {predicted}, {passed}")
    assert (shadow.would_compact, predicted) == (enforced.compacted, passed)
    assert shadow.would_avoid == 0, "the upstream answered all"
    assert (shadow.compacted, shadow.avoided, enforced.would_compact) == (0, 0, 0)
    assert abs(shadow.forecast - enforced.sent) <= 0.05 * enforced.sent
    assert shadow.received == shadow.sent == enforced.received
