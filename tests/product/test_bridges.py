"""Agents' sessions over one API, in front of an upstream that has only another one."""

from pathlib import Path
from typing import Any

import anthropic
import pytest

from proxy.server.loopback import serve
from tests.kit.agent_script import TURNS
from tests.kit.agent_sessions import chat_reply, chat_session, messages_session, responses_session
from tests.kit.scripted import client, proxied
from tests.kit.strict_messages import StrictMessages
from tests.kit.strict_template import StrictTemplate
from tests.kit.upstream import StandIn

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_input_tokens": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}


def settings(url: str, **upstream: Any) -> dict[str, Any]:
    return {
        "upstreams": {"main": {"base_url": f"{url}/v1", "api_key": "sk-upstream", **upstream}},
        "models": [{"match": "*", "upstream": "main", "profile": PROFILE}],
    }


def check(upstream: StandIn) -> None:
    assert upstream.faults == []
    assert upstream.others == []
    refused = [received for received in upstream.conversations if received.status != 200]
    assert len(refused) <= 1
    assert len(upstream.conversations) == TURNS + len(refused)
    assert upstream.summaries
    assert {received.headers["authorization"] for received in upstream.requests} == {"Bearer sk-upstream"}


@pytest.mark.long
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_strict_chat_template_accepts_translated_conversations(api: str, tmp_path: Path) -> None:
    """The summary and the images of results are user messages of their own, next to the client's."""
    upstream = StandIn(window=WINDOW, responder=chat_reply)
    template = StrictTemplate(upstream.app)
    with serve(template) as url:
        configuration = settings(url, speaks=["chat"])
        configuration["models"][0]["profile"] = {**PROFILE, "strict_alternation": True}
        with proxied(configuration, tmp_path) as entrance:
            if api == "responses":
                with client(entrance) as caller:
                    assert len(list(responses_session(caller, TURNS, "items", "gpt-4.1"))) == TURNS
            else:
                with anthropic.Anthropic(base_url=entrance, api_key="sk-client", max_retries=0) as claude:
                    assert len(list(messages_session(claude, TURNS, "gpt-4.1"))) == TURNS
    assert template.refused == []
    check(upstream)


@pytest.mark.long
def test_chat_completions_in_front_of_messages(tmp_path: Path) -> None:
    upstream = StrictMessages(WINDOW, check="error")
    with (
        serve(upstream.app) as url,
        proxied(settings(url, provider="openai", speaks=["messages"]), tmp_path) as entrance,
        client(entrance) as caller,
    ):
        assert len(list(chat_session(caller, TURNS, "claude-haiku-4-5"))) == TURNS
    assert upstream.faults == []
    assert upstream.chat.requests == []
    assert len(upstream.refused) <= 1
    assert len(upstream.conversations) == TURNS + len(upstream.refused)
    assert any(received.summary for received in upstream.requests)
