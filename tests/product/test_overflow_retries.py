"""How often a refused request is sent again is the policy's to say."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from proxy.demo.replies import Reply
from proxy.demo.serving import serve
from proxy.demo.upstream import StandIn
from tests.kit.scripted import chat, client, proxied

REFUSAL = Reply(status=400, error={"error": {"message": "Prompt is too long.", "type": "invalid_request_error"}})


@pytest.mark.parametrize(("retries", "sent"), [(0, 1), (1, 2), (None, 3), (4, 5)])
def test_so_often_is_a_refused_request_sent_again(retries: int | None, sent: int, tmp_path: Path) -> None:
    upstream = StandIn(window=64_000, responder=lambda body: REFUSAL)
    with serve(upstream.app) as url:
        settings = {
            "upstreams": {"main": {"base_url": f"{url}/v1"}},
            "policies": {"default": {} if retries is None else {"overflow_retries": retries}},
        }
        with (
            proxied(settings, tmp_path) as entrance,
            client(entrance) as caller,
            pytest.raises(
                openai.BadRequestError, match=r"Prompt is too long.*could not make the request small"
            ) as raised,
        ):
            caller.chat.completions.create(model="m", messages=chat(40, 700))
    assert raised.value.response.headers["x-compaction-retries"] == str(sent - 1)
    sizes = [request.tokens for request in upstream.conversations]
    assert len(sizes) == sent
    assert sizes == sorted(set(sizes), reverse=True), "each is smaller than the one before"
