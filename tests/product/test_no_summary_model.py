"""A summary model that no entry of ``models`` has: requests get digests, and none is made ahead of need."""

from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest

from proxy.summary.store import Lease
from tests.kit.scripted import behind, chat, client
from tests.kit.upstream import StandIn

WINDOW = 16_000
PROFILE = {"context_window": WINDOW, "max_output_tokens": 2_000, "tokenizer": "o200k_base"}


def sent(folder: Path, lengths: Sequence[int]) -> tuple[list[bytes], list[str | None]]:
    """Return the prompts of a conversation that grows to these lengths, and the origins of their summaries."""
    folder.mkdir()
    upstream = StandIn(window=WINDOW)
    models = [{"match": "m", "upstream": "main", "profile": PROFILE}]
    origins = []
    with behind(upstream, folder, policy={"summary": {"model": "absent"}}, models=models) as url, client(url) as caller:
        for length in lengths:
            answer = caller.chat.completions.with_raw_response.create(model="m", messages=chat(length, 500))
            origins.append(answer.headers.get("x-compaction-summary"))
    assert upstream.summaries == []
    return [request.raw for request in upstream.conversations], origins


def test_a_digest_is_the_same_whether_or_not_the_proxy_saw_the_conversation_grow(tmp_path: Path) -> None:
    lengths = range(8, 24)
    prompts, origins = sent(tmp_path / "grown", lengths)
    assert set(origins) == {None, "digest"}
    assert origins.index("digest") > 2, "the conversation passes the sizes at which summaries are prepared"
    for place in (origins.index("digest"), len(prompts) - 1):
        assert sent(tmp_path / f"at once {place}", [lengths[place]]) == ([prompts[place]], ["digest"])


def test_the_store_is_not_asked_ahead_of_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases: list[Lease] = []
    take = Lease.take

    def noted(lease: Lease) -> Awaitable[bool]:
        leases.append(lease)
        return take(lease)

    monkeypatch.setattr(Lease, "take", noted)
    _, origins = sent(tmp_path / "grown", range(8, 24))
    needed = origins.index("digest")
    leases.clear()
    assert sent(tmp_path / "below", range(8, 8 + needed))[1] == [None] * needed
    assert leases == []
