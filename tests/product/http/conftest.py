"""One upstream and one proxy for all tests of a module. Each test sets the answer."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.kit.client import StartProxy
from tests.kit.raw_upstream import RawUpstream, Script, Stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Answers by a script for as long as a block runs, from an upstream that stays the same."""
    with RawUpstream() as upstream:

        @contextlib.contextmanager
        def playing(script: Script) -> Iterator[RawUpstream]:
            upstream.script = script
            upstream.arrived = []
            yield upstream

        yield playing


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    """An upstream that answers everything with an empty object."""
    with RawUpstream() as running:
        yield running


@pytest.fixture(scope="module")
def start_proxy(start_module_proxy: StartProxy) -> StartProxy:
    """Starts proxies; one that is asked for again with the same configuration is there already."""
    running: dict[str, str] = {}

    def start(
        upstream: str, overrides: Mapping[str, Any] | None = None, *, wrap: Callable[[ASGIApp], ASGIApp] | None = None
    ) -> str:
        if wrap is not None:
            return start_module_proxy(upstream, overrides, wrap=wrap)
        key = json.dumps([upstream, overrides], sort_keys=True)
        if key not in running:
            running[key] = start_module_proxy(upstream, overrides)
        return running[key]

    return start
