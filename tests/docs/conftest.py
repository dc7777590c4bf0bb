"""A proxy whose answers the documents describe."""

from collections.abc import Callable, Iterator

import pytest

from proxy.server.loopback import serve
from tests.kit.upstream import StandIn

StartProxy = Callable[..., str]

MODEL = {"match": "*", "upstream": "main", "profile": {"context_window": 16_000, "tokenizer": "o200k_base"}}


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'compaction.db'}"


@pytest.fixture(scope="module")
def entrance(start_module_proxy: StartProxy, store_url: str) -> Iterator[str]:
    """A proxy in front of a stand-in with a small window."""
    with serve(StandIn(window=16_000, max_output=2_000).app) as upstream:
        yield start_module_proxy(upstream, {"models": [MODEL], "store": {"url": store_url}})
