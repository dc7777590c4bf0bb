"""A policy that compacts before the model gets more expensive."""

from pathlib import Path

from tests.kit.records import records_in
from tests.kit.scripted import PROFILE, behind, chat, client
from tests.kit.upstream import StandIn

PRICES = {"gpt-5": {"input_cost_per_token": 0.000001, "input_cost_per_token_above_10k_tokens": 0.000002}}
PROFILED = {**PROFILE, "context_window": 64_000}


def test_a_conversation_stays_below_the_step_of_its_models_price(tmp_path: Path) -> None:
    upstream = StandIn(window=64_000)
    policy = {"trigger": [{"price_step": True}, {"fraction": 0.85}]}
    with behind(upstream, tmp_path, profile=PROFILED, policy=policy, prices=PRICES) as url, client(url) as caller:
        for model in ("gpt-5", "another"):
            for count in (4, 5):
                caller.chat.completions.create(model=model, messages=chat(count, 1_000))
    sizes = [request.tokens for request in upstream.conversations]
    assert sizes[0] < 9_000 < sizes[0] + 2_000
    assert sizes[1] < 6_000
    assert sizes[3] > 10_000, "a model without a step isn't compacted"
    reasons = [record.reason.trigger for record in records_in(tmp_path / "store.db") if record.reason is not None]
    assert reasons == ["price_step"]
