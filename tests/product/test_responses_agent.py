"""An agent's session over ``/v1/responses`` through the official SDK, at an upstream that rejects malformed input."""

from pathlib import Path
from typing import get_args

import pytest

from tests.kit.agent_script import TURNS
from tests.kit.agent_sessions import Style, responses_session
from tests.kit.combinations import combined
from tests.kit.scripted import behind, client
from tests.kit.strict_responses import StrictResponses

WINDOW = 16_000
MODEL = "gpt-4.1"
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}


@pytest.mark.long
@pytest.mark.parametrize("style", combined(2, get_args(Style)))
def test_an_agent_never_fails_at_16k(style: Style, tmp_path: Path) -> None:
    upstream = StrictResponses(WINDOW)
    with behind(upstream.app, tmp_path, profile=PROFILE) as url, client(url) as caller:
        assert len(list(responses_session(caller, TURNS, style, MODEL))) == TURNS
    assert upstream.faults == []
    assert upstream.chat.faults == []
    assert len(upstream.refused) <= 1
    assert len(upstream.conversations) == TURNS + len(upstream.refused)
    assert upstream.chat.summaries, "the session must be long enough for a summary"
    # The open round of a checkpoint keeps its reasoning, and the server drops it.
    dropped = {id_ for received in upstream.conversations for id_ in received.dropped}
    assert len(dropped) <= 2 * (len(upstream.chat.summaries) + 1)
    if style != "without_ids":
        kept = sum(len(received.reasoning) - len(received.dropped) for received in upstream.conversations)
        assert kept > TURNS, "reasoning since the last checkpoint stays"
