"""A proxy that translates for chat completions, shared by the tests of answers in unusual forms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.odd_answers import Upstream
from tests.product.properties.test_odd_answers import Clients
from tests.product.test_bridged_answers import LARGE, clients, entrance


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    upstream = Upstream()
    folder = tmp_path_factory.mktemp("proxy")
    with entrance(upstream.app, folder, LARGE, speaks=["chat"]) as url, clients(url) as (claude, gpt):
        yield upstream, claude, gpt
