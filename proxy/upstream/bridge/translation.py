"""The interface of both translations: one for ``/v1/messages``, one for ``/v1/responses``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from proxy.errors import ErrorShape


class Translation(Protocol):
    """One request in an API that the upstream doesn't have, as a chat request, and the way back for its answer."""

    @property
    def request(self) -> Mapping[str, Any]:
        """Return LiteLLM's chat request."""
        ...

    def whole(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the answer for a chat completion. Raises ``ValueError`` if it isn't one."""
        ...

    def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Yield the events for the chunks of a chat stream."""
        ...


class Translator(Protocol):
    """Translates the requests of one API."""

    errors: ErrorShape

    def translate(self, litellm: Any, body: dict[str, Any]) -> Translation:
        """Translate a request. Raises ``RequestError`` for a request that chat completions can't express."""
        ...

    def error(self, fields: Mapping[str, Any], status: int) -> dict[str, Any]:
        """Return the error in the API's shape. ``fields`` are those of a chat completions error."""
        ...

    def error_event(self, fields: Mapping[str, Any]) -> bytes:
        """Return the event for an error in a stream."""
        ...
