"""One request, and the upstream's script for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.compare.setup import key
from tests.kit.client import JSON
from tests.kit.raw_upstream import Arrived, Step
from tests.kit.three_apis import PATHS


@dataclass(frozen=True, slots=True)
class Reply:
    """A scripted answer. It's used once, for the first request that ``when`` accepts after the replies before it."""

    steps: Sequence[Step]
    when: Callable[[Arrived], bool] = lambda arrived: True


@dataclass(frozen=True, slots=True)
class Case:
    """One request. ``replies`` are the upstream's first answers to the conversation; later ones are completions.

    ``summary`` replaces the summaries that the upstream writes. ``generated`` cases count for the share of recoveries.
    """

    group: str
    name: str
    body: bytes
    policy: str = "default"
    replies: tuple[Reply, ...] = ()
    api: str = "chat"
    summary: Sequence[Step] | None = None
    generated: bool = False

    @property
    def path(self) -> str:
        """The path of the API."""
        return PATHS[self.api]

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers that the client sends."""
        secret = key(self.policy)
        if self.api == "messages":
            return [JSON, ("x-api-key", secret), ("anthropic-version", "2023-06-01")]
        return [JSON, ("authorization", f"Bearer {secret}")]
